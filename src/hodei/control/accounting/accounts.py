"""Everything about who may have how much, as one thing for the controller: shares, quotas, budgets and ranges.

Where nothing of it is configured, nothing of it is kept and nothing is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from hodei.control.accounting.budgets import Budgets, ProjectBudget
from hodei.control.accounting.quotas import LENT, NOBODY, ProjectQuota, Quotas
from hodei.control.accounting.ranges import Range, Ranges
from hodei.control.accounting.shares import FairShare, SharesPolicy
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.state import Accountant, ClusterState
from hodei.engine.plan import Refusal
from hodei.engine.view import Bounds, Gang, Shares
from hodei.model.array import elements_of
from hodei.model.decision import Reason
from hodei.model.effects import Save, SaveUsage
from hodei.model.errors import InvalidInput, QueueFull
from hodei.model.job import Job, JobSpec
from hodei.model.quota import QuotaRow
from hodei.model.share import ShareReport
from hodei.model.usage import UsageRow


class AccountsPolicy(Struct, frozen=True):
    """`shares` None: nobody's past counts. `max_priority` by role and `project_users` by project: see AdmissionConfig."""

    shares: SharesPolicy | None = None
    quotas: Mapping[str, ProjectQuota] = {}
    budgets: Mapping[str, ProjectBudget] = {}
    ranges: Mapping[str, Range] = {}
    max_priority: Mapping[str, int] = {}
    project_users: Mapping[str, Sequence[str]] = {}


class Accounts:
    def __init__(self, policy: AccountsPolicy, world: ClusterState, lives: JobLifecycle) -> None:
        self.policy = policy
        self.quotas = Quotas(policy.quotas, world, lives)
        self.sharing = FairShare(policy.shares or SharesPolicy(), world) if policy.shares or policy.budgets else None
        self._counts_past = policy.shares is not None
        self.budgets: Budgets | None = None
        if policy.budgets and self.sharing is not None:
            self.budgets = Budgets(policy.budgets, self.sharing.ledger, self.sharing.path_of_project)
        self.ranges = Ranges(policy.ranges)
        kept: list[Accountant] = [self.quotas] if self.quotas else []
        world.accountants = (*kept, self.sharing) if self.sharing is not None else tuple(kept)
        self._world, self._lives = world, lives
        self._renewed_ms: int | None = None
        # How many wait, by project and user; kept only where a quota bounds them.
        self._waiting: dict[str, dict[str, int]] = {}
        world.on_pending = None
        if any(quota.pending is not None for quota in policy.quotas.values()):
            world.on_pending = self._count_pending
            for job in world.jobs.values():
                if job.state == "pending":
                    self._count_pending(job, 1)

    def _count_pending(self, job: Job, change: int) -> None:
        by, user = self._waiting.setdefault(job.spec.project, {}), job.spec.user
        by[user] = by.get(user, 0) + change
        if not by[user]:
            del by[user]
            if not by:
                del self._waiting[job.spec.project]

    def take_settings(self, other: Accounts) -> None:
        """Other policies from now on; what was used so far stays known, and what runs is counted anew."""
        rows = self.sharing.ledger.rows() if self.sharing is not None else []
        self.__init__(other.policy, self._world, self._lives)  # type: ignore[misc]
        self.restore(rows)
        for job in sorted(self._world.runs):
            for run in self._world.live_runs(job):
                for accountant in self._world.accountants:
                    accountant.opened(run, self._world.jobs[job].spec)

    # ------------------------------------------------------------------------------------------- for decisions

    def shares(self, now_ms: int) -> Shares | None:
        if self.sharing is None or not self._counts_past:
            return None
        self.sharing.refresh(now_ms)
        return self.sharing

    @property
    def bounds(self) -> Bounds | None:
        return self if self.quotas or self.budgets is not None else None

    def refusal(self, gang: Gang, now_ms: int) -> Reason | None:
        found = self.quotas.refusal(gang) if self.quotas else None
        if found is None and self.budgets is not None:
            found = self.budgets.refusal(gang, now_ms)
        return found

    def refused(self, gang: Gang, refusal: Refusal, now_ms: int) -> None:
        """What a refusal means for others: borrowers are to give back, those beyond their soft quota make way."""
        if not self.quotas:
            return
        if refusal.for_room:
            self.quotas.wants_room(gang)
        elif refusal.verdicts and refusal.verdicts[0].reason.code == LENT:
            self.quotas.take_back(gang, now_ms)

    def next_ms(self) -> int | None:
        """When a budget begins anew."""
        return self._renewed_ms

    def turn(self, now_ms: int) -> bool:
        """Whether a budget has begun anew, so that those who wait for it may go on."""
        if self.budgets is None:
            return False
        begun = self._renewed_ms is not None and now_ms >= self._renewed_ms
        if begun or self._renewed_ms is None:
            self._renewed_ms = self.budgets.next_ms(now_ms)
        return begun

    # ---------------------------------------------------------------------------------------------- the gate

    def admitted(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The jobs as they may come in, with defaults filled in. InvalidInput for what could never start, QueueFull for
        more than may wait: which limit, how much is used, by whom."""
        specs = self.ranges.applied(specs)
        if self.quotas:
            for spec in specs:
                never = self.quotas.never(spec)
                if never:
                    raise InvalidInput(
                        f"{spec.name} can never run: {never}", hint="ask for less; see 'hodei quota'", code="OVER_QUOTA"
                    )
            self._check_pending(specs)
        return specs

    def _check_pending(self, specs: Sequence[JobSpec]) -> None:
        bounded = {spec.project for spec in specs if (q := self.quotas.of(spec.project)) and q.pending is not None}
        if not bounded:
            return
        waiting = {project: dict(self._waiting.get(project, {})) for project in bounded}
        for spec in specs:
            mine = self.quotas.of(spec.project)
            if mine is None or mine.pending is None:
                continue
            by, more = waiting[spec.project], elements_of(spec)
            if sum(by.values()) + more > mine.pending:
                most = sorted(by.items(), key=lambda entry: (-entry[1], entry[0]))[:3]
                who = ", ".join(f"{user or NOBODY} {count}" for user, count in most)
                raise QueueFull(
                    f"project {spec.project} may have {mine.pending} jobs waiting and has {sum(by.values())} ({who})",
                    hint="wait for jobs to start, or cancel some",
                    code="PENDING_QUOTA",
                )
            by[spec.user] = by.get(spec.user, 0) + more

    # ------------------------------------------------------------------------------------ store and telling

    def restore(self, rows: Iterable[UsageRow]) -> None:
        if self.sharing is not None:
            self.sharing.restore(rows)

    def saves(self) -> list[Save]:
        if self.sharing is None:
            return []
        rows = self.sharing.ledger.take_dirty()
        return [SaveUsage(tuple(rows))] if rows else []

    def share_report(self, now_ms: int) -> ShareReport | None:
        """None where nobody keeps account."""
        if self.sharing is None:
            return None
        policy = self.policy.shares or SharesPolicy()
        budgets = tuple(self.budgets.rows(now_ms)) if self.budgets is not None else ()
        return ShareReport(
            policy.formula, now_ms, tuple(self.sharing.rows(now_ms)),
            half_life_ms=0 if policy.window_ms else policy.half_life_ms, window_ms=policy.window_ms, budgets=budgets,
        )  # fmt: skip

    def quota_rows(self) -> list[QuotaRow]:
        return list(self.quotas.rows())
