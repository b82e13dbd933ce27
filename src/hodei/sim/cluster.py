"""Clusters to simulate: a file with groups of equal nodes, or `100x64` for so many nodes with so many cores each."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.config import NodeConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.node import Node
from hodei.model.resources import MEMORY, parse_quantity
from hodei.sim.traces.workload import BACKEND, machine
from hodei.wiring import instant_node, node_offer

MOST_NODES = 1_000_000
_SHORT = re.compile(r"(?P<count>\d+)x(?P<cpus>\d+)(?:x(?P<memory>\d\S*))?")
_USUAL_MEMORY_PER_CPU = 4 * 2**30
_HINT = "write groups like {name: big, count: 100, cpu: 64, memory: 256Gi}; see docs/how-to/replay-a-trace.md"
# What else a server's configuration file has; such a file can be given as it is.
_OTHERS = ("server", "scheduling")


class NodeGroup(NodeConfig, frozen=True, forbid_unknown_fields=True):
    """`count` nodes that are equal but for their names: NAME, or NAME-00, NAME-01 and so on. The rest means what it does
    in a server's configuration."""

    count: int = 1


def read_cluster(text: str) -> list[Node]:
    """The nodes of a file, or of the short form COUNTxCPUS[xMEMORY]; InvalidInput says what is wrong."""
    path = Path(text)
    short = _SHORT.fullmatch(text)
    if short and not path.exists():
        return _short(text, int(short["count"]), int(short["cpus"]), short["memory"] or "")
    groups = _groups(path)
    total = sum(max(group.count, 0) for group in groups)
    if not 1 <= total <= MOST_NODES:
        raise InvalidInput(f"{path} has {total:,} nodes", hint=f"give from 1 to {MOST_NODES:,}")
    nodes = [node for group in groups for node in _nodes(group, path)]
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path} has two nodes called {twice!r}", hint="give each group a name of its own")
    return nodes


def _short(text: str, count: int, cpus: int, memory: str) -> list[Node]:
    if not 1 <= count <= MOST_NODES or not 1 <= cpus <= 1_000_000:
        raise InvalidInput(f"a cluster {text!r}", hint="write it like 100x64: nodes, then cores of each")
    per_cpu = parse_quantity(memory) // cpus if memory else _USUAL_MEMORY_PER_CPU
    return machine(count * cpus, per_node=cpus, more={MEMORY: per_cpu})


def _groups(path: Path) -> list[NodeGroup]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = f"name a file, or write 100x64 for 100 nodes of 64 cores; in a file {_HINT}"
        raise InvalidInput(f"cannot read the cluster {path}: {error.strerror}", hint=hint) from error
    found = _toml(raw, path) if path.suffix == ".toml" else _yaml(raw, path)
    if isinstance(found, dict):
        for key in found:
            if key not in ("nodes", *_OTHERS):
                raise InvalidInput(f"{path}: unknown key {key!r}{did_you_mean(str(key), ['nodes'])}", hint=_HINT)
        found = found.get("nodes", [])
    if not isinstance(found, list) or not found:
        raise InvalidInput(f"{path} lists no nodes", hint=_HINT)
    return [_group(group, place, path) for place, group in enumerate(found, 1)]


def _group(group: Any, place: int, path: Path) -> NodeGroup:
    try:
        return msgspec.convert(group, NodeGroup)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `([^`]*)`", str(error))
        meant = did_you_mean(unknown[1], NodeGroup.__struct_fields__) if unknown else ""
        raise InvalidInput(f"{path}, group {place}: {error}{meant}", hint=_HINT) from error


def _toml(raw: bytes, path: Path) -> Any:
    try:
        return tomllib.loads(raw.decode())
    except ValueError as error:
        raise InvalidInput(f"{path} is not TOML: {error}", hint=_HINT) from error


def _yaml(raw: bytes, path: Path) -> Any:
    documents = load_yaml(raw, name=str(path))
    if len(documents) > 1:
        raise InvalidInput(f"{path} has {len(documents)} documents", hint="keep one list of groups")
    return documents[0] if documents else []


def _nodes(group: NodeGroup, path: Path) -> list[Node]:
    if group.count < 1:
        raise InvalidInput(f"{path}: group {group.name!r} has a count of {group.count}", hint="give 1 or more")
    one = structs.replace(instant_node(node_offer(group)), backend=BACKEND, kind=BACKEND)
    if group.count == 1:
        return [one]
    width = len(str(group.count - 1))
    return [structs.replace(one, name=f"{group.name}-{number:0{width}}") for number in range(group.count)]
