"""Taints: refuses nodes with untolerated taints; PreferNoSchedule lowers the score."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import numpy as np

from hodei.engine.explain import Change
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason, TaskSpec, Toleration
from hodei.model.node import GPU_ONLY, QUEUE_LABEL_SUFFIX, Node, Taint
from hodei.model.resources import GPU


class Taints:
    name = "taints"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return effective_tolerations(member.task)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        tolerations = effective_tolerations(member.task)
        column = nodes.by("taints", hard_taints)
        unmet = {
            taint: None for taints in column.values for taint in taints if not is_tolerated(taint, tolerations)
        }  # a dict keeps the order
        return [
            (
                column.where(partial(_has, taint)),
                Reason(self.name, "UNTOLERATED_TAINT", f"untolerated taint {taint}", taint=taint),
            )
            for taint in unmet
        ]

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        """Tolerate a taint that alone excludes some node."""
        given, effective = member.task.tolerations, effective_tolerations(member.task)
        column = nodes.by("taints", hard_taints)
        found: dict[Taint, None] = {}
        for taints in column.values:
            unmet = [taint for taint in taints if not is_tolerated(taint, effective)]
            if len(unmet) == 1 and column.where(partial(tuple.__eq__, taints)).any():
                found[unmet[0]] = None
        for taint in sorted(found, key=str):
            more = Toleration(taint.key, "Equal" if taint.value else "Exists", taint.value, taint.effect)
            yield Change("tolerate", f"tolerate {taint}", {"tolerations": (*given, more)})

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """The number of untolerated soft taints; no opinion while no node has any."""
        column = nodes.by("soft taints", soft_taints)
        if not any(column.values):
            return None
        tolerations = effective_tolerations(member.task)
        return column.numbers(lambda taints: sum(not is_tolerated(taint, tolerations) for taint in taints))

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        """Fewer is better."""
        most = int(raw[feasible].max()) if feasible.any() else 0
        return MAX_SCORE - raw * MAX_SCORE // most if most else np.full_like(raw, MAX_SCORE)


_TOLERATE_GPU_ONLY = Toleration(GPU_ONLY, "Exists")


def effective_tolerations(task: TaskSpec) -> tuple[Toleration, ...]:
    """The task's tolerations, plus that of GPU nodes if it requests GPUs or selects a queue of a batch system by name."""
    asks = task.request.get(GPU) or (
        task.node_selector and any(key.endswith(QUEUE_LABEL_SUFFIX) for key in task.node_selector)
    )
    return (*task.tolerations, _TOLERATE_GPU_ONLY) if asks else task.tolerations


def is_tolerated(taint: Taint, tolerations: tuple[Toleration, ...]) -> bool:
    return any(toleration.tolerates(taint) for toleration in tolerations)


def _has(taint: Taint, taints: tuple[Taint, ...]) -> bool:
    return taint in taints


def hard_taints(node: Node) -> tuple[Taint, ...]:
    return tuple(taint for taint in node.taints if taint.effect != "PreferNoSchedule")


def soft_taints(node: Node) -> tuple[Taint, ...]:
    return tuple(taint for taint in node.taints if taint.effect == "PreferNoSchedule")


_TAINT = Taint(GPU_ONLY, effect="PreferNoSchedule")


class GpuLast:
    """Other work uses nodes reserved for GPU work by a soft taint (`cpu_jobs_on_gpus = "last"`) only when nothing else
    has capacity. The weight overrides all other scores: it is a setting of the operator, not a preference. No opinion
    while no node has that taint."""

    name = "gpu_last"
    reads: Reads = "static"
    usual_weight = 1000

    def key(self, member: Member) -> Hashable:
        return is_tolerated(_TAINT, effective_tolerations(member.task))

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        column = nodes.by("soft taints", soft_taints)
        if not any(_TAINT in taints for taints in column.values) or self.key(member):
            return None
        return column.numbers(lambda taints: 0 if _TAINT in taints else MAX_SCORE)
