"""Limits of projects: quotas (what they may hold at once), ranges (what one member may request), budgets (use over time).

A gang that would exceed the hard quota of its project waits. In a cohort it may borrow what others do not use, until they
need it: then the largest borrower gives back first, its lowest and youngest jobs. What an owner waits for is not lent
again. Beyond its soft quota a project starts nothing while a project within its own waits for capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct, structs

from hodei.control.accounting.ledger import Ledger
from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.state import ClusterState
from hodei.engine.fairness.billing import HOUR_MS, MICRO, Budget, Rate, Spent, spent
from hodei.engine.fairness.lending import Quota, allowance, reclaim_from
from hodei.engine.fairness.tree import Path
from hodei.engine.view import Gang
from hodei.model.accounting import BudgetRow, QuotaRow
from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.model.job import QOS_RANK, Job, JobSpec, Reason, Run, TaskSpec, job_qos
from hodei.model.outcome import StopReason
from hodei.model.resources import DEFAULT_REQUEST, Resources, human_amount, scale_of

JOBS = "jobs"
EVERY_PROJECT = "*"
NO_USER = "-"  # the user of jobs that were submitted without one
_USERS_NAMED = 3
LENT = "QUOTA_LENT"


class ProjectQuota(Struct, frozen=True):
    """`quota`: the hard amounts, and what may be lent and borrowed within the `cohort`. `per_user`: limits of each user.
    `pending`: limit of pending jobs (None: no limit)."""

    quota: Quota
    soft: Resources = {}
    per_user: Resources = {}
    cohort: str = ""
    pending: int | None = None


class Quotas:
    """Tracks what live runs hold, by project and user."""

    def __init__(self, quotas: Mapping[str, ProjectQuota], cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._quotas = dict(quotas)
        self._cluster, self._lifecycle = cluster, lifecycle
        self._used: dict[str, Resources] = {}
        self._of_user: dict[tuple[str, str], Resources] = {}
        self._live: dict[JobId, int] = {}
        # Jobs that wait for lent quota of their project, and jobs that wait for capacity.
        self._reclaiming: dict[JobId, tuple[str, Resources]] = {}
        self._for_capacity: dict[JobId, str] = {}

    def __bool__(self) -> bool:
        return bool(self._quotas)

    def of(self, project: str) -> ProjectQuota | None:
        return self._quotas.get(project) or self._quotas.get(EVERY_PROJECT)

    def opened(self, run: Run, spec: JobSpec) -> None:
        self._count(run, spec, 1)

    def closed(self, run: Run, spec: JobSpec) -> None:
        self._count(run, spec, -1)

    def _count(self, run: Run, spec: JobSpec, sign: int) -> None:
        live = self._live.get(run.job, 0) + sign
        amounts = {name: sign * amount for name, amount in spec.task_of(run.member).request.items()}
        if live == (1 if sign > 0 else 0):
            amounts[JOBS] = sign
        if live:
            self._live[run.job] = live
        else:
            del self._live[run.job]
        self._reclaiming.pop(run.job, None)
        self._for_capacity.pop(run.job, None)
        for held in (
            self._used.setdefault(spec.project, {}),
            self._of_user.setdefault((spec.project, spec.user), {}),
        ):
            for name, amount in amounts.items():
                held[name] = held.get(name, 0) + amount

    def needs_capacity(self, gang: Gang) -> None:
        """It was refused for missing capacity."""
        self._for_capacity[gang.id] = gang.job.project

    def refusal(self, gang: Gang) -> Reason | None:
        """The quota that prevents its start now."""
        project, user = gang.job.project, gang.job.user
        mine = self.of(project)
        if mine is None:
            return None
        requested = demand(gang, joins=gang.is_joining)
        self._reclaiming.pop(gang.id, None)
        used, cohort = self._counted(project, mine, gang.id)
        for resource in sorted(requested.keys() & mine.quota.nominal.keys()):
            allowed = allowance(project, resource, cohort, used)
            if requested[resource] > allowed.more:
                own = allowed.used + requested[resource] <= allowed.nominal
                if own:
                    self._reclaiming[gang.id] = (project, requested)
                code, text = LENT if own else "QUOTA", self._describe(project, resource, requested[resource], mine, own)
                return Reason("quota", code, text, kind="quota")
        held = self._of_user.get((project, user), {})
        for resource in sorted(requested.keys() & mine.per_user.keys()):
            if held.get(resource, 0) + requested[resource] > mine.per_user[resource]:
                text = (
                    f"user {user} of project {project} may hold {_amount(resource, mine.per_user[resource])} and holds"
                    f" {_amount(resource, held.get(resource, 0))}; it asks for {_amount(resource, requested[resource])}"
                )
                return Reason("quota", "QUOTA", text, kind="quota")
        return self._beyond_soft(gang, requested, mine)

    def _beyond_soft(self, gang: Gang, requested: Resources, mine: ProjectQuota) -> Reason | None:
        project = gang.job.project
        held = self._used.get(project, {})
        over = [
            resource
            for resource in sorted(requested.keys() & mine.soft.keys())
            if held.get(resource, 0) + requested[resource] > mine.soft[resource]
        ]
        if not over:
            return None
        for job, other in list(self._for_capacity.items()):
            known = self._cluster.jobs.get(job)
            if known is None or known.state != "pending":
                del self._for_capacity[job]
            elif other != project and not self._is_beyond_soft(other):
                text = (
                    f"project {project} is beyond its soft quota of {_amount(over[0], mine.soft[over[0]])} with it, and"
                    f" job {job} of project {other} waits for capacity"
                )
                return Reason("quota", "SOFT_QUOTA", text, kind="quota")
        return None

    def _is_beyond_soft(self, project: str) -> bool:
        theirs, held = self.of(project), self._used.get(project, {})
        return theirs is not None and any(held.get(name, 0) >= most for name, most in theirs.soft.items())

    def _counted(self, project: str, mine: ProjectQuota, job: JobId) -> tuple[dict[str, Resources], dict[str, Quota]]:
        """What the projects of its cohort hold, and their quotas; what owners wait for counts as held by them."""
        if not mine.cohort:
            held = self._used.get(project, {})
            alone = Quota(mine.quota.nominal, dict.fromkeys(mine.quota.nominal, 0), {}, mine.quota.weight)
            return {project: held}, {project: alone}
        cohort = self._cohort(mine.cohort)
        used = {name: dict(self._used.get(name, {})) for name in cohort}
        for waiting, (owner, amounts) in list(self._reclaiming.items()):
            known = self._cluster.jobs.get(waiting)
            if known is None or known.state != "pending":
                del self._reclaiming[waiting]
            elif waiting != job and owner in used and owner != project:
                for resource, amount in amounts.items():
                    most = cohort[owner].nominal.get(resource, 0)
                    if used[owner].get(resource, 0) < most:
                        used[owner][resource] = min(used[owner].get(resource, 0) + amount, most)
        return used, cohort

    def _cohort(self, name: str) -> dict[str, Quota]:
        return {project: theirs.quota for project, theirs in self._quotas.items() if theirs.cohort == name}

    def reclaim(self, gang: Gang, now_ms: int) -> list[JobId]:
        """Stop borrowers, as many as needed, for an owner that needs its lent quota. Returns the stopped jobs."""
        mine = self.of(gang.job.project)
        if mine is None or not mine.cohort:
            return []
        cohort = self._cohort(mine.cohort)
        used = {name: dict(self._used.get(name, {})) for name in cohort}
        for project in cohort:
            for job in self._running_in(project):
                if any(run.stop_reason for run in self._cluster.live_runs(job.id)):
                    for name, amount in _held_by(job, self._cluster.live_runs(job.id)).items():
                        used[project][name] = used[project].get(name, 0) - amount  # it is being given back
        stopped: list[JobId] = []
        for debt in reclaim_from(gang.job.project, demand(gang), cohort, used) or []:
            short = dict(debt.amounts)
            for job in self._running_in(debt.project):
                runs = self._cluster.live_runs(job.id)
                gives = _held_by(job, runs)
                if not any(amount > 0 for amount in short.values()):
                    break
                if any(run.stop_reason for run in runs) or not any(
                    short.get(name, 0) > 0 and amount for name, amount in gives.items()
                ):
                    continue
                owner = gang.job.project
                gives_back = f"gives back what project {debt.project} borrowed of the quota of {owner}"
                reason = StopReason("reclaimed", f"for project {owner}: it {gives_back}")
                self._lifecycle.stop_all(job, reason, now_ms)
                self._cluster.emit(
                    "job.reclaimed", now_ms, job=job.id, by_job=gang.id, project=owner, reason=reason.text
                )
                stopped.append(job.id)
                for name, amount in gives.items():
                    if name in short:
                        short[name] -= amount
        return stopped

    def _running_in(self, project: str) -> list[Job]:
        """The running jobs of a project: lowest priority, lowest quality of service and youngest first."""
        live = (self._cluster.jobs[id] for id in self._live if id in self._cluster.jobs)
        mine = [job for job in live if job.spec.project == project]
        return sorted(
            mine, key=lambda job: (job.spec.priority, QOS_RANK[job_qos(job.spec)], -job.scheduled_ms, -job.id)
        )

    def _describe(self, project: str, resource: str, requested: int, mine: ProjectQuota, own: bool) -> str:
        hard, held = mine.quota.nominal[resource], self._used.get(project, {}).get(resource, 0)
        text = f"project {project} may hold {_amount(resource, hard)} and holds {_amount(resource, held)}"
        top = self._top_users(project, resource)
        if top:
            text += f" ({', '.join(f'{user} {human_amount(resource, amount)}' for user, amount in top)})"
        text += f"; it asks for {_amount(resource, requested)}"
        if own:
            return f"{text}, which others of cohort {mine.cohort} have borrowed and must give back"
        return f"{text}, and cohort {mine.cohort} has not enough left to lend" if mine.cohort else text

    def _top_users(self, project: str, resource: str) -> list[tuple[str, int]]:
        """The users that hold most of it."""
        held = [
            (user or NO_USER, amounts[resource])
            for (of, user), amounts in self._of_user.items()
            if of == project and amounts.get(resource, 0) > 0
        ]
        return sorted(held, key=lambda entry: (-entry[1], entry[0]))[:_USERS_NAMED]

    def rows(self) -> Iterator[QuotaRow]:
        """The quotas and the usage of all projects, by name."""
        named = set(self._quotas) - {EVERY_PROJECT}
        for project in sorted(named | (set(self._used) if EVERY_PROJECT in self._quotas else set())):
            mine = self.of(project)
            assert mine is not None
            used, cohort = self._counted(project, mine, 0)
            for resource in sorted(mine.quota.nominal.keys() | mine.soft.keys()):
                held, hard = self._used.get(project, {}).get(resource, 0), mine.quota.nominal.get(resource)
                yield QuotaRow(
                    project, resource, held, hard, mine.soft.get(resource), mine.cohort,
                    borrowed=max(0, held - hard) if hard is not None and mine.cohort else 0,
                    may_borrow=mine.quota.borrowing_limit.get(resource) if mine.cohort else 0,
                    more=allowance(project, resource, cohort, used).more if hard is not None else None,
                    by=tuple(self._top_users(project, resource)),
                )  # fmt: skip

    def never_fits(self, spec: JobSpec) -> str:
        """Why the job could not start even if its project held nothing; "" if it could."""
        mine = self.of(spec.project)
        if mine is None:
            return ""
        requested = _spec_demand(spec)
        for resource in sorted(requested.keys() & mine.quota.nominal.keys()):
            most = mine.quota.nominal[resource]
            if mine.cohort:
                lent = sum(q.lends(resource) for p, q in self._cohort(mine.cohort).items() if p != spec.project)
                most += min(lent, mine.quota.borrowing_limit.get(resource, lent))
            if requested[resource] > most:
                return _too_much(resource, requested[resource], f"project {spec.project}", most)
        for resource in sorted(requested.keys() & mine.per_user.keys()):
            if requested[resource] > mine.per_user[resource]:
                who = f"a user of project {spec.project}"
                return _too_much(resource, requested[resource], who, mine.per_user[resource])
        return ""


def demand(gang: Gang, *, joins: bool = False) -> Resources:
    """The requests of all members, extra members included: a quota must hold in any case."""
    out: Resources = {} if joins else {JOBS: 1}
    for member, needed, extra in zip(gang.members, gang.needed, gang.extra, strict=True):
        for resource, amount in member.task.request.items():
            out[resource] = out.get(resource, 0) + amount * (len(needed) + len(extra))
    return out


def _spec_demand(spec: JobSpec) -> Resources:
    out: Resources = {JOBS: 1}
    for task in spec.tasks:
        for resource, amount in task.request.items():
            out[resource] = out.get(resource, 0) + amount * task.count
    return out


def _held_by(job: Job, runs: Sequence[Run]) -> Resources:
    out: Resources = {JOBS: 1}
    for run in runs:
        for resource, amount in job.spec.task_of(run.member).request.items():
            out[resource] = out.get(resource, 0) + amount
    return out


def _too_much(resource: str, requested: int, who: str, most: int) -> str:
    return (
        f"it asks for {_amount(resource, requested)} and {who} may never hold more than {human_amount(resource, most)}"
    )


def _amount(resource: str, amount: int) -> str:
    return f"{human_amount(resource, amount)} {resource}"


class Range(Struct, frozen=True):
    """The minimum and maximum that one member may request, and the default for what it leaves out."""

    least: Resources = {}
    most: Resources = {}
    default: Resources = {}


class Ranges:
    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = dict(ranges)

    def apply(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The jobs with defaults. InvalidInput for the first that is out of range, with the limit and the request."""
        return [self._job(spec) for spec in specs] if self._ranges else specs

    def _job(self, spec: JobSpec) -> JobSpec:
        mine = self._ranges.get(spec.project) or self._ranges.get(EVERY_PROJECT)
        if mine is None:
            return spec
        tasks = tuple(self._task(spec, task, mine) for task in spec.tasks)
        return spec if tasks == spec.tasks else structs.replace(spec, tasks=tasks)

    def _task(self, spec: JobSpec, task: TaskSpec, mine: Range) -> TaskSpec:
        request = dict(task.request)
        for resource, amount in mine.default.items():
            # A request equal to the general default counts as left out.
            if task.request.get(resource, 0) == DEFAULT_REQUEST.get(resource, 0):
                request[resource] = amount
        for resource, amount in {**request, **dict.fromkeys(mine.least.keys() - request.keys(), 0)}.items():
            least, most = mine.least.get(resource, 0), mine.most.get(resource)
            if amount < least or (most is not None and amount > most):
                which, bound = ("at least", least) if amount < least else ("at most", most or 0)
                raise InvalidInput(
                    f"{spec.title}: {_amount(resource, amount)} for each member of task {task.name!r}; jobs of project"
                    f" {spec.project} must ask for {which} {_amount(resource, bound)}",
                    hint="the range is set by scheduling.ranges; ask the operator for another",
                    code="OUT_OF_RANGE",
                )
        limits = {name: max(amount, request.get(name, 0)) for name, amount in task.limits.items()}
        if request == task.request and limits == task.limits:
            return task
        return structs.replace(task, request=request, limits=limits)


Period = Literal["", "day", "week", "month"]


class ProjectBudget(Struct, frozen=True):
    """`since_ms`: a fixed start, if there is no `period`."""

    unit_hours: Resources = {}
    money_micro: int | None = None
    prices: Mapping[str, Rate] = {}
    period: Period = "month"
    since_ms: int = 0


class Budgets:
    """What projects may use over time, on the ledger of fair share. `path_of`: the account of a project."""

    def __init__(self, budgets: Mapping[str, ProjectBudget], ledger: Ledger, path_of: Callable[[str], Path]) -> None:
        self._budgets, self._ledger, self._path_of = dict(budgets), ledger, path_of

    def refusal(self, gang: Gang, now_ms: int) -> Reason | None:
        """With an exhausted budget nothing starts; what runs is not stopped."""
        mine = self._budgets.get(gang.job.project)
        if mine is None:
            return None
        for line in self._spent(gang.job.project, mine, now_ms):
            if line.exhausted:
                used, limit, unit = _in_units(line)
                until = next_start_ms(mine.period, now_ms)
                again = (
                    f"; the next period starts {datetime.fromtimestamp(until / 1000, UTC):%Y-%m-%d}" if until else ""
                )
                text = f"project {gang.job.project} has used {used:g} of {limit:g} {unit} of its budget{again}"
                return Reason("quota", "BUDGET", text, kind="quota")
        return None

    def rows(self, now_ms: int) -> Iterator[BudgetRow]:
        for project, mine in sorted(self._budgets.items()):
            for line in self._spent(project, mine, now_ms):
                used, limit, unit = _in_units(line)
                yield BudgetRow(project, unit, used, limit, start_ms(mine, now_ms))

    def next_ms(self, now_ms: int) -> int | None:
        """When the next period starts."""
        return min((at for b in self._budgets.values() if (at := next_start_ms(b.period, now_ms))), default=None)

    def _spent(self, project: str, mine: ProjectBudget, now_ms: int) -> list[Spent]:
        since_ms = start_ms(mine, now_ms)
        used = self._ledger.used_since(self._path_of(project), since_ms, now_ms)
        return spent(Budget(since_ms, mine.unit_hours, mine.money_micro, dict(mine.prices)), used)


def start_ms(budget: ProjectBudget, now_ms: int) -> int:
    return _start(budget.period, now_ms) if budget.period else budget.since_ms


def next_start_ms(period: Period, now_ms: int) -> int:
    """When the next period starts; 0 if there is none."""
    if not period:
        return 0
    length = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=32)}[period]
    later = datetime.fromtimestamp(_start(period, now_ms) / 1000, UTC) + length
    return _start(period, round(later.timestamp() * 1000))


def _start(period: Period, now_ms: int) -> int:
    day = datetime.fromtimestamp(now_ms / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        day -= timedelta(days=day.weekday())
    elif period == "month":
        day = day.replace(day=1)
    return round(day.timestamp() * 1000)


def _in_units(line: Spent) -> tuple[float, float, str]:
    """Used amount, limit and unit of one line of a budget."""
    if line.name == "money":
        return line.used / MICRO, line.limit / MICRO, "money"
    unit = scale_of(line.name) * HOUR_MS
    return line.used / unit, line.limit / unit, f"{line.name}-hours"
