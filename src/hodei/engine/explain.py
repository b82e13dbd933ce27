"""Explains refusals: every objection of every filter, by the plugin calls that decide; and changes that could help.

All filters run, not only up to the first refusal. The nearest miss is the node with the fewest objections, then the
smallest shortage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.profile import Profile
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.model.explanation import Blocker, ChangeKind, NearestMiss
from hodei.model.job import Reason, TaskSpec, Verdict
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, scale_of

NODES_SHOWN = 50
_VERDICT_NODES = 5


class Objections(Struct):
    """The objections of all filters to one member: a mask of nodes per reason."""

    pairs: list[tuple[Mask, Reason]]
    refused: Mask

    @property
    def for_capacity(self) -> bool:
        """Whether preemption could make some node feasible."""
        closed = np.zeros_like(self.refused)
        for mask, reason in self.pairs:
            if not reason.evictable:
                closed |= mask
        return bool((self.refused & ~closed).any())

    @property
    def feasible(self) -> int:
        return int((~self.refused).sum())


def objections(profile: Profile, runner: Runner, member: Member, table: Table, view: View) -> Objections:
    nodes = table.view()
    pairs: list[tuple[Mask, Reason]] = []
    refused = nodes.none()
    for plugin in profile.filters:
        for mask, reason in runner.refusals(plugin, member, nodes, view):
            if np.count_nonzero(mask):
                pairs.append((mask, reason))
                refused = refused | mask
    if len(pairs) > 1:
        pairs.sort(key=lambda pair: (-int(np.count_nonzero(pair[0])), pair[1].code, pair[1].text))
    return Objections(pairs, refused)


def verdicts(found: Objections, table: Table) -> tuple[Verdict, ...]:
    """The short form in a plan."""
    return tuple(
        Verdict(reason, int(np.count_nonzero(mask)), _names(table, mask, _VERDICT_NODES))
        for mask, reason in found.pairs
    )


def blockers(found: Objections, table: Table, task: str) -> tuple[Blocker, ...]:
    """The long form in `why`."""
    return tuple(
        Blocker(
            reason.code,
            reason.text,
            reason.plugin,
            task,
            int(mask.sum()),
            _names(table, mask, NODES_SHOWN),
            reason.hint,
        )
        for mask, reason in found.pairs
    )


def nearest_miss(found: Objections, profile: Profile, member: Member, table: Table, view: View) -> NearestMiss | None:
    if not found.pairs or not table.names or not found.refused.all():
        return None
    count: Ints = np.zeros(len(table.names), dtype=np.int64)
    for mask, _ in found.pairs:
        count += mask
    rows = np.flatnonzero(count == count.min())
    lacking = {int(row): _lacks(profile, member, table, int(row), view) for row in rows[:NODES_SHOWN]}
    row = min(lacking, key=lambda row: (lacking[row][0], table.names[row]))
    texts = [lacking[row][1]] if lacking[row][1] else []
    texts += [reason.text for mask, reason in found.pairs if mask[row] and reason.plugin not in lacking[row][2]]
    return NearestMiss(table.names[row], "; ".join(texts), member.task.name)


def shortage(profile: Profile, member: Member, table: Table, row: int, view: View) -> str:
    """What one node lacks, as text; "" if nothing measurable."""
    return _lacks(profile, member, table, row, view)[1]


def _lacks(profile: Profile, member: Member, table: Table, row: int, view: View) -> tuple[int, str, set[str]]:
    """The shortage measured by plugins with `lacks`: size, text, and the plugins' names."""
    size, texts, by = 0, [], set()
    for plugin in profile.filters:
        measure = getattr(plugin, "lacks", None)
        if measure is not None:
            amount, text = measure(member, table.view(slice(row, row + 1)), view)
            if amount:
                size += amount
                texts.append(text)
                by.add(plugin.name)
    return size, "; ".join(texts), by


def summary(verdicts: Sequence[Verdict], nodes: int) -> str:
    """One line in the style of Kubernetes: `0/3 nodes are available: 2 Insufficient cpu, ...`."""
    gang_wide = [verdict.reason.text for verdict in verdicts if not verdict.count]
    if gang_wide:
        return "; ".join(gang_wide)
    if not nodes:
        return "no nodes have joined yet"
    parts = ", ".join(f"{verdict.count} {verdict.reason.text}" for verdict in verdicts)
    return f"0/{nodes} nodes are available: {parts}"


def _names(table: Table, mask: Mask, limit: int) -> tuple[str, ...]:
    rows = np.flatnonzero(mask[:1024])
    if len(rows) < limit:
        rows = np.flatnonzero(mask)
    return tuple([table.names[row] for row in rows[:limit]])


# Single changes to a job that could let it start: proposed by plugins, tried by `control.explain.suggestions`.
#
# A plugin that can propose changes has the method `suggest(member, nodes, view) -> Iterable[Change]`, where `nodes` are
# those that no other plugin refuses (for a layout plugin: all). A proposal that does not help is dropped after its trial.

_BINARY = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))
# Every job needs some of these.
_INDISPENSABLE = frozenset({CPU, MEMORY, STORAGE})


class Change(Struct, frozen=True):
    """`fields` of the task (of the job if `whole_job`) with their new values. `cut`: how much of the request is given
    up, in ten-thousandths; `amount`: the new amount, for changes that have a size."""

    kind: ChangeKind
    text: str
    fields: dict[str, Any]
    whole_job: bool = False
    cut: int = 0
    amount: int = 0
    resource: str = ""

    def with_amount(self, task: TaskSpec, amount: int) -> Change:
        return fewer_members(task, amount) if self.kind == "members" else lower_request(task, self.resource, amount)


def lower_request(task: TaskSpec, resource: str, amount: int) -> Change:
    """Request at most `amount`, rounded down to a readable number; if that is 0, drop the resource."""
    requested = task.request[resource]
    less = round_readable(resource, amount, requested)
    subject = f"{resource} {format_exact(resource, requested)}"
    if not less:
        rest = {name: other_amount for name, other_amount in task.request.items() if name != resource}
        limits = {name: other_amount for name, other_amount in task.limits.items() if name != resource}
        without: dict[str, Any] = {"request": rest, "limits": limits}
        if resource == GPU and task.gpu_type:
            without["gpu_type"] = ""
        return Change("drop", f"drop {subject}", without, cut=10_000, resource=resource)
    return Change(
        "lower", f"{subject} to {format_exact(resource, less)}", {"request": {**task.request, resource: less}},
        cut=(requested - less) * 10_000 // requested, amount=less, resource=resource,
    )  # fmt: skip


def fewer_members(task: TaskSpec, count: int) -> Change:
    """Fewer members; for an elastic task a lower `min_count`."""
    requested, members = task.needed, "member" if count == 1 else "members"
    cut = (requested - count) * 10_000 // requested
    if task.min_count:
        text = f"start with {count} {members} instead of {requested}"
        return Change("members", text, {"min_count": count}, cut=cut, amount=count)
    return Change("members", f"{count} {members} instead of {requested}", {"count": count}, cut=cut, amount=count)


def drop_placement_rules(task: TaskSpec) -> list[Change]:
    """Drop each affinity, spread or port rule, one at a time."""
    out = []
    for field in ("job_affinity", "job_anti_affinity"):
        rules = getattr(task, field)
        for place, term in enumerate(rules.required):
            rest = (*rules.required[:place], *rules.required[place + 1 :])
            word = field.replace("_", " ").replace("anti ", "anti-")
            out.append(Change("drop", f"drop {word} {term}", {field: structs.replace(rules, required=rest)}))
    for place, rule in enumerate(task.spread):
        if rule.hard:
            soft = (*task.spread[:place], structs.replace(rule, hard=False), *task.spread[place + 1 :])
            out.append(Change("drop", f"spread over {rule.topology} as a preference only", {"spread": soft}))
    for place, port in enumerate(task.ports):
        rest_of = (*task.ports[:place], *task.ports[place + 1 :])
        out.append(Change("drop", f"drop host port {port.port}/{port.protocol}", {"ports": rest_of}))
    return out


def sole_refusals(pairs: Sequence[tuple[Mask, Reason]]) -> list[bool]:
    """For each refusal, whether it is the only one for some node."""
    out = []
    for place, (mask, _) in enumerate(pairs):
        left = mask
        for other, _ in (*pairs[:place], *pairs[place + 1 :]):
            left = left & ~other
        out.append(bool(left.any()))
    return out


def round_readable(resource: str, amount: int, requested: int) -> int:
    """The largest readable amount up to `amount`. Whole GPUs stay whole; 0 only for resources that a job can drop."""
    if resource == GPU and requested % 1000 == 0:
        return amount // 1000 * 1000
    if scale_of(resource) == 1000:
        step = 100 if amount >= 1000 else 10 if amount >= 100 else 1
    elif resource in (MEMORY, STORAGE):
        step = 2 ** max(amount.bit_length() - 6, 0)
    else:
        step = 1
    return max(amount // step * step, 1 if resource in _INDISPENSABLE else 0)


def format_exact(resource: str, amount: int) -> str:
    """An exact amount in few digits: `3.7`, `60Gi`, `15.75Gi`."""
    if scale_of(resource) == 1000:
        return f"{amount / 1000:.15g}"
    if resource in (MEMORY, STORAGE):
        for suffix, size in _BINARY:
            if amount >= size and amount * 1000 % size == 0:
                return f"{amount / size:.15g}{suffix}"
    return str(amount)
