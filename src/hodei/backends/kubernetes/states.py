"""What the cluster says of a pod, in the words of a run. Pure: no questions are asked here.

Told apart: the command's own end, its memory, its time, our own stop, somebody else's deletion, and what the node or the
cluster did to it. What never began may begin elsewhere; what was taken away in the middle is lost.
"""

from __future__ import annotations

import math
from datetime import datetime
from functools import cached_property

import msgspec
from msgspec import Struct, field, structs

from hodei.backends.kubernetes.manifest import CARE, END, MAIN, RUN, TIMEOUT, Care
from hodei.kube.api.objects import Condition, Meta, Slim
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import HealthState

START_FAILED = "start_failed"
OVER = ("Succeeded", "Failed")
# Nothing that comes later can make these come true.
_NEVER = ("InvalidImageName", "CreateContainerConfigError")
_PULLING = (
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip
# The node or the cluster took it, perhaps in the middle: not the run's own doing.
_TAKEN = ("Evicted", "NodeLost", "Shutdown", "NodeShutdown", "Terminated", "Preempting")
_BY_SIGNAL = (137, 143)
# How far the clocks of a node and of the API may be apart for a deletion to be the cause of a signal.
_CLOCKS_MS = 60_000
_SETTLE_MS = 10_000
_TOO_LONG = "it ran longer than it may"
_TEXT = 500


class Ending(Struct, frozen=True, omit_defaults=True):
    """Why we end a run; kept on its pod, so that whoever adopts it knows. `code` is "" for an order, else one of
    RunObserved's reason codes. `note`: what went wrong when its work was to be saved first."""

    reason: str = ""
    code: str = ""
    permanent: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        return "; ".join(part for part in (self.reason, self.note) if part)


class Terminated(Slim, frozen=True):
    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: str | None = None
    finished_at: str | None = None


class PendingColumns(Slim, frozen=True):
    reason: str = ""
    message: str = ""


class Running(Slim, frozen=True):
    started_at: str | None = None


class ContainerState(Slim, frozen=True):
    waiting: PendingColumns | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class Container(Slim, frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()
    ready: bool = False


class DatedCondition(Condition, frozen=True):
    last_transition_time: str | None = None


class Status(Slim, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: str | None = None
    conditions: tuple[DatedCondition, ...] = ()
    container_statuses: tuple[Container, ...] = ()


class FullMeta(Meta, frozen=True):
    finalizers: tuple[str, ...] = ()
    deletion_grace_period_seconds: int | None = None


class Spec(Slim, frozen=True):
    node_name: str = ""
    active_deadline_seconds: int | None = None


class RunPod(Slim, frozen=True, dict=True):
    """A pod of ours, as far as it says how its run stands."""

    metadata: FullMeta = field(default_factory=FullMeta)
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def run(self) -> RunId:
        return self.metadata.labels.get(RUN, "")

    @property
    def container(self) -> ContainerState:
        """Of our own container: a cluster may put others beside it, which do not count."""
        found = (one.state for one in self.status.container_statuses if one.name == MAIN)
        return next(found, ContainerState())

    @property
    def ready(self) -> bool:
        """What the kubelet's last looks at our container found."""
        return any(one.ready for one in self.status.container_statuses if one.name == MAIN)

    @cached_property
    def care(self) -> Care:
        """What the job asks for while it runs."""
        try:
            return msgspec.json.decode(self.metadata.annotations[CARE], type=Care)
        except (KeyError, msgspec.DecodeError):
            return Care()

    @property
    def over(self) -> bool:
        return self.status.phase in OVER or self.container.terminated is not None

    @property
    def began(self) -> bool:
        """Its container has run, or runs: there may be a log."""
        return self.container.running is not None or self.container.terminated is not None

    @property
    def leaving(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def told_to_go_ms(self) -> int:
        """When somebody asked for its deletion; 0 if nobody did. The API keeps that time plus the grace period."""
        if not self.leaving:
            return 0
        return at_ms(self.metadata.deletion_timestamp, 0) - 1000 * (self.metadata.deletion_grace_period_seconds or 0)

    @cached_property
    def ending(self) -> Ending | None:
        """Ours, if it is being ended by us."""
        try:
            return msgspec.json.decode(self.metadata.annotations[END], type=Ending)
        except (KeyError, msgspec.DecodeError):
            return None

    @property
    def gone_before_it_began(self) -> bool:
        """It is being deleted, nothing of it runs, and no kubelet has a word to say any more."""
        nobody = not self.spec.node_name or self.metadata.deletion_grace_period_seconds == 0
        return self.leaving and nobody and not self.began and not self.over

    def changed_ms(self, now_ms: int) -> int:
        """When it last changed, as far as it says so: of one that is over and does not say when that was."""
        told = max((at_ms(one.last_transition_time, 0) for one in self.status.conditions), default=0)
        return min(told or now_ms, now_ms)

    def condition(self, type: str) -> Condition | None:
        return next((one for one in self.status.conditions if one.type == type and one.status == "True"), None)


# ------------------------------------------------------------------------------------------------ how it stands


def observed(pod: RunPod, now_ms: int) -> RunObserved:
    """How the run stands. A pod that is being deleted runs until its container has ended."""
    state, status = pod.container, pod.status
    if state.terminated is not None:
        end = _ended(pod, state.terminated, now_ms)
        return structs.replace(end, started_ms=min(at_ms(state.terminated.started_at, 0), now_ms))
    if status.phase in OVER:
        return _without_a_word(pod, pod.changed_ms(now_ms))
    if pod.gone_before_it_began:
        return _by_us(pod, now_ms, None) or _lost(pod, now_ms, None, "its pod was deleted before it began")
    if state.running is not None or status.phase == "Running":
        began = at_ms(state.running.started_at if state.running else status.start_time, now_ms)
        return RunObserved(pod.run, "running", min(began, now_ms), health=probed(pod, now_ms))
    return RunObserved(pod.run, "placed", now_ms, reason=_why_it_waits(pod))


def vanished(pod: RunPod, now_ms: int) -> RunObserved:
    """The pod is there no more, and its end was never seen: somebody took the finalizer away."""
    return _by_us(pod, now_ms, None) or _lost(pod, now_ms, None, "its pod has gone without a word")


def hopeless(pod: RunPod, now_ms: int, patience_ms: int) -> Ending | None:
    """Why a run is to be given up whose container never comes; None while there is hope."""
    if pod.began or pod.over or pod.leaving:
        return None
    waiting = pod.container.waiting or PendingColumns()
    if waiting.reason in _NEVER:
        return Ending(_why_it_waits(pod), START_FAILED, permanent=True)
    waited_ms = now_ms - at_ms(pod.metadata.creation_timestamp, now_ms)
    if waited_ms >= patience_ms and (waiting.reason in _PULLING or not pod.spec.node_name):
        return Ending(_why_it_waits(pod) or "no scheduler of the cluster has put it on its node", START_FAILED)
    return None


def forced(pod: RunPod, now_ms: int) -> RunObserved | None:
    """The end of a run whose pod was deleted by force, and whose node has not said for a minute how it ended."""
    late = pod.leaving and pod.metadata.deletion_grace_period_seconds == 0 and not pod.over
    if not late or now_ms - pod.told_to_go_ms < _CLOCKS_MS:
        return None
    text = "its pod was deleted by force, and its node does not say how it ended"
    return _by_us(pod, now_ms, None) or _lost(pod, now_ms, None, text)


def probed(pod: RunPod, now_ms: int) -> HealthState:
    """What the kubelet's looks say of a run's health; "" if there are none, or none is over yet."""
    check, running = pod.care.probed, pod.container.running
    if check is None or running is None:
        return ""
    if pod.ready:
        return "ok"
    ran_ms = now_ms - at_ms(running.started_at, now_ms)
    return "failing" if ran_ms >= check.after_ms + check.every_ms + check.timeout_ms else ""


def unwell(pod: RunPod, now_ms: int) -> Ending | None:
    """Why a run is to be ended whose health check has failed too often in a row. Its container is not ready from its start
    to the first good look, and again after `failures` bad ones; so it is given the time of as many looks in any case. A
    kubelet that starts anew says "not ready" until its own first look: what it says must have held for a moment."""
    check, running = pod.care.probed, pod.container.running
    if check is None or running is None or pod.ready or pod.leaving or pod.over:
        return None
    ran_ms = now_ms - at_ms(running.started_at, now_ms)
    since = next((one.last_transition_time for one in pod.status.conditions if one.type == "ContainersReady"), None)
    held_ms = now_ms - at_ms(since, at_ms(running.started_at, now_ms))
    looked_ms = check.after_ms + check.every_ms * check.failures + check.timeout_ms
    if ran_ms < looked_ms or held_ms < min(check.every_ms, _SETTLE_MS) + check.timeout_ms:
        return None
    times = f"{check.failures} times in a row" if check.failures > 1 else "once"
    return Ending(f"its health check failed {times}", "unhealthy")


def deadline_s(pod: RunPod) -> int:
    """After how many seconds of its pod's life its time is over: counted from where its command began, not from where the
    pull of its image did. 0 if it has no bound, or has it already, or does not run yet."""
    running, bound = pod.container.running, pod.metadata.annotations.get(TIMEOUT, "")
    if running is None or pod.leaving or pod.spec.active_deadline_seconds is not None or not bound.isdigit():
        return 0
    began = at_ms(running.started_at, 0)
    before = max(0, began - at_ms(pod.status.start_time, began))
    return max(1, math.ceil((before + int(bound)) / 1000))


def grace_left(pod: RunPod, now_ms: int, grace_s: int) -> int | None:
    """The grace period to ask the API for so that the run is over `grace_s` from now; None if it will be anyway. The API
    counts from where the first deletion was asked for."""
    wanted_s = max(1, grace_s)
    held_s = pod.metadata.deletion_grace_period_seconds
    if not pod.leaving or held_s is None:
        return wanted_s
    since_s = max(0, (now_ms - pod.told_to_go_ms) // 1000)
    return since_s + wanted_s if since_s + wanted_s < held_s else None


# ------------------------------------------------------------------------------------------------ ends


def _ended(pod: RunPod, ended: Terminated, now_ms: int) -> RunObserved:
    run, status, code = pod.run, pod.status, ended.exit_code
    at = min(at_ms(ended.finished_at, now_ms), now_ms)
    if (ours := _by_us(pod, at, code)) is not None:
        return ours
    if status.reason == "DeadlineExceeded":
        return RunObserved(run, "failed", at, code, "timeout", _text(status.message) or _TOO_LONG)
    if ended.reason == "OOMKilled":
        return RunObserved(run, "failed", at, code, "oom", "it went over its memory limit")
    if ended.reason in ("StartError", "ContainerCannotRun"):
        return _could_not_start(run, at, ended)
    if status.reason in _TAKEN:
        return _taken(pod, at, code)
    if ended.reason == "ContainerStatusUnknown":
        return _lost(pod, at, None, "its node does not know any more how it ended")
    if pod.condition("DisruptionTarget") is not None or _deleted(pod, at, code):
        return _lost(pod, at, code, "its pod was deleted by somebody else")
    if code == 0:
        return RunObserved(run, "succeeded", at, 0)
    return RunObserved(
        run, "failed", at, code, "killed" if code > 128 else "", _text(ended.message) or f"exit code {code}"
    )


def _without_a_word(pod: RunPod, at: int) -> RunObserved:
    """It ended and nobody can say how its container did, if it ever had one."""
    run, status = pod.run, pod.status
    if (ours := _by_us(pod, at, None)) is not None:
        return ours
    if status.phase == "Succeeded":
        return RunObserved(run, "succeeded", at, 0)
    if status.reason == "DeadlineExceeded":
        return RunObserved(run, "failed", at, None, "timeout", _text(status.message) or _TOO_LONG)
    if status.reason in _TAKEN:
        return _taken(pod, at, None)
    if pod.container.running is not None or pod.condition("DisruptionTarget") is not None:
        return _lost(pod, at, None, "its node went away")
    # The node would not have it: somebody else was there first, or it lacks something. Elsewhere, or later.
    text = _text(f"{status.reason}: {status.message}".strip(": ")) or "its node did not start it, and does not say why"
    return RunObserved(run, "failed", at, None, START_FAILED, text)


def _by_us(pod: RunPod, at: int, code: int | None) -> RunObserved | None:
    """Ours only if the deletion came to pass: one that ended a moment before it has ended by itself."""
    ending = pod.ending if pod.leaving else None
    if ending is None:
        return None
    if ending.code:
        return RunObserved(pod.run, "failed", at, code, ending.code, ending.text, ending.permanent)
    return RunObserved(pod.run, "stopped", at, code, "", ending.text)


def _taken(pod: RunPod, at: int, code: int | None) -> RunObserved:
    """By its node. One that was evicted because it used more than its own limit would be so anywhere."""
    message = pod.status.message
    text = _text(f"{pod.status.reason}: {message}".strip(": "))
    if pod.status.reason == "Evicted" and "exceed" in message and "limit" in message:
        return RunObserved(pod.run, "failed", at, code, "killed", text)
    return RunObserved(pod.run, "lost", at, code, "lost", text)


def _deleted(pod: RunPod, at: int, code: int) -> bool:
    """Whether it ended because its pod was deleted, and not before. Both times are whole seconds of two clocks."""
    asked = pod.told_to_go_ms
    return asked > 0 and (at > asked or (code in _BY_SIGNAL and at > asked - _CLOCKS_MS))


def _lost(pod: RunPod, at: int, code: int | None, text: str) -> RunObserved:
    by = pod.condition("DisruptionTarget")
    if by is not None:
        text = f"{text} ({by.reason}: {by.message})"
    return RunObserved(pod.run, "lost", at, code, "lost", _text(text))


def _could_not_start(run: RunId, at: int, ended: Terminated) -> RunObserved:
    """As a shell would say it, if the command itself is what can not be started."""
    said = _text(ended.message)
    if "executable file not found" in said or "no such file or directory" in said:
        return RunObserved(run, "failed", at, 127, "", said)
    if "permission denied" in said or "exec format error" in said or "is a directory" in said:
        return RunObserved(run, "failed", at, 126, "", said)
    return RunObserved(run, "failed", at, None, START_FAILED, said or ended.reason)


def _why_it_waits(pod: RunPod) -> str:
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
    return text[:_TEXT]


def at_ms(stamp: str | None, otherwise: int) -> int:
    """A kubelet that does not know a time any more writes none, or that of 1970."""
    try:
        at = datetime.fromisoformat(stamp) if stamp else None
    except ValueError:
        return otherwise
    return round(at.timestamp() * 1000) if at is not None and at.year > 1970 else otherwise
