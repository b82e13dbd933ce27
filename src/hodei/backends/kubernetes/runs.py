"""Runs as pods: the state of a pod as the state of its run, and the cache of our pods. No I/O except in UnconfirmedPods.

The states tell apart: the command's own end, its memory, its timeout, our own stop, a deletion by others, and what the node
or the cluster did. A run that never started may start elsewhere; one that was interrupted is lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field, structs

from hodei.backends.kubernetes.manifest import END, MAIN, RUN, SUPERVISION, TIMEOUT, Supervision
from hodei.kube.api.objects import ApiStruct, Condition, Meta
from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RUN_ENDED, HealthState
from hodei.supervision import health_reason, oom_reason, start_error_code

if TYPE_CHECKING:
    from hodei.backends.kubernetes.pod_api import Pods

START_FAILED = "start_failed"
ENDED = ("Succeeded", "Failed")
# Permanent errors.
_PERMANENT = ("InvalidImageName", "CreateContainerConfigError")
_PULLING = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip
# The node or the cluster ended it, not the run itself.
_EVICTED = ("Evicted", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "Preempting")
_KILLED = (137, 143)
# How far the clocks of a node and the API may differ for a deletion to be the cause of a signal.
_MAX_SKEW_MS = 60_000
_SETTLE_MS = 10_000
_TIMED_OUT = "it ran longer than its timeout"
_TEXT_LIMIT = 500


class StopCause(Struct, frozen=True, omit_defaults=True):
    """Why we stop a run; kept on its pod, so that it survives a restart of the server. `code` is "" for an order, else a reason
    code of RunObserved. `note`: what went wrong with its checkpoint."""

    reason: str = ""
    code: str = ""
    permanent: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        return "; ".join(part for part in (self.reason, self.note) if part)


class Terminated(ApiStruct, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class Waiting(ApiStruct, frozen=True):
    reason: str = ""
    message: str = ""


class Running(ApiStruct, frozen=True):
    started_at: str | None = None


class ContainerState(ApiStruct, frozen=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class Container(ApiStruct, frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()
    ready: bool = False


class DatedCondition(Condition, frozen=True):
    last_transition_time: str | None = None


class Status(ApiStruct, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    conditions: tuple[DatedCondition, ...] = ()
    container_statuses: tuple[Container, ...] = ()


class FullMeta(Meta, frozen=True):
    finalizers: tuple[str, ...] = ()
    deletion_grace_period_seconds: int | None = None


class Spec(ApiStruct, frozen=True):
    node_name: str = ""
    active_deadline_seconds: int | None = None


class RunPod(ApiStruct, frozen=True, dict=True):
    """The part of our pods that shows the state of the run."""

    metadata: FullMeta = field(default_factory=FullMeta)
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def run(self) -> RunId:
        return self.metadata.labels.get(RUN, "")

    @property
    def container(self) -> ContainerState:
        """Of our own container; a cluster may add sidecars."""
        found = (one.state for one in self.status.container_statuses if one.name == MAIN)
        return next(found, ContainerState())

    @property
    def ready(self) -> bool:
        """The result of the kubelet's last probes."""
        return any(one.ready for one in self.status.container_statuses if one.name == MAIN)

    @cached_property
    def supervision(self) -> Supervision:
        try:
            return msgspec.json.decode(self.metadata.annotations[SUPERVISION], type=Supervision)
        except (KeyError, msgspec.DecodeError):
            return Supervision()

    @property
    def ended(self) -> bool:
        return self.status.phase in ENDED or self.container.terminated is not None

    @property
    def has_started(self) -> bool:
        """Its container runs or has run: there may be a log."""
        return self.container.running is not None or self.container.terminated is not None

    @property
    def deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def deletion_requested_ms(self) -> int:
        """0 without a deletion. The API stores this time plus the grace period."""
        if not self.deleting:
            return 0
        return parse_time_ms(self.metadata.deletion_timestamp, 0) - 1000 * (
            self.metadata.deletion_grace_period_seconds or 0
        )

    @cached_property
    def stop_cause(self) -> StopCause | None:
        """Set if we stop it."""
        try:
            return msgspec.json.decode(self.metadata.annotations[END], type=StopCause)
        except (KeyError, msgspec.DecodeError):
            return None

    @property
    def deleted_before_start(self) -> bool:
        """It is being deleted, nothing of it runs, and no kubelet will update it."""
        abandoned = not self.spec.node_name or self.metadata.deletion_grace_period_seconds == 0
        return self.deleting and abandoned and not self.has_started and not self.ended

    def last_change_ms(self, now_ms: int) -> int:
        """The time of its last condition; for an ended pod without an end time."""
        last_ms = max((parse_time_ms(one.last_transition_time, 0) for one in self.status.conditions), default=0)
        return min(last_ms or now_ms, now_ms)

    def condition(self, type: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == type and one.status == "True"), None)


def observe_pod(pod: RunPod, now_ms: int) -> RunObserved:
    """The state of the run. A pod that is being deleted counts as running until its container has ended."""
    state, status = pod.container, pod.status
    if state.terminated is not None:
        end = _ended(pod, state.terminated, now_ms)
        return structs.replace(end, started_ms=min(parse_time_ms(state.terminated.started_at, 0), now_ms))
    if status.phase in ENDED:
        return _end_without_status(pod, pod.last_change_ms(now_ms))
    if pod.deleted_before_start:
        return _stopped_by_us(pod, now_ms, None) or _lost(pod, now_ms, None, "its pod was deleted before it started")
    if state.running is not None or status.phase == "Running":
        started = parse_time_ms(state.running.started_at if state.running else status.start_time, now_ms)
        return RunObserved(pod.run, "running", min(started, now_ms), health=probe_state(pod, now_ms))
    return RunObserved(pod.run, "placed", now_ms, reason=_waiting_reason(pod))


def removed_end(pod: RunPod, now_ms: int) -> RunObserved:
    """The end of a run whose pod was removed unseen, because its finalizer was removed by others."""
    return _stopped_by_us(pod, now_ms, None) or _lost(pod, now_ms, None, "its pod was removed without an exit code")


def start_failure(pod: RunPod, now_ms: int, pull_timeout_ms: int) -> StopCause | None:
    """Why a run whose container does not start must be stopped; None while it may still start."""
    if pod.has_started or pod.ended or pod.deleting:
        return None
    waiting = pod.container.waiting or Waiting()
    if waiting.reason in _PERMANENT:
        return StopCause(_waiting_reason(pod), START_FAILED, permanent=True)
    waited_ms = now_ms - parse_time_ms(pod.metadata.creation_timestamp, now_ms)
    if waited_ms >= pull_timeout_ms and (waiting.reason in _PULLING or not pod.spec.node_name):
        return StopCause(_waiting_reason(pod) or "no scheduler of the cluster has put it on its node", START_FAILED)
    return None


def forced_end(pod: RunPod, now_ms: int) -> RunObserved | None:
    """The end of a run whose pod was deleted by force, if its node has not reported an exit code for a minute."""
    late = pod.deleting and pod.metadata.deletion_grace_period_seconds == 0 and not pod.ended
    if not late or now_ms - pod.deletion_requested_ms < _MAX_SKEW_MS:
        return None
    text = "its pod was deleted by force, and its node reports no exit code"
    return _stopped_by_us(pod, now_ms, None) or _lost(pod, now_ms, None, text)


def probe_state(pod: RunPod, now_ms: int) -> HealthState:
    """Health by the kubelet's probes; "" without a probe, or before the first result."""
    check, running = pod.supervision.probed, pod.container.running
    if check is None or running is None:
        return ""
    if pod.ready:
        return "ok"
    ran_ms = now_ms - parse_time_ms(running.started_at, now_ms)
    return "failing" if ran_ms >= check.after_ms + check.every_ms + check.timeout_ms else ""


def health_failure(pod: RunPod, now_ms: int) -> StopCause | None:
    """Why a run whose health check has failed too often must be stopped. A container is not ready from its start to the first
    passed probe, and again after `failures` failed ones; so it gets the time of as many probes in any case. A restarted kubelet
    reports "not ready" until its first probe, so the condition must have held for a moment."""
    check, running = pod.supervision.probed, pod.container.running
    if check is None or running is None or pod.ready or pod.deleting or pod.ended:
        return None
    ran_ms = now_ms - parse_time_ms(running.started_at, now_ms)
    since = next((one.last_transition_time for one in pod.status.conditions if one.type == "ContainersReady"), None)
    held_ms = now_ms - parse_time_ms(since, parse_time_ms(running.started_at, now_ms))
    probed_ms = check.after_ms + check.every_ms * check.failures + check.timeout_ms
    if ran_ms < probed_ms or held_ms < min(check.every_ms, _SETTLE_MS) + check.timeout_ms:
        return None
    return StopCause(health_reason(check.failures), "unhealthy")


def deadline_s(pod: RunPod) -> int:
    """The activeDeadlineSeconds for its timeout, which counts from the start of the command and not of the image pull. 0 if it
    has no timeout, or the deadline is set, or it does not run yet."""
    running, timeout = pod.container.running, pod.metadata.annotations.get(TIMEOUT, "")
    if running is None or pod.deleting or pod.spec.active_deadline_seconds is not None or not timeout.isdigit():
        return 0
    started_ms = parse_time_ms(running.started_at, 0)
    before_ms = max(0, started_ms - parse_time_ms(pod.status.start_time, started_ms))
    return max(1, math.ceil((before_ms + int(timeout)) / 1000))


def remaining_grace_s(pod: RunPod, now_ms: int, grace_s: int) -> int | None:
    """The grace period to request, counted from the first request, so that the run ends in `grace_s`; or None."""
    wanted_s = max(1, grace_s)
    held_s = pod.metadata.deletion_grace_period_seconds
    if not pod.deleting or held_s is None:
        return wanted_s
    since_s = max(0, (now_ms - pod.deletion_requested_ms) // 1000)
    return since_s + wanted_s if since_s + wanted_s < held_s else None


def _ended(pod: RunPod, ended: Terminated, now_ms: int) -> RunObserved:
    run, status, code = pod.run, pod.status, ended.exit_code
    at = min(parse_time_ms(ended.finished_at, now_ms), now_ms)
    if (ours := _stopped_by_us(pod, at, code)) is not None:
        return ours
    if status.reason == "DeadlineExceeded":
        return RunObserved(run, "failed", at, code, "timeout", _text(status.message) or _TIMED_OUT)
    if ended.reason == "OOMKilled":
        return RunObserved(run, "failed", at, code, "oom", oom_reason())
    if ended.reason in ("StartError", "ContainerCannotRun"):
        return _could_not_start(run, at, ended)
    if status.reason in _EVICTED:
        return _evicted(pod, at, code)
    if ended.reason == "ContainerStatusUnknown":
        return _lost(pod, at, None, "its node lost its exit code")
    if pod.condition("DisruptionTarget") is not None or _ended_by_deletion(pod, at, code):
        return _lost(pod, at, code, "its pod was deleted by another user or controller")
    if code == 0:
        return RunObserved(run, "succeeded", at, 0)
    return RunObserved(
        run, "failed", at, code, "killed" if code > 128 else "", _text(ended.message) or f"exit code {code}"
    )


def _end_without_status(pod: RunPod, at: int) -> RunObserved:
    """The end of a pod without the state of a container."""
    run, status = pod.run, pod.status
    if (ours := _stopped_by_us(pod, at, None)) is not None:
        return ours
    if status.phase == "Succeeded":
        return RunObserved(run, "succeeded", at, 0)
    if status.reason == "DeadlineExceeded":
        return RunObserved(run, "failed", at, None, "timeout", _text(status.message) or _TIMED_OUT)
    if status.reason in _EVICTED:
        return _evicted(pod, at, None)
    if pod.container.running is not None or pod.condition("DisruptionTarget") is not None:
        return _lost(pod, at, None, "its node disappeared")
    # The node rejected the pod, for lack of resources or features. It may start elsewhere or later.
    text = _text(f"{status.reason}: {status.message}".strip(": ")) or "its node did not start it, and gives no reason"
    return RunObserved(run, "failed", at, None, START_FAILED, text)


def _stopped_by_us(pod: RunPod, at: int, code: int | None) -> RunObserved | None:
    """Only if the pod is being deleted: a run that ended just before has ended by itself."""
    cause = pod.stop_cause if pod.deleting else None
    if cause is None:
        return None
    if cause.code:
        return RunObserved(pod.run, "failed", at, code, cause.code, cause.text, cause.permanent)
    return RunObserved(pod.run, "stopped", at, code, "", cause.text)


def _evicted(pod: RunPod, at: int, code: int | None) -> RunObserved:
    """By its node. An eviction for exceeding its own limit would happen on any node."""
    message = pod.status.message
    text = _text(f"{pod.status.reason}: {message}".strip(": "))
    if pod.status.reason == "Evicted" and "exceed" in message and "limit" in message:
        return RunObserved(pod.run, "failed", at, code, "killed", text)
    return RunObserved(pod.run, "lost", at, code, "lost", text)


def _ended_by_deletion(pod: RunPod, at: int, code: int) -> bool:
    """Whether the deletion of its pod ended it. Both times are whole seconds, of two clocks."""
    requested = pod.deletion_requested_ms
    return requested > 0 and (at > requested or (code in _KILLED and at > requested - _MAX_SKEW_MS))


def _lost(pod: RunPod, at: int, code: int | None, text: str) -> RunObserved:
    by = pod.condition("DisruptionTarget")
    if by is not None:
        text = f"{text} ({by.reason}: {by.message})"
    return RunObserved(pod.run, "lost", at, code, "lost", _text(text))


def _could_not_start(run: RunId, at: int, ended: Terminated) -> RunObserved:
    text = _text(ended.message)
    if (code := start_error_code(text)) is not None:
        return RunObserved(run, "failed", at, code, "", text)
    return RunObserved(run, "failed", at, None, START_FAILED, text or ended.reason)


def _waiting_reason(pod: RunPod) -> str:
    waiting = pod.container.waiting
    if waiting is not None:
        return _text(f"{waiting.reason}: {waiting.message}".strip(": "))
    unplaced = next(
        (one for one in pod.status.conditions if one.type == "PodScheduled" and one.status == "False"), None
    )
    if unplaced is not None:
        return _text(f"{unplaced.reason}: {unplaced.message}".strip(": "))
    return _text(pod.status.message)


def _text(text: str) -> str:
    return text[:_TEXT_LIMIT]


def parse_time_ms(stamp: str | None, otherwise: int) -> int:
    """A kubelet that has lost a time writes none, or that of 1970."""
    try:
        at = datetime.fromisoformat(stamp) if stamp else None
    except ValueError:
        return otherwise
    return round(at.timestamp() * 1000) if at is not None and at.year > 1970 else otherwise


class Runs:
    """Our pods as last seen, the ends that are not forgotten yet, and unread observations. Fed by the watch of our pods; survives
    reconnects. `on_end` is called with every new end, and reports it (`report`) when its log is archived."""

    def __init__(self, now_ms: Callable[[], int], on_end: Callable[[RunObserved], None]) -> None:
        self._now_ms, self._on_end = now_ms, on_end
        self.pods: dict[RunId, RunPod] = {}
        self.ends: dict[RunId, RunObserved] = {}
        self.changed_event = asyncio.Event()
        self._observations: list[RunObserved] = []
        self._reported: dict[RunId, tuple[str, str, int, str]] = {}
        self._forgotten: set[RunId] = set()
        # Found inside containers; pods do not show it.
        self._checkpoint_ms: dict[RunId, int] = {}
        self._health: dict[RunId, HealthState] = {}

    def known(self) -> dict[RunId, RunObserved]:
        now_ms = self._now_ms()
        live = {run: self._observe(pod, now_ms) for run, pod in self.pods.items() if run not in self.ends}
        return live | self.ends

    def _observe(self, pod: RunPod, now_ms: int) -> RunObserved:
        seen, run = observe_pod(pod, now_ms), pod.run
        if run not in self._checkpoint_ms and run not in self._health:
            return seen
        health = self._health.get(run, seen.health) if seen.state == "running" else seen.health
        return structs.replace(seen, checkpoint_ms=self._checkpoint_ms.get(run, 0), health=health)

    def checkpoint_taken(self, run: RunId, at_ms: int) -> None:
        if run in self.pods and at_ms > self._checkpoint_ms.get(run, 0):
            self._checkpoint_ms[run] = at_ms
            self.refresh(run)

    def checkpoint_failed(self, run: RunId, why: str) -> None:
        if run in self.pods and run not in self.ends:
            self.report(structs.replace(self._observe(self.pods[run], self._now_ms()), checkpoint_error=why))

    def set_health(self, run: RunId, health: HealthState) -> None:
        if run in self.pods:
            self._health[run] = health
            self.refresh(run)

    def refresh(self, run: RunId) -> None:
        """Report its state if it has changed, because time has passed or something was found in its container."""
        pod = self.pods.get(run)
        if pod is not None:
            self._update(pod)

    def report(self, seen: RunObserved) -> None:
        self._observations.append(seen)
        self.changed_event.set()

    def take_observations(self) -> list[RunObserved]:
        seen, self._observations = self._observations, []
        return seen

    def end(self, seen: RunObserved) -> None:
        """The first end of a run counts."""
        if seen.run not in self.ends and seen.run not in self._forgotten:
            self.ends[seen.run] = seen
            self._on_end(seen)

    def forget(self, run: RunId) -> None:
        """Ignore its pod until it is removed."""
        self.ends.pop(run, None)
        self._drop(run)
        if self.pods.pop(run, None) is not None:
            self._forgotten.add(run)

    def listed(self, pods: list[RunPod]) -> None:
        present = {pod.run for pod in pods}
        self._forgotten &= present
        for run in self.pods.keys() - present:
            self._removed(run)
        for pod in pods:
            self._update(pod)

    def changed(self, kind: str, pod: RunPod) -> None:
        self._update(pod)
        if kind == "DELETED":
            self._removed(pod.run)

    def _update(self, pod: RunPod) -> None:
        run = pod.run
        if not run or run in self._forgotten:
            return
        self.pods[run] = pod
        if run in self.ends:
            return
        seen = self._observe(pod, self._now_ms())
        if seen.state in RUN_ENDED:
            self.end(seen)
        elif self._reported.get(run) != (state := (seen.state, seen.reason, seen.checkpoint_ms, seen.health)):
            self._reported[run] = state
            self.report(seen)

    def _removed(self, run: RunId) -> None:
        self._forgotten.discard(run)
        self._drop(run)
        pod = self.pods.pop(run, None)
        if pod is not None:
            self.end(removed_end(pod, self._now_ms()))

    def _drop(self, run: RunId) -> None:
        for table in (self._reported, self._checkpoint_ms, self._health):
            table.pop(run, None)


# An API server abandons a request after a minute by default (--request-timeout).
DOUBT_S = 75.0
POLL_S = 1.0


class UnconfirmedPods:
    """Runs whose create request was sent and not answered."""

    def __init__(self, runs: Runs, now_ms: Callable[[], int]) -> None:
        self._runs, self._now_ms = runs, now_ms
        self._created_ms = now_ms()
        self._unanswered: set[RunId] = set()
        self._resolving: dict[RunId, Callable[[], Awaitable[None]] | None] = {}

    def may_exist(self, order: Start) -> bool:
        """Whether an earlier request, of this or an earlier server, may have created its pod."""
        return order.run.id in self._unanswered or order.run.placed_ms < self._created_ms

    def sent(self, run: RunId) -> None:
        self._unanswered.add(run)

    def confirm(self, run: RunId) -> None:
        self._unanswered.discard(run)

    def known(self) -> dict[RunId, RunObserved]:
        now_ms, reason = self._now_ms(), "it is not known yet whether its pod was created"
        return {run: RunObserved(run, "placed", now_ms, reason=reason) for run in self._resolving}

    def stop_when_found(self, run: RunId, stop: Callable[[], Awaitable[None]]) -> None:
        if run in self._resolving:
            self._resolving[run] = stop

    async def resolve(self, run: RunId, refusal: BackendError | BackendRefused, pods: Pods) -> None:
        """Wait until its pod exists, which the watch reports, or is certain never to exist, which is reported here."""
        if run in self._resolving:
            return
        self._resolving[run] = None
        clock = asyncio.get_running_loop().time
        try:
            since = clock()
            while clock() - since < DOUBT_S:
                try:
                    exists = run in self._runs.pods or await pods.exists(run)
                except BackendError:
                    since, exists = clock(), False  # the API does not answer: the request may still arrive
                if exists:
                    self.confirm(run)
                    if (stop := self._resolving[run]) is not None:
                        await stop()
                    return
                await asyncio.sleep(POLL_S)
        finally:
            del self._resolving[run]
        self.confirm(run)
        permanent = isinstance(refusal, BackendRefused)
        self._runs.end(
            RunObserved(run, "failed", self._now_ms(), None, START_FAILED, refusal.message, permanent=permanent)
        )
