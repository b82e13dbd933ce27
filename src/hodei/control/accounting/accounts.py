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
from hodei.control.state import ClusterState
from hodei.engine.plan import Refusal
from hodei.engine.view import Bounds, Gang, Shares
from hodei.model.accounting import QuotaRow, ShareReport, UsageRow
from hodei.model.array import element_count
from hodei.model.effects import Save, SaveUsage
from hodei.model.errors import InvalidInput, QueueFull
from hodei.model.job import Job, JobSpec, Reason, Run


class AccountsPolicy(Struct, frozen=True):
    """`shares` None: nobody's past counts. `max_priority` by role and `project_users` by project: see AdmissionConfig."""

    shares: SharesPolicy | None = None
    quotas: Mapping[str, ProjectQuota] = {}
    budgets: Mapping[str, ProjectBudget] = {}
    ranges: Mapping[str, Range] = {}
    max_priority: Mapping[str, int] = {}
    project_users: Mapping[str, Sequence[str]] = {}


class Accounts:
    def __init__(self, policy: AccountsPolicy, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster, self._lifecycle = cluster, lifecycle
        cluster.signals.run_opened.append(self._run_opened)
        cluster.signals.run_closed.append(self._run_closed)
        cluster.signals.job_pending.append(self._count_pending)
        self._use(policy)

    def _use(self, policy: AccountsPolicy) -> None:
        cluster = self._cluster
        self.policy = policy
        self.quotas = Quotas(policy.quotas, cluster, self._lifecycle)
        self.sharing = FairShare(policy.shares or SharesPolicy(), cluster) if policy.shares or policy.budgets else None
        self._counts_past = policy.shares is not None
        self.budgets: Budgets | None = None
        if policy.budgets and self.sharing is not None:
            self.budgets = Budgets(policy.budgets, self.sharing.ledger, self.sharing.path_of_project)
        self.ranges = Ranges(policy.ranges)
        self._renewed_ms: int | None = None
        # Pending jobs by project and user; counted only where a quota bounds them.
        self._waiting: dict[str, dict[str, int]] = {}
        self._counts_pending = any(quota.pending is not None for quota in policy.quotas.values())
        if self._counts_pending:
            for job in cluster.jobs.values():
                if job.state == "pending":
                    self._count_pending(job, 1)

    def _run_opened(self, run: Run, spec: JobSpec) -> None:
        if self.quotas:
            self.quotas.opened(run, spec)
        if self.sharing is not None:
            self.sharing.opened(run, spec)

    def _run_closed(self, run: Run, spec: JobSpec) -> None:
        if self.quotas:
            self.quotas.closed(run, spec)
        if self.sharing is not None:
            self.sharing.closed(run, spec)

    def _count_pending(self, job: Job, change: int) -> None:
        if not self._counts_pending:
            return
        by, user = self._waiting.setdefault(job.spec.project, {}), job.spec.user
        by[user] = by.get(user, 0) + change
        if not by[user]:
            del by[user]
            if not by:
                del self._waiting[job.spec.project]

    def take_settings(self, other: Accounts) -> None:
        """Other policies from now on; what was used so far stays known, and what runs is counted anew."""
        rows = self.sharing.ledger.rows() if self.sharing is not None else []
        self._use(other.policy)
        self.restore(rows)
        for job in sorted(self._cluster.runs):
            for run in self._cluster.live_runs(job):
                self._run_opened(run, self._cluster.jobs[job].spec)

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
        if refusal.for_capacity:
            self.quotas.needs_capacity(gang)
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
            by, more = waiting[spec.project], element_count(spec)
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
