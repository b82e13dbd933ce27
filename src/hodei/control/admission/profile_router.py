"""Several schedulers under one roof: which line a job goes to, what is done when it waits there too long, and how often a
line that finds no room is tried. One object that the controller asks; each idea has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct, structs

from hodei.control.admission.escalation import Escalations
from hodei.control.admission.gate import Gate
from hodei.control.admission.routing import FAULTS, Routing, limits_told
from hodei.control.lifecycle.retry import Backoff
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.model.escalation_state import EscalationStep, apply_escalation, escalation_steps
from hodei.model.explanation import Status
from hodei.model.job import Job
from hodei.model.resources import format_duration

# --------------------------------------------------------------------------------------- retry breaker
# When the cluster stays full, tries that nothing but the clock calls for are made less and less often.


FREES_ROOM: frozenset[Trigger] = frozenset({"run_ended", "node_joined", "node_changed", "job_ended"})
TICK_MS = 1000


class BreakerPolicy(Struct, frozen=True):
    """`rounds` in vain within `within_ms` open it; the first pause is `pause_ms`. 0 rounds: it never opens."""

    rounds: int = 10
    within_ms: int = 60_000
    pause_ms: int = 2000
    max_pause_ms: int = 30_000


class Breaker(Struct):
    """Of one line. `until_ms`: no try before that for the clock's sake, while it is `open`. `opened`: how often it has.
    `faults` is for those whom a broken plugin keeps from being placed: all of a line pause until `mended_ms` together."""

    vain: int = 0
    first_ms: int = 0
    open: bool = False
    since_ms: int = 0
    pause_ms: int = 0
    until_ms: int = 0
    opened: int = 0
    faults: int = 0
    mended_ms: int = 0


class Breakers:
    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self.policy = policy or BreakerPolicy()
        self.of: dict[str, Breaker] = {}

    def woken(self, triggers: Collection[Trigger]) -> None:
        """Room may have become free, or the cluster is not what it was: all are closed."""
        if self.of and not FREES_ROOM.isdisjoint(triggers):
            for breaker in self.of.values():
                _close(breaker)

    def lets_try(self, line: str, now_ms: int) -> bool:
        """Whether a line may be tried again for no other reason than that time has passed."""
        breaker = self.of.get(line)
        return breaker is None or not breaker.open or breaker.until_ms <= now_ms

    def ticked(self, line: str, started: int, now_ms: int) -> None:
        """A round that the clock called for is over."""
        breaker = self.of.setdefault(line, Breaker())
        if started or not self.policy.rounds:
            _close(breaker)
            return
        if not breaker.vain or (not breaker.open and now_ms - breaker.first_ms > self.policy.within_ms):
            breaker.vain, breaker.first_ms = 0, now_ms
        breaker.vain += 1
        if breaker.open:
            breaker.pause_ms = min(breaker.pause_ms * 2, self.policy.max_pause_ms)
        elif breaker.vain >= self.policy.rounds:
            breaker.open, breaker.since_ms, breaker.pause_ms = True, now_ms, self.policy.pause_ms
            breaker.opened += 1

    def next_ms(self, line: str, now_ms: int, known_ms: int | None) -> int:
        """When the clock calls for the next try. `known_ms`: when time is known to make a difference (None: it is not
        known when, so that no pause is safe)."""
        breaker = self.of.get(line)
        if breaker is None or not breaker.open or known_ms is None:
            if breaker is not None:
                breaker.until_ms = now_ms + TICK_MS
            return now_ms + TICK_MS
        breaker.until_ms = max(min(now_ms + breaker.pause_ms, known_ms), now_ms + TICK_MS)
        return breaker.until_ms

    def resume_ms(self, now_ms: int) -> int | None:
        """When the first of the lines that are paused now is to be tried for the clock's sake."""
        return min((b.until_ms for b in self.of.values() if b.open and b.until_ms > now_ms), default=None)

    def after_fault(self, line: str, now_ms: int, backoff: Backoff) -> int:
        """Until when a gang that a broken plugin has refused steps aside. The pause belongs to the line and not to the
        gang: nobody is tried again sooner than one who came before it or counts for more."""
        breaker = self.of.setdefault(line, Breaker())
        if breaker.mended_ms <= now_ms:
            if now_ms - breaker.mended_ms > backoff.max_ms:
                breaker.faults = 0  # it has worked in between
            breaker.faults += 1
            breaker.mended_ms = now_ms + backoff.pause_ms(0, breaker.faults)
        return breaker.mended_ms

    def take_settings(self, other: Breakers) -> None:
        """From now on by another's settings, and all closed: what was in vain may not be any more."""
        self.policy = other.policy
        self.of.clear()


def _close(breaker: Breaker) -> None:
    breaker.vain, breaker.open, breaker.since_ms, breaker.pause_ms, breaker.until_ms = 0, False, 0, 0, 0


# ----------------------------------------------------------------------------------------------------


class ProfileRouter:
    def __init__(
        self,
        routing: Routing | None = None,
        escalations: Escalations | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        self.routing = routing or Routing()
        self.escalations = escalations or Escalations()
        self.breakers = Breakers(breaker)
        self._tick_ms: int | None = None

    def bind(
        self,
        cluster: ClusterState,
        lines: Mapping[str, Any],
        gate: Gate,
        enqueue: Callable[[Job, int], None],
        dequeue: Callable[[Job], None],
    ) -> None:
        gate.routing = self.routing
        self._cluster, self._lines = cluster, lines
        self.escalations.bind(cluster, lines, gate.never_fits, self.routing, enqueue, dequeue)

    def take_settings(self, other: ProfileRouter) -> None:
        self.routing.take_settings(other.routing)
        self.escalations.take_settings(other.escalations)
        self.breakers.take_settings(other.breakers)

    # ------------------------------------------------------------------------------------------ coming in

    def routed(self, job: Job) -> Job:
        """A new job with the profile that it goes to."""
        spec = self.routing.routed(job.spec)
        return job if spec is job.spec else structs.replace(job, spec=spec)

    def restored(self, job: Job) -> Job:
        """A job from the store with what was changed for it before."""
        return (
            structs.replace(job, spec=apply_escalation(job.spec, job.escalation_state)) if job.escalation_state else job
        )

    @staticmethod
    def afresh(job: Job) -> Job:
        """A job that a user wants to start from the beginning: as he wrote it."""
        return structs.replace(job, escalation_state="") if job.escalation_state else job

    # ------------------------------------------------------------------------------------- tries by the clock

    def wake(self, triggers: Collection[Trigger], now_ms: int) -> Collection[str]:
        """Wake those whom one of the triggers may help; the lines that are tried because time has passed."""
        self.breakers.woken(triggers)
        if "time" not in triggers:
            for line in self._lines.values():
                if line.gangs:
                    line.wake(*triggers)
            return ()
        facts = [trigger for trigger in triggers if trigger != "time"]
        ticked = {name for name in self._lines if self.breakers.lets_try(name, now_ms)}
        for name, line in self._lines.items():
            if name in ticked:
                line.wake(*triggers)
            elif facts:
                line.wake(*facts)
        return ticked

    def turn(self, now_ms: int) -> bool:
        """Do what has become due for those who wait; whether the clock calls for another try of them."""
        self.escalations.run_out(now_ms)
        if self._tick_ms is None or now_ms < self._tick_ms:
            return False
        self._tick_ms = self.breakers.resume_ms(now_ms)
        return True

    def next_ms(self) -> int | None:
        tick_ms, due_ms = self._tick_ms, self.escalations.next_ms()
        if tick_ms is None or due_ms is None:
            return due_ms if tick_ms is None else tick_ms
        return min(tick_ms, due_ms)

    def ticked(self, line: str, tried: int, refused: int, now_ms: int) -> None:
        """How a round went that the clock called for."""
        if tried:
            self.breakers.ticked(line, tried - refused, now_ms)

    def call_again(self, line: str, now_ms: int, known_ms: int | None) -> None:
        """Someone was refused whom time may help; `known_ms`: when it will at the soonest, if that is known."""
        at_ms = self.breakers.next_ms(line, now_ms, known_ms)
        self._tick_ms = at_ms if self._tick_ms is None else min(self._tick_ms, at_ms)

    def after_fault(self, line: str, now_ms: int, backoff: Backoff) -> int:
        return self.breakers.after_fault(line, now_ms, backoff)

    def is_broken(self, line: str) -> bool:
        """Whether a plugin of this profile has failed in several rounds one after another."""
        breaker = self.breakers.of.get(line)
        return breaker is not None and breaker.faults >= FAULTS

    # ------------------------------------------------------------------------------------------- for `why`

    def escalation_steps(self, job: Job, status: Status) -> tuple[EscalationStep, ...]:
        """What was done about a job so far, and what will be or will not be."""
        out, profile = list(escalation_steps(job.spec, job.escalation_state)), job.spec.profile
        if job.state != "pending":
            return tuple(out)
        out += limits_told(job)
        fallback, breaker = self.escalations.fallback_of(profile), self.breakers.of.get(profile)
        if fallback is not None and self.routing.open_to(fallback.to, job.spec.project):
            when = f"after {format_duration(fallback.after_ms)} or " if fallback.after_ms else ""
            out.append(
                EscalationStep(f"goes to profile {fallback.to} {when}if no node of {profile} could ever take it")
            )
        elif status == "unsatisfiable" and len(self._lines) > 1:
            out.append(EscalationStep(f"unschedulable: its profile {profile} has no fallback that it could go to"))
        if breaker is not None and breaker.open:
            every = f"every {breaker.pause_ms / 1000:g} s, and at once when room is freed"
            out.append(
                EscalationStep(
                    f"the cluster stays full: the line of profile {profile} is tried {every}", breaker.since_ms
                )
            )
        return tuple(out)
