"""What the engine found, in upstream's words: people, autoscalers and dashboards read them.

Upstream asks its filters in an order of its own, stops for each node at the first that refuses, and counts nodes by reason;
of most filters it tells the first objection only, of room it tells all. Reasons are sorted as strings, numbers and all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

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
NODE_NAME = "node(s) didn't match the requested node name"
NOT_HELPFUL = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"
NEVER_PREEMPTS = "not eligible due to preemptionPolicy=Never."
WAITS_FOR_VICTIMS = "not eligible due to a terminating pod on the nominated node."
WAITS_FOR_GANG = "waiting for minCount pods from a gang to appear in scheduling queue"
NOTE_LIMIT = 1024

_UNSEEN = "node(s) didn't satisfy plugin(s) [NodeAffinity]"
_CLAIMS = "no new claims to deallocate, "
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
# Upstream's filters in the order in which it asks them, by the codes of our reasons; room (fit) has its place after ports.
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
_ROOM = _STAGE["INSUFFICIENT"]
# Where upstream lists every objection and not the first alone: room, and where volumes could be bound.
_ALL_TOLD = (_ROOM, _STAGE["VOLUME_NOT_HERE"])
_INSUFFICIENT = "INSUFFICIENT_"

Pairs = Iterable[tuple[Mask, Reason]]


class Messages(Struct, frozen=True):
    """Which release's words. `names_taints`: `node(s) had untolerated taint {key: value}`, as in older ones.
    `tells_of_claims`: `no new claims to deallocate` before what preemption has to say, as in some with device claims; and
    in those nothing but `not found` where the pod was refused before any node was looked at."""

    names_taints: bool = False
    tells_of_claims: bool = False

    def text(self, reason: Reason) -> str:
        """What upstream says for one of our reasons; our own words for what it does not know."""
        if reason.code == "SPREAD":
            return _SPREAD if reason.evictable else f"{_SPREAD} (missing required label)"
        if reason.code == f"{_INSUFFICIENT}{PODS.upper()}":
            return "Too many pods"
        if self.names_taints and reason.code == "UNTOLERATED_TAINT":
            taint = reason.text.removeprefix("untolerated taint ").rpartition(":")[0]
            key, _, value = taint.partition("=")
            return f"node(s) had untolerated taint {{{key}: {value}}}"
        return _TEXTS.get(reason.code, reason.text)


LATEST = Messages()


def of_release(minor: int) -> Messages:
    """The words of Kubernetes 1.`minor`; 0 for one that nobody knows."""
    if not minor:
        return LATEST
    return Messages(names_taints=minor < 34, tells_of_claims=34 <= minor <= 36)


class NodeReasons(Struct):
    """Per reason which nodes gave it, in upstream's way, and the nodes that could be won by stopping others."""

    reasons: dict[str, Mask]
    curable: Mask

    def counts(self) -> dict[str, int]:
        return {text: int(np.count_nonzero(mask)) for text, mask in self.reasons.items()}

    def of_row(self, row: int) -> list[str]:
        return [text for text, mask in self.reasons.items() if mask[row]]


def objections(profile: Profile, runner: Runner, member: Member, table: Table, view: View) -> list[tuple[Mask, Reason]]:
    """What every filter says of every node, each in its own order."""
    nodes = table.view()
    return [pair for plugin in profile.filters for pair in runner.refusals(plugin, member, nodes, view)]


def outside(member: Member, table: Table) -> Mask | None:
    """The nodes that upstream does not even look at, if every term of the affinity names nodes (as daemon sets do)."""
    named: set[str] = set()
    for term in member.task.affinity.required:
        sets = [set(one.values) for one in term.fields if one.operator == "In"]
        if not sets:
            return None
        named |= set.intersection(*sets)
    if not member.task.affinity.required:
        return None
    left_out = np.ones(len(table.names), dtype=np.bool_)
    left_out[[table.row[name] for name in named if name in table.row]] = False
    return left_out


def node_reasons(
    pairs: Pairs, member: Member, table: Table, wording: Messages = LATEST, *, unseen: Mask | None = None
) -> NodeReasons:
    """The objections as upstream would have come to them; `pairs` in the order in which each plugin gave its own.
    `unseen`: the nodes that it does not look at (`outside`)."""
    stages: dict[int, list[tuple[Mask, Reason]]] = {}
    for mask, reason in pairs:
        stages.setdefault(_stage_of(reason), []).append((mask, reason))
    size = len(table.names)
    open_, curable = np.ones(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    found: dict[str, Mask] = {}
    if unseen is not None and unseen.any():
        found[_UNSEEN] = unseen
        open_ &= ~unseen
    for stage in sorted(stages):
        told = stages[stage]
        if stage != _STAGE["SPREAD"]:
            told = sorted(told, key=lambda pair: _PLACE.get(pair[1].code, 0))
        refused, hopeless = np.zeros((2, size), dtype=np.bool_)
        for mask, reason in told:
            here = mask & open_ if stage in _ALL_TOLD else mask & open_ & ~refused
            if here.any():
                text = wording.text(reason)
                found[text] = found[text] | here if text in found else here
                refused |= here
                hopeless |= here & _hopeless(reason, member, table)
        curable |= refused & ~hopeless
        open_ &= ~refused
    return NodeReasons(found, curable)


def unschedulable(nodes: int, counts: Mapping[str, int], *, before: str = "", after: str = "") -> str:
    """The message of a pod that has no node: `before` for a refusal before any node was looked at, `after` what
    preemption had to say."""
    if not nodes:
        return NO_NODES
    message = f"0/{nodes} nodes are available:"
    if before:
        message += f" {before}."
    else:
        told = sorted(f"{count} {text}" for text, count in counts.items() if count)
        message += f" {', '.join(told)}." if told else ""
    return f"{message} {after}" if after else message


def preemption(nodes: int, found: NodeReasons, wording: Messages = LATEST) -> str:
    """What is said after a try to make room that found nobody to send away."""
    curable = int(np.count_nonzero(found.curable))
    return not_eligible(unschedulable(nodes, {NO_VICTIMS: curable, NOT_HELPFUL: nodes - curable}), wording)


def not_eligible(why: str, wording: Messages = LATEST) -> str:
    """What is said where no try was made: NEVER_PREEMPTS or WAITS_FOR_VICTIMS."""
    return f"{_CLAIMS if wording.tells_of_claims else ''}preemption: {why}"


def not_helpful(nodes: int, wording: Messages = LATEST) -> str:
    """What is said of preemption where the pod was refused before any node was looked at."""
    if wording.tells_of_claims:
        return _NO_CLAIMS
    return not_eligible(unschedulable(nodes, {NOT_HELPFUL: nodes}), wording)


def gated(gates: Sequence[str]) -> str:
    return f"waiting for scheduling gates: [{' '.join(gates)}]"


def assigned(namespace: str, name: str, node: str) -> str:
    return f"Successfully assigned {namespace}/{name} to {node}"


def preempted(by_uid: str, node: str) -> str:
    return f"Preempted by pod {by_uid} on node {node}"


def making_room(scheduler: str) -> str:
    return f"{scheduler}: preempting to accommodate a higher priority pod"


def note(message: str) -> str:
    """A message cut to what an Event may hold."""
    return message if len(message) <= NOTE_LIMIT else message[: NOTE_LIMIT - len(" ...")] + " ..."


def _stage_of(reason: Reason) -> int:
    if reason.code.startswith(_INSUFFICIENT):
        return _ROOM
    return _STAGE.get(reason.code, len(_ORDER))


def _hopeless(reason: Reason, member: Member, table: Table) -> Mask | bool:
    """Where stopping others could not help: for room, on nodes that are too small even when empty."""
    if not reason.evictable:
        return True
    resource = _resource_of(reason)
    if not resource or resource == PODS:
        return False
    too_small: Mask = table.view().capacity(resource) < member.task.request.get(resource, 0)
    return too_small


def _resource_of(reason: Reason) -> str:
    return reason.text.removeprefix("Insufficient ") if reason.code.startswith(_INSUFFICIENT) else ""


UNSCHEDULABLE, WAITS_FOR_GROUP, WAITS_FOR_TURN = "Unschedulable", "WaitingForPodGroup", "WaitingForTurn"
WAITS_FOR_QUOTA, SCHEDULER_ERROR = "WaitingForQuota", "SchedulerError"
INVALID_POD, INVALID_GROUP, UNSUPPORTED = "InvalidPod", "InvalidPodGroup", "UnsupportedFeature"
_JOB = re.compile(r"\bjob (\d+)")
# The condition's reason for what keeps a pod from being tried at all; all else is storage.
_ASIDE = {
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


class Told(Struct, frozen=True):
    """What a pod is told: the reason of its condition, and the message. `plugin`: whose objection it was, for the metrics."""

    reason: str
    message: str
    plugins: tuple[str, ...] = ()


class PodExplainer:
    def __init__(self, controller: Controller, words: Messages = LATEST) -> None:
        self._controller, self.words = controller, words
        # The pods of a job, as people know them.
        self.name_of: Callable[[JobId], str] = lambda id: ""

    def aside(self, reasons: tuple[Reason, ...]) -> Told:
        """A pod that is not even tried."""
        nodes = len(self._controller.cluster.table.names)
        plugins = tuple(sorted({reason.plugin for reason in reasons}))
        before = "; ".join(reason.text for reason in reasons)
        kinds = [_ASIDE.get(reason.code, UNSCHEDULABLE) for reason in reasons]
        kind = next((kind for kind in kinds if kind != UNSCHEDULABLE), UNSCHEDULABLE)
        if kind != UNSCHEDULABLE:
            return Told(kind, before, plugins)
        text = unschedulable(nodes, {}, before=before, after=not_helpful(nodes, self.words))
        return Told(UNSCHEDULABLE, text, plugins)

    def refused(self, gang: Gang, refusal: Refusal, now_ms: int, *, making_room: bool = False) -> Told:
        """A pod or a gang that was tried. `making_room`: others are told to go for it."""
        plugins = tuple(sorted({verdict.reason.plugin for verdict in refusal.verdicts}))
        if making_room and gang.size > 1:
            return Told(UNSCHEDULABLE, f"others are told to go, to make room for the {gang.size} pods of the group")
        if any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts):
            return Told(SCHEDULER_ERROR, "; ".join(verdict.reason.text for verdict in refusal.verdicts), plugins)
        whole = [verdict for verdict in refusal.verdicts if not verdict.count]
        if whole and refusal.for_capacity and not any(verdict.reason.kind == "reservation" for verdict in whole):
            # Such as a gang that wants one zone: there is room, but nowhere enough of it.
            return Told(UNSCHEDULABLE, "; ".join(verdict.reason.text for verdict in whole), plugins)
        if whole and all(verdict.reason.kind == "quota" for verdict in whole):
            return Told(WAITS_FOR_QUOTA, "; ".join(verdict.reason.text for verdict in whole), plugins)
        if whole:
            kept = any(verdict.reason.kind == "reservation" for verdict in whole)
            lacking = self._regardless_of_time(gang, now_ms) if kept else None
            if lacking is not None:
                return self.refused(gang, lacking, now_ms)
            return Told(WAITS_FOR_TURN, "; ".join(self._named(verdict.reason) for verdict in whole), plugins)
        if gang.size > 1:
            counts = {self.words.text(verdict.reason): verdict.count for verdict in refusal.verdicts}
            text = unschedulable(refusal.nodes, counts)
            text = f"{refusal.fitted} of {gang.size} pods of the group fit; for the next one {text}"
            return Told(UNSCHEDULABLE, text, plugins)
        return Told(UNSCHEDULABLE, self._of_one(gang, now_ms, making_room), plugins)

    def not_its_turn(self) -> Told:
        """A pod for which there is room, but others are before it."""
        return Told(WAITS_FOR_TURN, "other pods are before it in the queue, and it may not pass them", ("queue",))

    def _regardless_of_time(self, gang: Gang, now_ms: int) -> Refusal | None:
        """Why it could not start even if nobody had been promised anything; None if it could."""
        engine, view = self._controller.engine, structs.replace(self._controller.view(now_ms), availability=None)
        engine.table.settle()
        with engine.table.trial():
            result = engine.place(gang, view, extras=False)
            if isinstance(result, Refusal):
                return result
            engine.withdraw(gang, result)
        return None

    def _named(self, reason: Reason) -> str:
        """The reason with pods in the place of the numbers that they have in here."""
        if reason.code != "START_RESERVED":
            return reason.text
        return _JOB.sub(lambda found: self.name_of(int(found[1])) or found[0], reason.text)

    def _of_one(self, gang: Gang, now_ms: int, making_room: bool) -> str:
        controller, member = self._controller, gang.members[0]
        table, view = controller.cluster.table, controller.view(now_ms)
        profile = controller.engine.profile(gang)
        pairs = objections(profile, controller.engine.runner, member, table, view)
        unseen = outside(member, table)
        found = node_reasons(pairs, member, table, self.words, unseen=unseen)
        nodes = len(table.names)
        if making_room:
            after = ""
        elif not gang.job.preempts:
            after = not_eligible(NEVER_PREEMPTS, self.words)
        else:
            after = preemption(nodes, found, self.words)
        return unschedulable(nodes, found.counts(), after=after)
