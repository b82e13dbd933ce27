"""Accounting as one object for the controller: fair share, quotas, budgets and ranges; and its configuration.

What is not configured is not tracked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct

from hodei.control.accounting.quotas import (
    EVERY_PROJECT,
    LENT,
    NO_USER,
    Budgets,
    ProjectBudget,
    ProjectQuota,
    Quotas,
    Range,
    Ranges,
)
from hodei.control.accounting.shares import FairShare, SharesPolicy
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.state import ClusterState
from hodei.engine.fairness.billing import MICRO, parse_rates
from hodei.engine.fairness.lending import quota_of
from hodei.engine.fairness.tree import Path, Shares
from hodei.engine.plan import Refusal
from hodei.engine.view import Bounds, Gang, View
from hodei.model.accounting import QuotaRow, ShareReport, UsageRow
from hodei.model.array import element_count
from hodei.model.config import (
    AccountConfig,
    Amount,
    BudgetConfig,
    QuotaConfig,
    RangeConfig,
    SchedulingConfig,
    SharesConfig,
    parse_priority,
)
from hodei.model.effects import Save, SaveUsage
from hodei.model.errors import InvalidInput, QueueFull
from hodei.model.job import Job, JobSpec, Reason, Run
from hodei.model.names import plain_name
from hodei.model.resources import Resources, parse_duration_ms, parse_resources


class AccountsPolicy(Struct, frozen=True):
    """`shares` None: no fair share. `max_priority` by role and `project_users` by project: see AdmissionConfig."""

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
        self._apply(policy)

    def _apply(self, policy: AccountsPolicy) -> None:
        cluster = self._cluster
        self.policy = policy
        self.quotas = Quotas(policy.quotas, cluster, self._lifecycle)
        self.sharing = FairShare(policy.shares or SharesPolicy(), cluster) if policy.shares or policy.budgets else None
        self._has_shares = policy.shares is not None
        self.budgets: Budgets | None = None
        if policy.budgets and self.sharing is not None:
            self.budgets = Budgets(policy.budgets, self.sharing.ledger, self.sharing.path_of_project)
        self.ranges = Ranges(policy.ranges)
        self._next_period_ms: int | None = None
        # Pending jobs by project and user, if a quota limits them.
        self._pending: dict[str, dict[str, int]] = {}
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
        by_user, user = self._pending.setdefault(job.spec.project, {}), job.spec.user
        by_user[user] = by_user.get(user, 0) + change
        if not by_user[user]:
            del by_user[user]
            if not by_user:
                del self._pending[job.spec.project]

    def take_settings(self, other: Accounts) -> None:
        """Use other policies; past usage is kept, and running jobs are counted again."""
        rows = self.sharing.ledger.rows() if self.sharing is not None else []
        self._apply(other.policy)
        self.restore(rows)
        for job in sorted(self._cluster.runs):
            for run in self._cluster.live_runs(job):
                self._run_opened(run, self._cluster.jobs[job].spec)

    def view(self, now_ms: int) -> View:
        return View(now_ms, self._cluster.availability, self.shares(now_ms), self.bounds)

    def shares(self, now_ms: int) -> FairShare | None:
        if self.sharing is None or not self._has_shares:
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
        """Reclaim lent quota for a refused gang, or note that it needs capacity, which limits soft quotas of others."""
        if not self.quotas:
            return
        if refusal.for_capacity:
            self.quotas.needs_capacity(gang)
        elif refusal.verdicts and refusal.verdicts[0].reason.code == LENT:
            self.quotas.reclaim(gang, now_ms)

    def next_ms(self) -> int | None:
        """When the next budget period starts."""
        return self._next_period_ms

    def expire(self, now_ms: int) -> bool:
        """Returns whether a budget period has started, so that jobs that wait for it may start."""
        if self.budgets is None:
            return False
        started = self._next_period_ms is not None and now_ms >= self._next_period_ms
        if started or self._next_period_ms is None:
            self._next_period_ms = self.budgets.next_ms(now_ms)
        return started

    def admit(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The jobs with the defaults of ranges. InvalidInput for a job that could never start, QueueFull for more pending
        jobs than allowed; both name the limit, and the latter the usage."""
        specs = self.ranges.apply(specs)
        if self.quotas:
            for spec in specs:
                never = self.quotas.never_fits(spec)
                if never:
                    raise InvalidInput(
                        f"{spec.title} can never run: {never}",
                        hint="request less; see 'hodei quota'",
                        code="OVER_QUOTA",
                    )
            self._check_pending(specs)
        return specs

    def _check_pending(self, specs: Sequence[JobSpec]) -> None:
        limited = {spec.project for spec in specs if (q := self.quotas.of(spec.project)) and q.pending is not None}
        if not limited:
            return
        pending = {project: dict(self._pending.get(project, {})) for project in limited}
        for spec in specs:
            mine = self.quotas.of(spec.project)
            if mine is None or mine.pending is None:
                continue
            by_user, more = pending[spec.project], element_count(spec)
            if sum(by_user.values()) + more > mine.pending:
                most = sorted(by_user.items(), key=lambda entry: (-entry[1], entry[0]))[:3]
                who = ", ".join(f"{user or NO_USER} {count}" for user, count in most)
                raise QueueFull(
                    f"project {spec.project} may have {mine.pending} pending jobs and has {sum(by_user.values())} ({who})",
                    hint="wait for jobs to start, or cancel some",
                    code="PENDING_QUOTA",
                )
            by_user[spec.user] = by_user.get(spec.user, 0) + more

    def restore(self, rows: Iterable[UsageRow]) -> None:
        if self.sharing is not None:
            self.sharing.restore(rows)

    def saves(self) -> list[Save]:
        if self.sharing is None:
            return []
        rows = self.sharing.ledger.take_dirty()
        return [SaveUsage(tuple(rows))] if rows else []

    def share_report(self, now_ms: int) -> ShareReport | None:
        """None if neither fair share nor budgets are configured."""
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


_BUCKET_MS = 3_600_000
C = TypeVar("C")
P = TypeVar("P")
ROLES = ("viewer", "user", "admin")


def accounts_policy(config: SchedulingConfig) -> AccountsPolicy:
    return AccountsPolicy(
        shares=_section("scheduling.shares", _shares, config.shares) if config.shares.enabled else None,
        quotas={name: _section(f"scheduling.quotas.{name}", _quota, one) for name, one in config.quotas.items()},
        budgets={name: _section(f"scheduling.budgets.{name}", _budget, one) for name, one in config.budgets.items()},
        ranges={name: _section(f"scheduling.ranges.{name}", _range, one) for name, one in config.ranges.items()},
        max_priority=_section("scheduling.admission.max_priority", _priorities, config.admission.max_priority),
        project_users=config.admission.project_users,
    )


def find_problems(config: SchedulingConfig) -> list[tuple[str, str]]:
    """The problems of each section, with its path below `scheduling`."""
    out: list[tuple[str, str]] = []

    def check(path: str, make: Callable[[C], object], table: C) -> None:
        try:
            make(table)
        except InvalidInput as error:
            out.append((path, f"{error.message}; {error.hint}" if error.hint else error.message))

    for section, names in (
        ("quotas", config.quotas), ("budgets", config.budgets), ("ranges", config.ranges),
        ("admission.project_users", config.admission.project_users),
    ):  # fmt: skip
        for name in names:
            if name != EVERY_PROJECT:
                check(f"{section}.{name}", plain_name, name)
    check("shares", _shares, config.shares)
    for name, quota in config.quotas.items():
        check(f"quotas.{name}", _quota, quota)
    for name, budget in config.budgets.items():
        check(f"budgets.{name}", _budget, budget)
    for name, limits in config.ranges.items():
        check(f"ranges.{name}", _range, limits)
    check("admission.max_priority", _priorities, config.admission.max_priority)
    return out


def _section(where: str, make: Callable[[C], P], config: C) -> P:
    try:
        return make(config)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", hint=error.hint) from error


def _shares(config: SharesConfig) -> SharesPolicy:
    half_life_ms, window_ms = parse_duration_ms(config.half_life), parse_duration_ms(config.window or "0s")
    for name, span_ms in (("half_life", half_life_ms), ("window", window_ms)):
        if (name == "half_life" or config.window) and (span_ms < _BUCKET_MS or span_ms % _BUCKET_MS):
            raise InvalidInput(f"{name} = {getattr(config, name)!r}", hint="whole hours, at least one: 1h, 7d")
    places = _places(config.accounts)
    shares: dict[Path, Shares] = {places[account.name]: account.shares for account in config.accounts}
    for account in config.accounts:
        shares |= {(*places[account.name], user): given for user, given in account.users.items()}
    return SharesPolicy(
        config.formula, half_life_ms, window_ms, max(parse_duration_ms(config.refresh), 1),
        parse_rates(config.weights), config.mode, places, shares,
    )  # fmt: skip


def _places(accounts: tuple[AccountConfig, ...]) -> dict[str, Path]:
    by_name = {account.name: account for account in accounts}
    if len(by_name) < len(accounts):
        names = [account.name for account in accounts]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"account {twice!r} is given twice", hint="keep one of them")
    out: dict[str, Path] = {}
    for account in accounts:
        path: Path = (account.name,)
        above = account.under
        while above:
            if above not in by_name:
                raise InvalidInput(f"account {account.name!r} is under {above!r}, which is not an account")
            if above in path:
                raise InvalidInput(f"account {account.name!r} is under itself: {' < '.join((*path, above))}")
            path, above = (above, *path), by_name[above].under
        if any("/" in name or not name for name in path):
            raise InvalidInput(f"an account named {account.name!r}", hint="a name without slashes")
        out[account.name] = path
    return out


def _quota(config: QuotaConfig) -> ProjectQuota:
    if (config.lend or config.borrow) and not config.cohort:
        raise InvalidInput("lend and borrow need a cohort", hint='cohort = "lab", the same for all projects that share')
    if config.pending is not None and config.pending < 0:
        raise InvalidInput(f"pending = {config.pending}", hint="the number of pending jobs, from 0")
    quota = quota_of(config.hard, borrowing_limit=config.borrow, lending_limit=config.lend, weight=config.weight)
    return ProjectQuota(quota, _amounts(config.soft), _amounts(config.per_user), config.cohort, config.pending)


def _range(config: RangeConfig) -> Range:
    least, most, default = _amounts(config.min), _amounts(config.max), _amounts(config.default)
    for resource in sorted(least.keys() & most.keys()):
        if least[resource] > most[resource]:
            raise InvalidInput(f"the minimum of {resource} is larger than the maximum")
    for resource, amount in default.items():
        if amount < least.get(resource, 0) or amount > most.get(resource, amount):
            raise InvalidInput(f"the default of {resource} is outside the range")
    return Range(least, most, default)


def _budget(config: BudgetConfig) -> ProjectBudget:
    if config.money is not None and not config.prices:
        raise InvalidInput("money without prices", hint='prices = {gpu = "2.50", cpu = "0.04"}, for an hour of each')
    if config.money is not None and not 0 <= config.money <= 1e12:
        raise InvalidInput(f"money = {config.money}", hint="an amount from 0")
    if not config.hours and config.money is None:
        raise InvalidInput("a budget without a limit", hint="hours = {gpu = 500}, or money with prices")
    since_ms, period = 0, config.period
    if config.since:
        try:
            day = datetime.fromisoformat(config.since)
        except ValueError:
            raise InvalidInput(f"since = {config.since!r}", hint="a day such as 2026-01-31") from None
        if day.year < 1970:
            raise InvalidInput(f"since = {config.since!r}", hint="a day from 1970-01-01 on")
        since_ms, period = round(day.replace(tzinfo=day.tzinfo or UTC).timestamp() * 1000), ""
    if not period and not config.since:
        raise InvalidInput("neither a period nor a start", hint='period = "month", or since = "2026-01-31"')
    money = None if config.money is None else round(config.money * MICRO)
    return ProjectBudget(_amounts(config.hours), money, parse_rates(config.prices), period, since_ms)


def _amounts(given: Mapping[str, Amount]) -> Resources:
    amounts = parse_resources(given)
    if any(amount < 0 for amount in amounts.values()):
        raise InvalidInput("an amount below zero")
    return amounts


def _priorities(given: Mapping[str, int | str]) -> dict[str, int]:
    out = {}
    for role, most in given.items():
        if role not in ROLES:
            raise InvalidInput(f"there is no role {role!r}", hint=f"one of: {', '.join(ROLES)}")
        out[role] = parse_priority(most)
    return out
