"""Configurations with virtual nodes, and jobs that use their capacity."""

from __future__ import annotations

from typing import Any

from real.installation import Installation


def nodes(*given: str) -> str:
    """The configuration of nodes, each given as `name cpu memory [more TOML; ...]`."""
    out = ""
    for text in given:
        name, cpu, memory, *more = text.split(" ", 3)
        out += f'[[nodes]]\nname = "{name}"\ncpu = "{cpu}"\nmemory = "{memory}"\n'
        out += "\n".join(part.strip() for part in " ".join(more).split(";")) + "\n"
    return out


THREE = nodes(
    'a 2 2Gi labels = {zone = "east", disk = "ssd"}',
    'b 2 2Gi labels = {zone = "west"}',
    'c 4 4Gi taints = ["gpu=reserved:NoSchedule"]; gpu = 1; gpu_type = "t4"',
)


def node_of(installation: Installation, id: int) -> str:
    """Wait until the job has succeeded, and return the node of its last run."""
    (detail,) = installation.ended(id)
    assert detail.job.state == "succeeded", detail.job.reason
    return detail.runs[-1].node


def filler(installation: Installation, **fields: Any) -> int:
    """Run a job until it is cancelled."""
    id = installation.submit("sleep", "600", **fields)
    installation.until_state(id, "running")
    return id


def cancel(installation: Installation, *ids: int) -> None:
    installation.ok("cancel", *map(str, ids))
    installation.ended(*ids)


def why(installation: Installation, id: int) -> Any:
    return installation.ok("why", str(id), "-o", "json").json
