"""Why pods wait, in upstream's words, for their conditions and Events.

`Unschedulable` makes autoscalers buy nodes, so it is said only where a node could help. Who waits for the rest of a gang, for
quota or for a turn, and who cannot be scheduled as it is written, has other reasons. Claims that are missing or not bound are
`Unschedulable` as kube-scheduler has it: autoscalers look at claims themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct, structs

from hodei.control.controller import Controller
from hodei.engine.plan import Refusal
from hodei.engine.runner import PLUGIN_FAILED
from hodei.engine.view import Gang
from hodei.kube.scheduler import messages
from hodei.kube.scheduler.messages import LATEST, Messages
from hodei.model.decision import Reason
from hodei.model.ids import JobId

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
        nodes = len(self._controller.world.table.names)
        plugins = tuple(sorted({reason.plugin for reason in reasons}))
        before = "; ".join(reason.text for reason in reasons)
        kinds = [_ASIDE.get(reason.code, UNSCHEDULABLE) for reason in reasons]
        kind = next((kind for kind in kinds if kind != UNSCHEDULABLE), UNSCHEDULABLE)
        if kind != UNSCHEDULABLE:
            return Told(kind, before, plugins)
        text = messages.unschedulable(nodes, {}, before=before, after=messages.not_helpful(nodes, self.words))
        return Told(UNSCHEDULABLE, text, plugins)

    def refused(self, gang: Gang, refusal: Refusal, now_ms: int, *, making_room: bool = False) -> Told:
        """A pod or a gang that was tried. `making_room`: others are told to go for it."""
        plugins = tuple(sorted({verdict.reason.plugin for verdict in refusal.verdicts}))
        if making_room and gang.size > 1:
            return Told(UNSCHEDULABLE, f"others are told to go, to make room for the {gang.size} pods of the group")
        if any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts):
            return Told(SCHEDULER_ERROR, "; ".join(verdict.reason.text for verdict in refusal.verdicts), plugins)
        whole = [verdict for verdict in refusal.verdicts if not verdict.count]
        if whole and refusal.for_room and not any(verdict.reason.plugin == "promises" for verdict in whole):
            # Such as a gang that wants one zone: there is room, but nowhere enough of it.
            return Told(UNSCHEDULABLE, "; ".join(verdict.reason.text for verdict in whole), plugins)
        if whole and all(verdict.reason.plugin == "quota" for verdict in whole):
            return Told(WAITS_FOR_QUOTA, "; ".join(verdict.reason.text for verdict in whole), plugins)
        if whole:
            kept = any(verdict.reason.plugin == "promises" for verdict in whole)
            lacking = self._regardless_of_time(gang, now_ms) if kept else None
            if lacking is not None:
                return self.refused(gang, lacking, now_ms)
            return Told(WAITS_FOR_TURN, "; ".join(self._named(verdict.reason) for verdict in whole), plugins)
        if gang.size > 1:
            counts = {self.words.text(verdict.reason): verdict.count for verdict in refusal.verdicts}
            text = messages.unschedulable(refusal.nodes, counts)
            text = f"{refusal.fitted} of {gang.size} pods of the group fit; for the next one {text}"
            return Told(UNSCHEDULABLE, text, plugins)
        return Told(UNSCHEDULABLE, self._of_one(gang, now_ms, making_room), plugins)

    def not_its_turn(self) -> Told:
        """A pod for which there is room, but others are before it."""
        return Told(WAITS_FOR_TURN, "other pods are before it in the queue, and it may not pass them", ("queue",))

    def _regardless_of_time(self, gang: Gang, now_ms: int) -> Refusal | None:
        """Why it could not start even if nobody had been promised anything; None if it could."""
        engine, view = self._controller.engine, structs.replace(self._controller.view(now_ms), book=None)
        engine.table.settle()
        with engine.table.trial():
            result = engine.place(gang, view, extras=False)
            if isinstance(result, Refusal):
                return result
            engine.withdraw(gang, result)
        return None

    def _named(self, reason: Reason) -> str:
        """The reason with pods in the place of the numbers that they have in here."""
        if reason.code != "PROMISED":
            return reason.text
        return _JOB.sub(lambda found: self.name_of(int(found[1])) or found[0], reason.text)

    def _of_one(self, gang: Gang, now_ms: int, making_room: bool) -> str:
        controller, member = self._controller, gang.members[0]
        table, view = controller.world.table, controller.view(now_ms)
        profile = controller.engine.profile(gang)
        pairs = messages.objections(profile, controller.engine.runner, member, table, view)
        unseen = messages.outside(member, table)
        found = messages.refusal(pairs, member, table, self.words, unseen=unseen)
        nodes = len(table.names)
        if making_room:
            after = ""
        elif not gang.job.preempts:
            after = messages.not_eligible(messages.NEVER_PREEMPTS, self.words)
        else:
            after = messages.preemption(nodes, found, self.words)
        return messages.unschedulable(nodes, found.counts(), after=after)
