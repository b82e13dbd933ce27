"""Whether a job waits only because every backend that could take it is down or was never reached.

"Could take it" is tried by the job's own filters on empty and healthy nodes: first on those whose backend is up, then on
all. Backends that were never reached have no nodes here; of them only the name and what they can do is known.
"""

from __future__ import annotations

from collections.abc import Hashable

from hodei.control.admission.gate import Gate
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang, View
from hodei.model.facts import BackendReported
from hodei.model.job import JobSpec
from hodei.model.needs import NEEDS, needs_of

UNAVAILABLE = "BACKEND_UNAVAILABLE"
DISABLED = "BACKEND_DISABLED"
_MOST_KEPT = 10_000


class BackendAvailability:
    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._unreached: dict[str, BackendReported] = {}
        self._version = 0
        self._seen = (-1, -1)
        self._down: dict[str, tuple[str, str]] = {}  # by node, why its backend is down, and the code of that
        self._up, self._all = Table(), Table()
        self._texts: dict[Hashable, str] = {}

    def reported(self, fact: BackendReported) -> None:
        self._version += 1
        if fact.down:
            self._unreached[fact.backend] = fact
        else:
            self._unreached.pop(fact.backend, None)

    def unknown(self, spec: JobSpec) -> list[str]:
        """Why backends are down that were never reached and that the job may use: nobody knows if it fits there."""
        return [self._unreached[name].down for name in sorted(self._unreached) if _may_use(spec, self._unreached[name])]

    def text(self, gang: Gang, refusal: Refusal) -> str:
        """What to say if only backends that are down could take the gang; "" if that is not the reason."""
        if refusal.verdicts and not refusal.verdicts[0].count:
            return ""  # refused before any node was looked at
        self._keep_up()
        if not self._down and not self._unreached:
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
        causes += self.unknown(spec)
        if not causes:
            return "; ".join(
                f"{fact.down}; and backend {fact.backend} cannot {' or '.join(NEEDS[need].what for need in unmet)}"
                for fact, unmet in self._named_in_vain(spec)
            )
        return f"every backend that could take it is unavailable: {'; '.join(causes[:5])}"

    def advice(self, spec: JobSpec) -> str:
        """What to do about a job that would not start either if the backends that it names were reached; "" if it might."""
        needs = [need for _, unmet in self._named_in_vain(spec) for need in unmet] if not self.unknown(spec) else []
        return "; ".join(NEEDS[need].hint for need in dict.fromkeys(needs))

    def _named_in_vain(self, spec: JobSpec) -> list[tuple[BackendReported, list[str]]]:
        """Backends that the job names, that were never reached, and what of its needs is known that they cannot meet."""
        wanted = set(spec.backend.names) if spec.backend.mode == "specific" else set[str]()
        wanted = wanted.union(*(task.backends for task in spec.tasks))
        needs = dict.fromkeys(need for task in spec.tasks for need in needs_of(spec, task))
        found = [self._unreached[name] for name in sorted(wanted & self._unreached.keys())]
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
        now = (table.generation, self._version)
        if self._seen == now:
            return
        self._seen = now
        self._texts.clear()
        self._down = {
            node.name: (node.not_ready_reason, node.not_ready_code) for node in table.nodes if node.not_ready_code
        }
        if self._down or self._unreached:
            self._all, self._up = table.at_best(), table.at_best(backends_up=True)
            self._all.settle()
            self._up.settle()


def _may_use(spec: JobSpec, backend: BackendReported) -> bool:
    if spec.backend.mode == "specific" and backend.backend not in spec.backend.names:
        return False
    return any(
        (not task.backends or backend.backend in task.backends) and not set(needs_of(spec, task)) & set(backend.cannot)
        for task in spec.tasks
    )
