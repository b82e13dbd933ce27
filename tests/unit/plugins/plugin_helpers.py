"""Calls one plugin for one job: which nodes it refuses and why, and how it scores the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builders import a_job_spec, amounts
from hodei.engine.nodes import Table
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.model.job import JobSpec
from hodei.model.node import Node

VIEW = View(0)


def a_table(nodes: Sequence[Node], used: Mapping[str, Mapping[str, Any]] | None = None) -> Table:
    """`used={"n1": {"cpu": "2"}}` puts one run of that size on n1."""
    table = Table(nodes)
    table.settle()
    for name, taken in (used or {}).items():
        table.place(table.row[name], amounts(**taken))
    return table


def a_member(spec: JobSpec | None = None, **fields: Any) -> Member:
    spec = spec or a_job_spec("member", **fields)
    return Member(spec, spec.tasks[0])


def refused(plugin: Any, member: Member, table: Table) -> dict[str, list[str]]:
    """The refused nodes by "code: text"."""
    runner = Runner()
    out: dict[str, list[str]] = {}
    for mask, reason in runner.refusals(plugin, member, table.view(), VIEW):
        names = [table.names[row] for row in mask.nonzero()[0]]
        if names:
            out[f"{reason.code}: {reason.text}"] = names
    assert not runner.faults
    return out


def scores(plugin: Any, member: Member, table: Table) -> dict[str, int] | None:
    runner = Runner()
    found = runner.score(plugin, member, table.view(), VIEW)
    if found is not None and hasattr(plugin, "normalize"):
        found = runner.normalize(plugin, found, ~table.view().none())
    assert not runner.faults
    return None if found is None else dict(zip(table.names, found.tolist(), strict=True))


def best(plugin: Any, member: Member, table: Table) -> str:
    """Ties go to the first name, as in the engine."""
    found = scores(plugin, member, table)
    assert found is not None
    return max(sorted(found), key=lambda name: found[name])
