"""`sinfo`: the nodes by partition and state. A partition is Slurm's own on its backends, elsewhere the backend."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from hodei.backends.slurm_variables import folded_hosts
from hodei.cli.shims.rows import Fields, Refused, lines, read

_USUAL = "%9P %.5a %.10l %.6D %.6t %N"
_BY_NODE = "%10N %.6D %.9P %6t"
_LABEL = "slurm.hodei.io/queue"


class Group(NamedTuple):
    partition: str
    state: str
    nodes: list[str]
    cpus: str
    memory: str


_SHORT = {"idle": "idle", "mixed": "mix", "allocated": "alloc", "drained": "drain", "draining": "drng", "down": "down"}
_FIELDS: Fields[Group] = {
    "P": ("PARTITION", lambda group: group.partition),
    "R": ("PARTITION", lambda group: group.partition),
    "a": ("AVAIL", lambda group: "up"),
    "l": ("TIMELIMIT", lambda group: "infinite"),
    "D": ("NODES", lambda group: len(group.nodes)),
    "t": ("STATE", lambda group: _SHORT.get(group.state, group.state)),
    "T": ("STATE", lambda group: group.state),
    "N": ("NODELIST", lambda group: folded_hosts(group.nodes)),
    "n": ("HOSTNAMES", lambda group: ",".join(group.nodes)),
    "c": ("CPUS", lambda group: group.cpus),
    "m": ("MEMORY", lambda group: group.memory),
}


def run(words: list[str]) -> int:
    given = read(
        words, "h/noheader N/Node l/long o/format= p/partition= n/nodes= t/states= a/all s/summarize v/verbose"
    )
    if given.rest:
        raise Refused(f"error: Unrecognized option: {given.rest[0]}")
    from hodei.client import Client

    with Client() as client:
        nodes = client.nodes()
    groups: dict[object, Group] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        partition, state = node.labels.get(_LABEL) or node.backend, _state(node.state, node.used, node.capacity)
        if given.several("partition") and partition not in given.several("partition"):
            continue
        if given.several("nodes") and node.name not in given.several("nodes"):
            continue
        if given.several("states") and not {state, _SHORT.get(state, state)} & {
            one.lower() for one in given.several("states")
        }:
            continue
        key = node.name if "Node" in given else (partition, state)
        fresh = Group(partition, state, [], node.capacity.get("cpu", "0"), node.capacity.get("memory", "0"))
        groups.setdefault(key, fresh).nodes.append(node.name)
    if "long" in given:
        sys.stdout.write(time.strftime("%a %b %d %H:%M:%S %Y\n"))
    format = given.get("format") or (_BY_NODE if "Node" in given else _USUAL)
    for line in lines(format, _FIELDS, groups.values(), header="noheader" not in given):
        sys.stdout.write(f"{line}\n")
    return 0


def _state(state: str, used: dict[str, str], capacity: dict[str, str]) -> str:
    from hodei.model.resources import parse_quantity

    taken, there = (parse_quantity(amounts.get("cpu", "0"), scale=1000) for amounts in (used, capacity))
    if state == "cordoned":
        return "draining" if taken else "drained"
    if state != "ready":
        return "down"
    return "idle" if not taken else "allocated" if taken >= there else "mixed"
