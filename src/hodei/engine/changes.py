"""Single changes to a job that could let it start: what plugins propose and `control.explain.suggestions` tries.

Nothing is decided here. A plugin that can tell what in a job it objects to has a method

    repairs(member, nodes, view) -> Iterable[Change]

where `nodes` are those to which no other plugin objects (all, for a plugin that lays gangs). A change that does not
help costs only the trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from hodei.engine.nodes import Mask
from hodei.model.decision import Reason
from hodei.model.explanation import RepairKind
from hodei.model.job import TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, scale_of

_BINARY = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))
# Work without any of these is not the same work done smaller.
_INDISPENSABLE = frozenset({CPU, MEMORY, STORAGE})


class Change(Struct, frozen=True):
    """`fields` of the task (of the job if `whole_job`) with their new values. `cut` tells how much of what was asked for
    is given up, in ten-thousandths; `amount` is the new amount of a change that could also be made larger or smaller."""

    kind: RepairKind
    text: str
    fields: dict[str, Any]
    whole_job: bool = False
    cut: int = 0
    amount: int = 0
    resource: str = ""

    def with_amount(self, task: TaskSpec, amount: int) -> Change:
        """The same change to at most `amount`."""
        return fewer_members(task, amount) if self.kind == "members" else lowered(task, self.resource, amount)


def lowered(task: TaskSpec, resource: str, amount: int) -> Change:
    """Ask for at most `amount` of a resource, rounded down to what can be read; for none of it: do without."""
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
    """Fewer in all; of a task that can start with less than all its members, fewer to start with."""
    asked, members = task.needed, "member" if count == 1 else "members"
    cut = (asked - count) * 10_000 // asked
    if task.min_count:
        text = f"start with {count} {members} instead of {asked}"
        return Change("members", text, {"min_count": count}, cut=cut, amount=count)
    return Change("members", f"{count} {members} instead of {asked}", {"count": count}, cut=cut, amount=count)


def dropped_company(task: TaskSpec) -> list[Change]:
    """Rules about other jobs and about ports, one by one."""
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
            out.append(Change("drop", f"spread over {rule.topology} as a wish only", {"spread": soft}))
    for place, port in enumerate(task.ports):
        rest_of = (*task.ports[:place], *task.ports[place + 1 :])
        out.append(Change("drop", f"drop host port {port.port}/{port.protocol}", {"ports": rest_of}))
    return out


def alone(pairs: Sequence[tuple[Mask, Reason]]) -> list[bool]:
    """For each refusal, whether it is the only one that keeps some node out."""
    out = []
    for place, (mask, _) in enumerate(pairs):
        left = mask
        for other, _ in (*pairs[:place], *pairs[place + 1 :]):
            left = left & ~other
        out.append(bool(left.any()))
    return out


def readable(resource: str, amount: int, asked: int) -> int:
    """The largest amount up to `amount` that reads well. Whole GPUs stay whole; 0 only of what a job can do without."""
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
    """An amount in few digits and without rounding: `3.7`, `60Gi`, `15.75Gi`."""
    if scale_of(resource) == 1000:
        return f"{amount / 1000:.15g}"
    if resource in (MEMORY, STORAGE):
        for suffix, size in _BINARY:
            if amount >= size and amount * 1000 % size == 0:
                return f"{amount / size:.15g}{suffix}"
    return str(amount)
