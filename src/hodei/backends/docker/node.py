"""A Docker host as a node: what its daemon says of it, within what the operator says of it."""

from __future__ import annotations

from typing import Any

from hodei.backends.docker.container_spec import address_of
from hodei.backends.docker.settings import CONTAINERS, Host
from hodei.model.node import Location, Node
from hodei.model.resources import CPU, MEMORY

_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}


def node_of(host: Host, info: dict[str, Any], images: dict[str, int], *, backend: str, problem: str) -> Node:
    """`problem`: why it can take nothing now, or ""."""
    machine = str(info.get("Architecture", ""))
    measured = {CPU: int(info.get("NCPU", 0)) * 1000, MEMORY: int(info.get("MemTotal", 0))}
    said = host.amounts()
    capacity = {**measured, **said}
    for name, amount in measured.items():
        if info and name in said:
            capacity[name] = min(amount, said[name])
    if host.max_containers:
        capacity[CONTAINERS] = host.max_containers
    return Node(
        name=host.name,
        backend=backend,
        kind="docker",
        capacity=capacity,
        labels={
            "hodei.io/hostname": host.name,
            "kubernetes.io/hostname": host.name,
            "kubernetes.io/os": str(info.get("OSType") or "linux"),
            "kubernetes.io/arch": _ARCH.get(machine, machine),
            **_own_labels(info),
            **host.labels,
        },
        taints=host.taints,
        arch=machine,
        gpu_type=host.gpu_type,
        location=Location(host.region, host.zone, host.datacenter, host.rack).at(host.lat, host.lng),
        cost_milli=round(host.cost * 1000),
        ready=not problem,
        not_ready_reason=problem,
        version=str(info.get("ServerVersion", "")),
        address=address_of(host),
        images=images,
    )


def _own_labels(info: dict[str, Any]) -> dict[str, str]:
    """Those that the daemon was started with (`dockerd --label`)."""
    out = {}
    for text in info.get("Labels") or ():
        name, _, value = str(text).partition("=")
        if name:
            out[f"docker.hodei.io/{name}"] = value
    return dict(sorted(out.items()))
