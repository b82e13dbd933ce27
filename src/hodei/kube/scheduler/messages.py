"""The engine's refusals as kube-scheduler's messages, which people, autoscalers and dashboards parse.

kube-scheduler runs its filters in a fixed order, stops at the first that refuses a node, and counts nodes by reason. Most
filters report their first reason only, the resource filter reports all. Reasons are sorted as strings, with their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from msgspec import Struct, structs

from hodei.control.controller import Controller
from hodei.engine.nodes import Mask, Table
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.runner import PLUGIN_FAILED, Runner
from hodei.engine.view import Gang, Member, View
from hodei.kube.api.quantities import PODS
from hodei.model.ids import JobId
from hodei.model.job import Reason

NO_NODES = "no nodes available to schedule pods"
NOT_HELPFUL = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"
NEVER_PREEMPTS = "not eligible due to preemptionPolicy=Never."
WAITS_FOR_GANG = "waiting for minCount pods from a gang to appear in scheduling queue"
NOTE_LIMIT = 1024

_EXCLUDED = "node(s) didn't satisfy plugin(s) [NodeAffinity]"
_CLAIMS_PREFIX = "no new claims to deallocate, "
_NO_CLAIMS = "not found"
_SPREAD = "node(s) didn't match pod topology spread constraints"
_TEXTS = {
    "NODE_CORDONED": "node(s) were unschedulable",
    "NODE_NOT_READY": "node(s) were not ready",
    "UNTOLERATED_TAINT": "node(s) had untolerated taint(s)",
    "ADDED_AFFINITY": "node(s) didn't match scheduler-enforced node affinity",
    "SELECTOR_MISMATCH": "node(s) didn't match Pod's node affinity/selector",
    "AFFINITY_MISMATCH": "node(s) didn't match Pod's node affinity/selector",
    "PORT_TAKEN": "node(s) didn't have free ports for the requested pod ports",
    "VOLUME_IN_USE": "node(s) had no available disk",
    "VOLUME_TAKEN": "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode",
    "VOLUME_LIMIT": "node(s) exceed max volume count",
    "VOLUME_NOT_HERE": "node(s) didn't match PersistentVolume's node affinity",
    "NO_VOLUME_TO_BIND": "node(s) didn't find available persistent volumes to bind",
    "NO_VOLUME_SPACE": "node(s) did not have enough free storage",
    "VOLUME_ZONE": "node(s) had no available volume zone",
    "JOB_AFFINITY": "node(s) didn't match pod affinity rules",
    "JOB_ANTI_AFFINITY": "node(s) didn't match pod anti-affinity rules",
    "EXISTING_ANTI_AFFINITY": "node(s) didn't satisfy existing pods anti-affinity rules",
}
# kube-scheduler's filters in its order, by our reason codes; resources (fit) come after ports.
_ORDER = (
    ("NODE_CORDONED", "NODE_NOT_READY"),
    ("UNTOLERATED_TAINT",),
    ("ADDED_AFFINITY", "SELECTOR_MISMATCH", "AFFINITY_MISMATCH"),
    ("PORT_TAKEN",),
    ("INSUFFICIENT",),
    ("VOLUME_IN_USE", "VOLUME_TAKEN"),
    ("VOLUME_LIMIT",),
    ("NO_VOLUME_TO_BIND", "VOLUME_NOT_HERE", "NO_VOLUME_SPACE"),
    ("VOLUME_ZONE",),
    ("SPREAD",),
    ("JOB_AFFINITY", "JOB_ANTI_AFFINITY", "EXISTING_ANTI_AFFINITY"),
)
_STAGE = {code: stage for stage, codes in enumerate(_ORDER) for code in codes}
_PLACE = {code: place for codes in _ORDER for place, code in enumerate(codes)}
_CAPACITY = _STAGE["INSUFFICIENT"]
# The filters that report all reasons, not only the first: resources, and volume binding.
_REPORTS_ALL = (_CAPACITY, _STAGE["VOLUME_NOT_HERE"])

Pairs = Iterable[tuple[Mask, Reason]]


class Messages(Struct, frozen=True):
    """Message variants by Kubernetes release. `names_taints`: older ones print `node(s) had untolerated taint {key: value}`.
    `reports_claims`: some with device claims print `no new claims to deallocate` before the preemption result, and only
    `not found` if the pod was refused before any node was tried."""

    names_taints: bool = False
    reports_claims: bool = False

    def text(self, reason: Reason) -> str:
        """kube-scheduler's text for a reason; our own for reasons that it does not have."""
        if reason.code == "SPREAD":
            return _SPREAD if reason.evictable else f"{_SPREAD} (missing required label)"
        if reason.resource == PODS:
            return "Too many pods"
        if self.names_taints and reason.taint is not None:
            return f"node(s) had untolerated taint {{{reason.taint.key}: {reason.taint.value}}}"
        return _TEXTS.get(reason.code, reason.text)


LATEST = Messages()


def messages_for(minor: int) -> Messages:
    """The messages of Kubernetes 1.`minor`; 0 if the release is unknown."""
    if not minor:
        return LATEST
    return Messages(names_taints=minor < 34, reports_claims=34 <= minor <= 36)


class NodeReasons(Struct):
    """The nodes that each reason refuses, as kube-scheduler counts them, and the nodes that preemption could free."""

    reasons: dict[str, Mask]
    preemptable: Mask

    def counts(self) -> dict[str, int]:
        return {text: int(np.count_nonzero(mask)) for text, mask in self.reasons.items()}


def filter_reasons(
    profile: Profile, runner: Runner, member: Member, table: Table, view: View
) -> list[tuple[Mask, Reason]]:
    """The reasons of every filter for every node."""
    nodes = table.view()
    return [pair for plugin in profile.filters for pair in runner.refusals(plugin, member, nodes, view)]


def unnamed_nodes(member: Member, table: Table) -> Mask | None:
    """The nodes that kube-scheduler skips because every affinity term names other nodes (as for daemon sets); None for none."""
    named: set[str] = set()
    for term in member.task.affinity.required:
        sets = [set(one.values) for one in term.fields if one.operator == "In"]
        if not sets:
            return None
        named |= set.intersection(*sets)
    if not member.task.affinity.required:
        return None
    excluded_mask = np.ones(len(table.names), dtype=np.bool_)
    excluded_mask[[table.row[name] for name in named if name in table.row]] = False
    return excluded_mask


def node_reasons(
    pairs: Pairs, member: Member, table: Table, messages: Messages = LATEST, *, excluded: Mask | None = None
) -> NodeReasons:
    """The reasons that kube-scheduler would report. `pairs` are in the order of each plugin. `excluded`: skipped nodes."""
    stages: dict[int, list[tuple[Mask, Reason]]] = {}
    for mask, reason in pairs:
        stages.setdefault(_stage_of(reason), []).append((mask, reason))
    size = len(table.names)
    undecided, preemptable = np.ones(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    found: dict[str, Mask] = {}
    if excluded is not None and excluded.any():
        found[_EXCLUDED] = excluded
        undecided &= ~excluded
    for stage in sorted(stages):
        pairs_here = stages[stage]
        if stage != _STAGE["SPREAD"]:
            pairs_here = sorted(pairs_here, key=lambda pair: _PLACE.get(pair[1].code, 0))
        refused, permanent = np.zeros((2, size), dtype=np.bool_)
        for mask, reason in pairs_here:
            refusing = mask & undecided if stage in _REPORTS_ALL else mask & undecided & ~refused
            if refusing.any():
                text = messages.text(reason)
                found[text] = found[text] | refusing if text in found else refusing
                refused |= refusing
                permanent |= refusing & _is_permanent(reason, member, table)
        preemptable |= refused & ~permanent
        undecided &= ~refused
    return NodeReasons(found, preemptable)


def unschedulable(nodes: int, counts: Mapping[str, int], *, before: str = "", after: str = "") -> str:
    """The message of a pod without a node. `before`: a refusal before any node was tried. `after`: the preemption result."""
    if not nodes:
        return NO_NODES
    message = f"0/{nodes} nodes are available:"
    if before:
        message += f" {before}."
    else:
        pairs_here = sorted(f"{count} {text}" for text, count in counts.items() if count)
        message += f" {', '.join(pairs_here)}." if pairs_here else ""
    return f"{message} {after}" if after else message


def preemption(nodes: int, found: NodeReasons, messages: Messages = LATEST) -> str:
    """After a preemption attempt without victims."""
    preemptable = int(np.count_nonzero(found.preemptable))
    return not_eligible(unschedulable(nodes, {NO_VICTIMS: preemptable, NOT_HELPFUL: nodes - preemptable}), messages)


def not_eligible(why: str, messages: Messages = LATEST) -> str:
    """Without a preemption attempt."""
    return f"{_CLAIMS_PREFIX if messages.reports_claims else ''}preemption: {why}"


def not_helpful(nodes: int, messages: Messages = LATEST) -> str:
    """For a pod that was refused before any node was tried."""
    if messages.reports_claims:
        return _NO_CLAIMS
    return not_eligible(unschedulable(nodes, {NOT_HELPFUL: nodes}), messages)


def assigned(namespace: str, name: str, node: str) -> str:
    return f"Successfully assigned {namespace}/{name} to {node}"


def preempted(by_uid: str, node: str) -> str:
    return f"Preempted by pod {by_uid} on node {node}"


def preempting(scheduler: str) -> str:
    return f"{scheduler}: preempting to accommodate a higher priority pod"


def note(message: str) -> str:
    """A message cut to the limit of an Event."""
    return message if len(message) <= NOTE_LIMIT else message[: NOTE_LIMIT - len(" ...")] + " ..."


def _stage_of(reason: Reason) -> int:
    return _CAPACITY if reason.resource else _STAGE.get(reason.code, len(_ORDER))


def _is_permanent(reason: Reason, member: Member, table: Table) -> Mask | bool:
    """Where preemption cannot help; for resources, nodes that are too small even when empty."""
    if not reason.evictable:
        return True
    if not reason.resource or reason.resource == PODS:
        return False
    too_small: Mask = table.view().capacity(reason.resource) < member.task.request.get(reason.resource, 0)
    return too_small


UNSCHEDULABLE, WAITS_FOR_GROUP, WAITS_FOR_TURN = "Unschedulable", "WaitingForPodGroup", "WaitingForTurn"
WAITS_FOR_QUOTA, SCHEDULER_ERROR = "WaitingForQuota", "SchedulerError"
INVALID_POD, INVALID_GROUP, UNSUPPORTED = "InvalidPod", "InvalidPodGroup", "UnsupportedFeature"
_JOB = re.compile(r"\bjob (\d+)")
# Condition reasons of pods that are not queued; everything else is storage.
_CONDITION_REASONS = {
    "GANG_INCOMPLETE": WAITS_FOR_GROUP,
    "POD_GROUP_MISSING": WAITS_FOR_GROUP,
    "POD_GROUP_SIZE": WAITS_FOR_GROUP,
    "GANG_TIMEOUT": WAITS_FOR_GROUP,
    "INVALID_POD_GROUP": INVALID_GROUP,
    "INVALID_POD": INVALID_POD,
    "INVALID_SELECTOR": INVALID_POD,
    "AFFINITY_CONFLICT": INVALID_POD,
    "UNSUPPORTED_FEATURE": UNSUPPORTED,
}


class PendingStatus(Struct, frozen=True):
    """Why a pod is pending: the reason and the message of its PodScheduled condition."""

    reason: str
    message: str


class PodExplainer:
    """`name_of`: the name of a job's pod or group."""

    def __init__(self, controller: Controller, name_of: Callable[[JobId], str], messages: Messages = LATEST) -> None:
        self._controller, self._name_of, self.messages = controller, name_of, messages

    def not_tried(self, reasons: tuple[Reason, ...]) -> PendingStatus:
        """A pod that is not queued."""
        nodes = len(self._controller.cluster.table.names)
        before = "; ".join(reason.text for reason in reasons)
        kinds = [_CONDITION_REASONS.get(reason.code, UNSCHEDULABLE) for reason in reasons]
        kind = next((kind for kind in kinds if kind != UNSCHEDULABLE), UNSCHEDULABLE)
        if kind != UNSCHEDULABLE:
            return PendingStatus(kind, before)
        text = unschedulable(nodes, {}, before=before, after=not_helpful(nodes, self.messages))
        return PendingStatus(UNSCHEDULABLE, text)

    def refused(self, gang: Gang, refusal: Refusal, now_ms: int, *, preempting: bool = False) -> PendingStatus:
        """A pod or a gang that was tried. `preempting`: victims are being removed for it."""
        if preempting and gang.size > 1:
            text = f"other pods are preempted for the {gang.size} pods of the group"
            return PendingStatus(UNSCHEDULABLE, text)
        verdicts = refusal.verdicts
        if any(verdict.reason.code == PLUGIN_FAILED for verdict in verdicts):
            return PendingStatus(SCHEDULER_ERROR, "; ".join(verdict.reason.text for verdict in verdicts))
        gang_reasons = [verdict.reason for verdict in verdicts if not verdict.count]
        if gang_reasons:
            return self._refused_as_a_whole(gang, refusal, gang_reasons, now_ms)
        if gang.size > 1:
            counts = {self.messages.text(verdict.reason): verdict.count for verdict in verdicts}
            text = f"{refusal.fitted} of {gang.size} pods of the group fit; for the next one "
            return PendingStatus(UNSCHEDULABLE, text + unschedulable(refusal.nodes, counts))
        return PendingStatus(UNSCHEDULABLE, self._pod_message(gang, now_ms, preempting))

    def _refused_as_a_whole(self, gang: Gang, refusal: Refusal, reasons: list[Reason], now_ms: int) -> PendingStatus:
        """Refused for reasons that concern no single node."""
        text, kinds = "; ".join(reason.text for reason in reasons), {reason.kind for reason in reasons}
        reserved = "reservation" in kinds
        if refusal.for_capacity and not reserved:
            # Such as a gang that needs one zone: there is capacity, but not enough in any of them.
            return PendingStatus(UNSCHEDULABLE, text)
        if kinds == {"quota"}:
            return PendingStatus(WAITS_FOR_QUOTA, text)
        lacking = self._refusal_without_reservations(gang, now_ms) if reserved else None
        if lacking is not None:
            return self.refused(gang, lacking, now_ms)
        return PendingStatus(WAITS_FOR_TURN, "; ".join(self._with_pod_names(reason) for reason in reasons))

    def waits_for_turn(self) -> PendingStatus:
        """There is capacity for the pod, but others are ahead of it."""
        return PendingStatus(WAITS_FOR_TURN, "other pods are ahead of it in the queue, and it may not pass them")

    def _refusal_without_reservations(self, gang: Gang, now_ms: int) -> Refusal | None:
        """Why it could not start even without start reservations; None if it could."""
        engine, view = self._controller.engine, structs.replace(self._controller.view(now_ms), availability=None)
        engine.table.settle()
        with engine.table.trial():
            result = engine.place(gang, view, extras=False)
            if isinstance(result, Refusal):
                return result
            engine.withdraw(gang, result)
        return None

    def _with_pod_names(self, reason: Reason) -> str:
        """The text with pod names instead of job numbers."""
        if reason.code != "START_RESERVED":
            return reason.text
        return _JOB.sub(lambda found: self._name_of(int(found[1])) or found[0], reason.text)

    def _pod_message(self, gang: Gang, now_ms: int, preempting: bool) -> str:
        controller, member = self._controller, gang.members[0]
        table, view = controller.cluster.table, controller.view(now_ms)
        profile = controller.engine.profile(gang)
        pairs = filter_reasons(profile, controller.engine.runner, member, table, view)
        found = node_reasons(pairs, member, table, self.messages, excluded=unnamed_nodes(member, table))
        nodes = len(table.names)
        if preempting:
            after = ""
        elif not gang.job.preempts:
            after = not_eligible(NEVER_PREEMPTS, self.messages)
        else:
            after = preemption(nodes, found, self.messages)
        return unschedulable(nodes, found.counts(), after=after)
