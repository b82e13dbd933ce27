"""Places one gang with all built-in plugins and returns the nodes of its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builders import a_node
from hodei.engine.cycle import Engine
from hodei.engine.plan import Refusal
from hodei.engine.points import Layouts
from hodei.engine.view import Gang, gang_of
from hodei.model.job import JobSpec
from hodei.model.node import Location, Node
from hodei.plugins.registry import build_profile
from unit.plugins.plugin_helpers import VIEW, a_table


def racked(racks: dict[str, str], cpu: int = 4, **fields: Any) -> list[Node]:
    """`racked({"r1": "a b", "": "c"})`: nodes a and b in rack r1, c in none."""
    return [
        a_node(name, cpu, location=Location(rack=rack), **fields) for rack, names in racks.items() for name in names.split()
    ]  # fmt: skip


def on_backends(backends: dict[str, str], cpu: int = 4, **fields: Any) -> list[Node]:
    return [
        a_node(name, cpu, backend=backend, **fields) for backend, names in backends.items() for name in names.split()
    ]


def an_engine(nodes: Sequence[Node], used: dict[str, Any] | None = None, **profile: Any) -> Engine:
    """`used={"a": 2}`: two cores of a are taken."""
    taken = {name: {"cpu": cpu} for name, cpu in (used or {}).items()}
    return Engine(a_table(nodes, taken), {"default": build_profile("default", **profile)})


def a_gang(engine: Engine, spec: JobSpec, **fields: Any) -> Gang:
    gang = gang_of(1, spec, 0)
    for field, value in fields.items():
        setattr(gang, field, value)
    engine.profile(gang).admit(gang)
    return gang


def placed(engine: Engine, gang: Gang) -> dict[str, list[str]] | str:
    """The nodes of each task in order; for a refusal its first code and text. The engine must have no faults."""
    result = engine.try_gang(gang, VIEW)
    assert not engine.runner.faults, engine.runner.faults
    if isinstance(result, Refusal):
        reason = result.verdicts[0].reason
        return f"{reason.code}: {reason.text}"
    out: dict[str, list[str]] = {}
    for one in result:
        out.setdefault(one.member.task.name, []).append(one.node.name)
    engine.withdraw(gang, result)
    return {task: sorted(names) for task, names in out.items()}


def options(engine: Engine, gang: Gang) -> list[list[str]]:
    """For each layout the nodes that each kind of member may go to, as "a b"."""
    found = engine.layouts(gang, VIEW)
    assert isinstance(found, Layouts)
    names = engine.table.names
    return [[" ".join(names[row] for row in rows.nonzero()[0]) for rows in layout.rows] for layout in found.options]
