"""Jobs that are one gang though each lives by itself, as the pods of a group do: whoever takes their place takes all of them,
or only those that the gang can do without.

For the search for victims a bond is one gang under a number of its own, below zero; what it finds is told apart again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from msgspec import Struct, structs

from hodei.control.state import ClusterState
from hodei.engine.preemption.search import Victim
from hodei.engine.preemption.victims import Going, Guard, Place, VictimCandidate
from hodei.model.ids import JobId
from hodei.model.job import Run


class JobLink(Struct, frozen=True):
    """`core` go together, and with them `spare`, each of which may also go alone, the last first."""

    id: JobId
    core: tuple[JobId, ...]
    spare: tuple[JobId, ...] = ()

    @property
    def jobs(self) -> tuple[JobId, ...]:
        return (*self.core, *self.spare)


class JobLinks:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._bonds: dict[Hashable, JobLink] = {}
        self._of_job: dict[JobId, Hashable] = {}
        self._by_id: dict[JobId, JobLink] = {}
        self._last_id = 0
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._bonds)

    def tie(self, key: Hashable, core: Sequence[JobId], spare: Sequence[JobId] = ()) -> JobId | None:
        """The jobs of the gang `key` from now on; none for no gang any more. The number of one that is no more."""
        before = self._bonds.get(key)
        if (before.core, before.spare) == (tuple(core), tuple(spare)) if before is not None else not core:
            return None
        self.version += 1
        for id in before.jobs if before is not None else ():
            if self._of_job.get(id) == key:
                del self._of_job[id]
            self._cluster.moved(id)
        if not core:
            assert before is not None
            del self._bonds[key], self._by_id[before.id]
            return before.id
        if before is None:
            self._last_id -= 1
        bond = JobLink(before.id if before is not None else self._last_id, tuple(core), tuple(spare))
        self._bonds[key] = self._by_id[bond.id] = bond
        for id in bond.jobs:
            self._of_job[id] = key
            self._cluster.moved(id)
        return None

    def gang(self, job: JobId) -> JobId:
        """What the gang of a job is known by: its own number, or that of its bond."""
        bond = self.of(job)
        return job if bond is None else bond.id

    def of(self, job: JobId) -> JobLink | None:
        key = self._of_job.get(job)
        return self._bonds[key] if key is not None else None

    def jobs(self, id: JobId, some: Sequence[int] = ()) -> tuple[JobId, ...]:
        """Those that a number of the search stands for: itself, or those of a bond, `some` or all."""
        bond = self._by_id.get(id)
        return (id,) if bond is None else tuple(some) or bond.jobs

    # ------------------------------------------------------------------------------------- for the search

    def tenants(self, bond: JobLink, apart: dict[JobId, list[VictimCandidate]]) -> list[VictimCandidate]:
        """The bond as the tenants of one gang, made from those that its jobs would be alone."""
        out: list[VictimCandidate] = []
        alive = [id for id in bond.jobs if id in apart]
        staying = {id: t for id in alive for t in apart[id] if not t.stopping and t.stops_gang}
        going = [t for id in alive for t in apart[id] if t.stopping]
        core = [staying[id] for id in bond.core if id in staying]
        if going:
            members = tuple(t.id for t in going) if staying else ()
            out.append(_merged(bond.id, going, stopping=True, members=members))
        if core:
            # If the core goes all go: nobody may take the place of one that is too high for him.
            highest = max(tenant.job.priority for tenant in staying.values())
            whole = _merged(bond.id, core, priority=highest)
            whole.protected_until_ms = max(tenant.protected_until_ms for tenant in staying.values())
            out.append(whole)
        for order, id in enumerate(bond.spare):
            if id in staying:
                out.append(_merged(bond.id, [staying[id]], members=(id,), order=order))
        return out

    def apart(self, victims: Iterable[Victim], *, going: bool) -> list[Victim]:
        """Victims as the jobs that they are, those that were told already (`going`) or the others."""
        out: list[Victim] = []
        for victim in victims:
            if victim.id not in self._by_id:
                out.append(victim)
                continue
            for id in self.jobs(victim.id, victim.members):
                runs = [run for run in self._cluster.live_runs(id) if bool(run.stop_reason) == going]
                if runs:
                    out.append(Victim(id, self._cluster.jobs[id].spec, _nodes(runs)))
        return out


class LinkGuard:
    """A guard that is asked about bonds as about the jobs that they are."""

    def __init__(self, guard: Guard, bonds: JobLinks) -> None:
        self._guard, self._bonds = guard, bonds

    @property
    def version(self) -> int:
        return self._guard.version + self._bonds.version  # both only grow

    @version.setter
    def version(self, value: int) -> None:
        raise AttributeError("it follows from those of the guard and of the bonds")

    def guarded(self, job: JobId) -> bool:
        return any(self._guard.guarded(id) for id in self._bonds.jobs(job))

    def violations(self, going: Sequence[Going]) -> list[int]:
        told = [[(id, () if job < 0 else some) for id in self._bonds.jobs(job, some)] if job < 0 else [(job, some)]
                for job, some in going]  # fmt: skip
        counts = iter(self._guard.violations([one for each in told for one in each]))
        return [sum(next(counts) for _ in each) for each in told]


def _merged(
    id: JobId, tenants: Sequence[VictimCandidate], *, stopping: bool = False, members: tuple[int, ...] = (), order: int = 0,
    priority: int | None = None,
) -> VictimCandidate:  # fmt: skip
    first = tenants[0]
    spec = first.job if priority in (None, first.job.priority) else structs.replace(first.job, priority=priority)
    places: list[Place] = [place for tenant in tenants for place in tenant.places]
    return VictimCandidate(
        id, spec, tuple(places), min(tenant.since_ms for tenant in tenants),
        unsaved_ms=tuple(at for tenant in tenants for at in tenant.unsaved_ms),
        stopping=stopping, protected_until_ms=max(tenant.protected_until_ms for tenant in tenants), members=members, order=order,
    )  # fmt: skip


def _nodes(runs: Iterable[Run]) -> tuple[str, ...]:
    return tuple(sorted({run.node for run in runs}))
