"""Single changes to a job that could let it start: proposed by plugins, tried by `control.explain.suggestions`.

A plugin that can propose changes has the method

suggest(member, nodes, view) -> Iterable[Change]

where `nodes` are those that no other plugin refuses (for a layout plugin: all). A proposal that does not help is
dropped after its trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from hodei.engine.nodes import Mask
from hodei.model.explanation import ChangeKind
from hodei.model.job import Reason, TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, scale_of

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
        return fewer_members(task, amount) if self.kind == "members" else lowered(task, self.resource, amount)


def lowered(task: TaskSpec, resource: str, amount: int) -> Change:
    """Request at most `amount`, rounded down to a readable number; if that is 0, drop the resource."""
    asked = task.request[resource]
    less = readable(resource, amount, asked)
    words = f"{resource} {exact(resource, asked)}"
    if not less:
        rest = {name: much for name, much in task.request.items() if name != resource}
        limits = {name: much for name, much in task.limits.items() if name != resource}
        without: dict[str, Any] = {"request": rest, "limits": limits}
        if resource == GPU and task.gpu_type:
            without["gpu_type"] = ""
        return Change("drop", f"drop {words}", without, cut=10_000, resource=resource)
    return Change(
        "lower", f"{words} to {exact(resource, less)}", {"request": {**task.request, resource: less}},
        cut=(asked - less) * 10_000 // asked, amount=less, resource=resource,
    )  # fmt: skip


def fewer_members(task: TaskSpec, count: int) -> Change:
    """Fewer members; for an elastic task a lower `min_count`."""
    asked, members = task.needed, "member" if count == 1 else "members"
    cut = (asked - count) * 10_000 // asked
    if task.min_count:
        text = f"start with {count} {members} instead of {asked}"
        return Change("members", text, {"min_count": count}, cut=cut, amount=count)
    return Change("members", f"{count} {members} instead of {asked}", {"count": count}, cut=cut, amount=count)


def dropped_placement_rules(task: TaskSpec) -> list[Change]:
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


def readable(resource: str, amount: int, asked: int) -> int:
    """The largest readable amount up to `amount`. Whole GPUs stay whole; 0 only for resources that a job can drop."""
    if resource == GPU and asked % 1000 == 0:
        return amount // 1000 * 1000
    if scale_of(resource) == 1000:
        step = 100 if amount >= 1000 else 10 if amount >= 100 else 1
    elif resource in (MEMORY, STORAGE):
        step = 2 ** max(amount.bit_length() - 6, 0)
    else:
        step = 1
    return max(amount // step * step, 1 if resource in _INDISPENSABLE else 0)


def exact(resource: str, amount: int) -> str:
    """An exact amount in few digits: `3.7`, `60Gi`, `15.75Gi`."""
    if scale_of(resource) == 1000:
        return f"{amount / 1000:.15g}"
    if resource in (MEMORY, STORAGE):
        for suffix, size in _BINARY:
            if amount >= size and amount * 1000 % size == 0:
                return f"{amount / size:.15g}{suffix}"
    return str(amount)
