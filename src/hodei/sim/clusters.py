"""Files with nodes for the simulator: a cluster, and capacity that can be ordered."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from hodei.configuration import node_offer
from hodei.control.capacity.scaling import CapacityPolicy, capacity_policy
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.config import CapacityConfig, NodeConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.node import Node
from hodei.model.resources import MEMORY, parse_duration_ms, parse_quantity
from hodei.sim.traces.workload import BACKEND, uniform_nodes
from hodei.wiring import instant_node

MAX_NODES, MAX_OFFERED = 1_000_000, 10_000
_MAX_LOSSES = 1000
_SHORT = re.compile(r"(?P<count>\d+)x(?P<cpus>\d+)(?:x(?P<memory>\d\S*))?")
_MEMORY_PER_CPU = 4 * 2**30
_CLUSTER_HINT = "write groups like {name: big, count: 100, cpu: 64, memory: 256Gi}; see docs/how-to/replay-a-trace.md"
_OFFER_HINT = (
    "write groups like {name: small, count: 50, cpu: 8, memory: 32Gi, cost: 0.4, startup: 90s}; "
    "see docs/how-to/elastic-capacity.md"
)
# Other tables of a server's configuration file, so that the file can be given as it is.
_OTHER_TABLES = ("server", "scheduling")


class NodeGroup(NodeConfig, frozen=True, forbid_unknown_fields=True):
    """`count` equal nodes called NAME, or NAME-00, NAME-01 and so on. Other keys are those of a server's configuration."""

    count: int = 1


_Group = TypeVar("_Group", bound=NodeGroup)


class OfferedGroup(NodeGroup, frozen=True, forbid_unknown_fields=True):
    """`count` equal nodes that can be ordered, for `cost` an hour. `startup`: until one is ready; `spot`: the provider takes
    them back, `losses_per_hour` times an hour on average. `fixed`: how many of them a fixed cluster has instead; without it
    all, and none of spot nodes."""

    startup: str = "2m"
    spot: bool = False
    losses_per_hour: float = 0.0
    fixed: int | None = None


class Offer(Struct, frozen=True):
    """`nodes` can be ordered; `fixed`: those of a fixed cluster for the same work."""

    nodes: list[Node]
    fixed: list[Node]
    capacity: CapacityPolicy


def read_cluster(text: str) -> list[Node]:
    """The nodes of a file with groups of equal nodes, or of the short form COUNTxCPUS[xMEMORY]."""
    path = Path(text)
    short = _SHORT.fullmatch(text)
    if short and not path.exists():
        return _short_cluster(text, int(short["count"]), int(short["cpus"]), short["memory"] or "")
    found = _read(path, "cluster", f"name a file, or write 100x64 for 100 nodes of 64 cores; in a file {_CLUSTER_HINT}")
    if isinstance(found, dict):
        found = _pick(found, "nodes", _OTHER_TABLES, path, _CLUSTER_HINT)
    groups = _groups(found, NodeGroup, path, _CLUSTER_HINT)
    return _all_nodes([_nodes_of(group, path) for group in groups], path, MAX_NODES)


def read_offer(path: Path) -> Offer:
    """Groups of nodes that can be ordered, and the settings of the planner in a table `capacity`."""
    found = _read(path, "offer", _OFFER_HINT)
    settings: object = {}
    if isinstance(found, dict):
        settings = found.get("capacity", {})
        found = _pick(found, "groups", ("capacity",), path, _OFFER_HINT)
    groups = _groups(found, OfferedGroup, path, _OFFER_HINT)
    fixed, offered = [], []
    for group in groups:
        nodes = [_offered_node(group, node, path) for node in _nodes_of(group, path)]
        count = group.fixed if group.fixed is not None else 0 if group.spot else group.count
        if not 0 <= count <= group.count:
            raise InvalidInput(f"{path}: group {group.name!r} has fixed = {count}", hint=f"from 0 to {group.count}")
        offered.append(nodes)
        fixed += [structs.replace(node, group="", phase="ready") for node in nodes[:count]]
    try:
        policy = capacity_policy(msgspec.convert(settings, CapacityConfig))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path}, capacity: {error}", hint="the keys are those of [scheduling.capacity]") from error
    return Offer(_all_nodes(offered, path, MAX_OFFERED), fixed, policy)


def _offered_node(group: OfferedGroup, node: Node, path: Path) -> Node:
    if not 0 <= group.losses_per_hour <= _MAX_LOSSES:
        raise InvalidInput(
            f"{path}: group {group.name!r} has losses_per_hour = {group.losses_per_hour}",
            hint=f"from 0 to {_MAX_LOSSES}",
        )
    try:
        startup_ms = parse_duration_ms(group.startup)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: startup of group {group.name!r}: {error.message}", hint=error.hint) from error
    return structs.replace(
        node, phase="potential", group=group.name, startup_ms=startup_ms, spot=group.spot,
        losses_milli=round(group.losses_per_hour * 1_000_000),
    )  # fmt: skip


def _all_nodes(groups: Sequence[list[Node]], path: Path, most: int) -> list[Node]:
    nodes = [node for group in groups for node in group]
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path} has two nodes called {duplicate!r}", hint="give each group a name of its own")
    if len(nodes) > most:
        raise InvalidInput(f"{path} has {len(nodes):,} nodes", hint=f"give from 1 to {most:,}")
    return nodes


def _short_cluster(text: str, count: int, cpus: int, memory: str) -> list[Node]:
    if not 1 <= count <= MAX_NODES or not 1 <= cpus <= 1_000_000:
        raise InvalidInput(f"invalid cluster {text!r}", hint="write it like 100x64: nodes, then cores of each")
    per_cpu = parse_quantity(memory) // cpus if memory else _MEMORY_PER_CPU
    return uniform_nodes(count * cpus, per_node=cpus, per_unit={MEMORY: per_cpu})


def _read(path: Path, what: str, hint: str) -> object:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read the {what} {path}: {error.strerror}", hint=hint) from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(raw.decode())
        except ValueError as error:
            raise InvalidInput(f"{path} is not TOML: {error}", hint=hint) from error
    documents = load_yaml(raw, name=str(path))
    if len(documents) > 1:
        raise InvalidInput(f"{path} has {len(documents)} documents", hint="keep one list of groups")
    return documents[0] if documents else []


def _pick(found: Mapping[Any, Any], key: str, others: Sequence[str], path: Path, hint: str) -> object:
    for name in found:
        if name not in (key, *others):
            raise InvalidInput(f"{path}: unknown key {name!r}{did_you_mean(str(name), [key])}", hint=hint)
    return found.get(key, [])


def _groups(found: object, kind: type[_Group], path: Path, hint: str) -> list[_Group]:
    if not isinstance(found, list) or not found:
        raise InvalidInput(f"{path} lists no nodes", hint=hint)
    groups = []
    for number, group in enumerate(found, 1):
        try:
            groups.append(msgspec.convert(group, kind))
        except msgspec.ValidationError as error:
            unknown = re.search(r"unknown field `([^`]*)`", str(error))
            guess = did_you_mean(unknown[1], kind.__struct_fields__) if unknown else ""
            raise InvalidInput(f"{path}, group {number}: {error}{guess}", hint=hint) from error
    return groups


def _nodes_of(group: NodeGroup, path: Path) -> list[Node]:
    if not 1 <= group.count <= MAX_NODES:
        raise InvalidInput(
            f"{path}: group {group.name!r} has a count of {group.count:,}", hint=f"give from 1 to {MAX_NODES:,}"
        )
    try:
        node = structs.replace(instant_node(node_offer(group)), backend=BACKEND, kind=BACKEND)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=error.hint or _CLUSTER_HINT) from error
    if group.count == 1:
        return [node]
    width = len(str(group.count - 1))
    return [structs.replace(node, name=f"{group.name}-{number:0{width}}") for number in range(group.count)]
