"""Several schedulers under one roof: which line a job goes to, what is done when it waits there too long, and how often a
line that finds no room is tried. One object that the controller asks; each idea has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import structs

from hodei.control.admission.escalation import Escalations
from hodei.control.admission.gate import Gate
from hodei.control.admission.profile_availability import FAULTS
from hodei.control.admission.retry_breaker import BreakerPolicy, Breakers
from hodei.control.admission.routing import Routing
from hodei.control.admission.wait_limits import limits_told
from hodei.control.lifecycle.retry import Backoff
from hodei.control.state import ClusterState
from hodei.engine.points import Trigger
from hodei.model.escalation_state import Measure, applied, measures
from hodei.model.explanation import Status
from hodei.model.job import Job
from hodei.model.quantity import format_duration


class ProfileRouter:
    def __init__(
        self,
        routing: Routing | None = None,
        recourses: Escalations | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        self.routing = routing or Routing()
        self.recourses = recourses or Escalations()
        self.breakers = Breakers(breaker)
        self._tick_ms: int | None = None

    def bind(
        self,
        world: ClusterState,
        lines: Mapping[str, Any],
        gate: Gate,
        enqueue: Callable[[Job, int], None],
        dequeue: Callable[[Job], None],
    ) -> None:
        gate.routing = self.routing
        self._world, self._lines = world, lines
        self.recourses.bind(world, lines, gate.never_fits, self.routing, enqueue, dequeue)

    def take_settings(self, other: ProfileRouter) -> None:
        self.routing.take_settings(other.routing)
        self.recourses.take_settings(other.recourses)
        self.breakers.take_settings(other.breakers)

    # ------------------------------------------------------------------------------------------ coming in

    def routed(self, job: Job) -> Job:
        """A new job with the profile that it goes to."""
        spec = self.routing.routed(job.spec)
        return job if spec is job.spec else structs.replace(job, spec=spec)

    def restored(self, job: Job) -> Job:
        """A job from the store with what was changed for it before."""
        return structs.replace(job, spec=applied(job.spec, job.recourse)) if job.recourse else job

    @staticmethod
    def afresh(job: Job) -> Job:
        """A job that a user wants to start from the beginning: as he wrote it."""
        return structs.replace(job, recourse="") if job.recourse else job

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
        self.recourses.run_out(now_ms)
        if self._tick_ms is None or now_ms < self._tick_ms:
            return False
        self._tick_ms = self.breakers.resume_ms(now_ms)
        return True

    def next_ms(self) -> int | None:
        tick_ms, due_ms = self._tick_ms, self.recourses.next_ms()
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

    def measures(self, job: Job, status: Status) -> tuple[Measure, ...]:
        """What was done about a job so far, and what will be or will not be."""
        out, profile = list(measures(job.spec, job.recourse)), job.spec.profile
        if job.state != "pending":
            return tuple(out)
        out += limits_told(job)
        fallback, breaker = self.recourses.fallback_of(profile), self.breakers.of.get(profile)
        if fallback is not None and self.routing.open_to(fallback.to, job.spec.project):
            when = f"after {format_duration(fallback.after_ms)} or " if fallback.after_ms else ""
            out.append(Measure(f"goes to profile {fallback.to} {when}if no node of {profile} could ever take it"))
        elif status == "unsatisfiable" and len(self._lines) > 1:
            out.append(Measure(f"unschedulable: its profile {profile} has no fallback that it could go to"))
        if breaker is not None and breaker.open:
            every = f"every {breaker.pause_ms / 1000:g} s, and at once when room is freed"
            out.append(
                Measure(f"the cluster stays full: the line of profile {profile} is tried {every}", breaker.since_ms)
            )
        return tuple(out)
