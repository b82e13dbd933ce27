"""Whether a job waits only because every backend that could take it is down or was never reached.

"Could take it" is tried by the job's own filters on empty and healthy nodes: first on those whose backend is up, then on
all. Backends that were never reached have no nodes here; of them only the name and what they can do is known.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from msgspec import Struct

from hodei.control.admission.gate import Gate
from hodei.control.lifecycle.retry import Backoff
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang, View
from hodei.model.backend import NEEDS, needs_of
from hodei.model.facts import BackendReported
from hodei.model.job import JobSpec

UNAVAILABLE = "BACKEND_UNAVAILABLE"
DISABLED = "BACKEND_DISABLED"
_MOST_KEPT = 10_000


class BackendAvailability:
    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._unreached = gate.unreached
        self._seen = (-1, -1)
        self._down: dict[str, tuple[str, str]] = {}  # by node, why its backend is down, and the code of that
        self._up, self._all = Table(), Table()
        self._texts: dict[Hashable, str] = {}

    def text(self, gang: Gang, refusal: Refusal) -> str:
        """What to say if only backends that are down could take the gang; "" if that is not the reason."""
        if refusal.verdicts and not refusal.verdicts[0].count:
            return ""  # refused before any node was looked at
        self._keep_up()
        if not self._down and not self._unreached.reports:
            return ""
        found = self._texts.get(gang.group)
        if found is None:
            if len(self._texts) > _MOST_KEPT:
                self._texts.clear()
            found = self._texts[gang.group] = self._find(gang)
        return found

    def _find(self, gang: Gang) -> str:
        spec = gang.job
        if self._gate.could_take(self._up, spec):
            return ""
        causes = list[str]()
        if self._down and self._gate.could_take(self._all, spec):
            causes = self._suitable(gang)
        causes += self._unreached.usable_by(spec)
        if not causes:
            return "; ".join(
                f"{fact.down}; and backend {fact.backend} cannot {' or '.join(NEEDS[need].what for need in unmet)}"
                for fact, unmet in self._named_in_vain(spec)
            )
        return f"every backend that could take it is unavailable: {'; '.join(causes[:5])}"

    def advice(self, spec: JobSpec) -> str:
        """What to do about a job that would not start either if the backends that it names were reached; "" if it might."""
        needs = (
            [need for _, unmet in self._named_in_vain(spec) for need in unmet]
            if not self._unreached.usable_by(spec)
            else []
        )
        return "; ".join(NEEDS[need].hint for need in dict.fromkeys(needs))

    def _named_in_vain(self, spec: JobSpec) -> list[tuple[BackendReported, list[str]]]:
        """Backends that the job names, that were never reached, and what of its needs is known that they cannot meet."""
        wanted = set(spec.backend.names) if spec.backend.mode == "specific" else set[str]()
        wanted = wanted.union(*(task.backends for task in spec.tasks))
        needs = dict.fromkeys(need for task in spec.tasks for need in needs_of(spec, task))
        reports = self._unreached.reports
        found = [reports[name] for name in sorted(wanted & reports.keys())]
        return [(fact, unmet) for fact in found if (unmet := [need for need in needs if need in fact.cannot])]

    def _suitable(self, gang: Gang) -> list[str]:
        """The causes of the backends that are down and have a node for one of its members."""
        profile, names = self._engine.profile(gang), set[str]()
        for member in gang.members:
            found = objections(profile, self._engine.runner, member, self._all, View(0))
            names |= {
                name for name, refused in zip(self._all.names, found.refused.tolist(), strict=True) if not refused
            }
        down = {self._down[name] for name in names if name in self._down}
        # That an operator has disabled them all is a reason of its own, which the nodes give.
        return sorted(cause for cause, _ in down) if any(code != DISABLED for _, code in down) else []

    def _keep_up(self) -> None:
        table = self._engine.table
        table.settle()
        now = (table.generation, self._unreached.version)
        if self._seen == now:
            return
        self._seen = now
        self._texts.clear()
        self._down = {
            node.name: (node.not_ready_reason, node.not_ready_code) for node in table.nodes if node.not_ready_code
        }
        if self._down or self._unreached.reports:
            self._all, self._up = table.at_best(), table.at_best(backends_up=True)
            self._all.settle()
            self._up.settle()


# --------------------------------------------------------------------------------------------- circuit
# A circuit breaker: whoever fails again and again is left alone for a while, then tried once, and trusted again if it
# went well.


State = Literal["closed", "open", "half-open"]


class CircuitPolicy(Struct, frozen=True):
    failures: int = 3
    pauses: Backoff = Backoff(base_ms=5000, max_ms=300_000, jitter_milli=0)


class Circuit:
    """`since_ms`: since when there is nothing but failures, 0 if the last answer was a good one; `text`: what the first of
    them said."""

    def __init__(self, policy: CircuitPolicy | None = None) -> None:
        self.policy = policy or CircuitPolicy()
        self.failures = 0
        self.since_ms = 0
        self.until_ms = 0
        self.text = ""
        self._opened = 0

    @property
    def broken(self) -> bool:
        """Open or half-open: not to be relied on."""
        return self._opened > 0

    def state(self, now_ms: int) -> State:
        if not self.broken:
            return "closed"
        return "open" if now_ms < self.until_ms else "half-open"

    def succeeded(self) -> bool:
        """True if it was broken until now."""
        mended = self.broken
        self.failures = self._opened = self.since_ms = self.until_ms = 0
        self.text = ""
        return mended

    def failed(self, now_ms: int, text: str) -> bool:
        """True if it is broken from now on."""
        if not self.failures:
            self.since_ms, self.text = now_ms, text
        self.failures += 1
        if self.failures < self.policy.failures or (self.broken and now_ms < self.until_ms):
            return False
        self._opened += 1
        self.until_ms = now_ms + self.policy.pauses.pause_ms(0, self._opened)
        return self._opened == 1

    def next_ms(self, now_ms: int, every_ms: int) -> int:
        """When to ask next: at the end of its pause, soon after a failure, else after the usual time."""
        if self.broken:
            return max(self.until_ms, now_ms)
        return now_ms + (min(self.policy.pauses.base_ms, every_ms) if self.failures else every_ms)
