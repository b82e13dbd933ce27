"""Authorization of jobs and changes, in the one place that all of them pass.

A job is checked against the role of its user: that of the token that submits it, or, without a request (a periodic job
that is due), the current role of its owner. A change is checked against the role of the caller. Everything that is not
open to users here needs the role `admin`. The policies of the routes come first: they say who may call at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import structs

from hodei.model.audit import AuditEntry
from hodei.model.cron import Periodic
from hodei.model.effects import Save, SaveAudit, SaveKey, SavePeriodic
from hodei.model.errors import NotPermitted
from hodei.model.facts import EventNoted, Fact, JobReleased, JobRequeued, JobSubmitted, ReservationMade
from hodei.model.job import Job, JobSpec

if TYPE_CHECKING:
    from hodei.control.accounting.accounts import AccountsPolicy
    from hodei.model.ids import JobId

# The request on whose behalf something happens. The loop signs its facts with the caller's name and puts the audit row
# into the same commit.


class Caller:
    """One request. `entry`: who and what; its target is completed from what the request creates."""

    def __init__(self, entry: AuditEntry) -> None:
        self.entry = entry
        self.recorded = False
        self._recorded_first = False

    def sign(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        # Jobs already carry the name of their user, and come by the hundred thousand.
        if all(fact.by or type(fact) is JobSubmitted for fact in facts):
            return facts
        return [fact if fact.by else structs.replace(fact, by=self.entry.who) for fact in facts]

    def record(self, facts: Sequence[Fact], saves: Sequence[Save]) -> Sequence[Save]:
        """The audit row, once, to be committed with these."""
        if self.recorded:
            return ()
        self.recorded = True
        if not self.entry.target:
            self.entry = structs.replace(self.entry, target=_created(facts, saves))
        return (SaveAudit(self.entry),)

    def record_first(self, detail: str) -> None:
        """The row is written before its act. If the act then fails, a second row says so."""
        self.entry = structs.replace(self.entry, detail=detail)
        self._recorded_first = True

    def refused(self, code: str) -> SaveAudit | None:
        """The row of a request that did nothing; None if its act was committed."""
        if self.recorded and not (self._recorded_first and code):
            return None
        self.recorded = True
        self.entry = structs.replace(self.entry, code=code)
        return SaveAudit(self.entry)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def _created(facts: Sequence[Fact], saves: Sequence[Save]) -> str:
    """What the request creates, where its path does not name it."""
    ids = [fact.job.id for fact in facts if isinstance(fact, JobSubmitted)]
    if ids:
        return str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
    names = [fact.reservation.name for fact in facts if isinstance(fact, ReservationMade)]
    names += [save.periodic.name for save in saves if isinstance(save, SavePeriodic)]
    names += [fact.detail["backend"] for fact in facts if isinstance(fact, EventNoted) and fact.kind == "backend.added"]
    return ", ".join(names)


_SUBMITTERS = ("user", "admin")
_NO_ESCALATION = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("escalation")].default


class Rights:
    """`policy` returns the active one. `role_of` returns the current role of a user, None without a token; the server sets
    it. Without it (trials, benchmarks, the Kubernetes scheduler) only requests are checked."""

    def __init__(self, policy: Callable[[], AccountsPolicy], jobs: Mapping[JobId, Job]) -> None:
        self._policy, self._jobs = policy, jobs
        self.role_of: Callable[[str], str | None] | None = None

    def admitted(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The specs as they may be submitted; NotPermitted if one requests more than its user may have."""
        roles: dict[str, str | None] = {}
        out = []
        for spec in specs:
            if spec.user not in roles:
                roles[spec.user] = self._role_for(spec.user)
            role = roles[spec.user]
            out.append(spec if role is None else self._within_limits(spec, role))
        return out

    def _role_for(self, user: str) -> str | None:
        """The role that a new job of this user is checked against; None if roles are unknown."""
        caller = CALLER.get()
        if caller is not None and user == caller.entry.who:
            return caller.entry.role
        if caller is not None and caller.entry.role != "admin":
            raise NotPermitted(f"{caller.entry.who} may not submit jobs in the name of {user}", code="NOT_OWNER")
        if self.role_of is None:
            return None
        role = self.role_of(user)
        if role not in _SUBMITTERS:
            has = f"has the role {role}" if role else "no longer has a token"
            raise NotPermitted(
                f"{user} may not submit jobs: {user} {has}",
                hint="an administrator can create a token for them, or remove what submits in their name",
                code="OWNER_FORBIDDEN",
            )
        return role

    def _within_limits(self, spec: JobSpec, role: str) -> JobSpec:
        policy = self._policy()
        most = policy.max_priority.get(role)
        if most is not None:
            requested = max(spec.priority, spec.escalation.promote_to)
            if requested > most:
                raise NotPermitted(
                    f"{spec.title} requests priority {requested}; the role {role} may use at most {most}",
                    hint="request a lower priority, or use a token with another role",
                    code="PRIORITY_TOO_HIGH",
                )
            if (
                spec.escalation is not _NO_ESCALATION
                and spec.escalation.promote_after_ms
                and not spec.escalation.promote_to
            ):
                # Promotion goes no higher than the user may. Below 1 there is nothing to promote to.
                own = {"promote_to": most} if most > 0 else {"promote_after_ms": 0}
                spec = structs.replace(spec, escalation=structs.replace(spec.escalation, **own))
        users = policy.project_users.get(spec.project)
        if users is not None and role != "admin" and spec.user not in users:
            raise NotPermitted(
                f"{spec.title}: project {spec.project!r} is not open to {spec.user}",
                hint="name another project, or ask an administrator (scheduling.admission.project_users)",
                code="PROJECT_FORBIDDEN",
            )
        return spec

    def check(self, caller: Caller, facts: Sequence[Fact], saves: Sequence[Save]) -> None:
        """NotPermitted if the caller's role does not allow one of these. New jobs were checked by `admitted`."""
        admin = caller.entry.role == "admin"
        for fact in facts:
            if type(fact) is JobSubmitted or (type(fact) is EventNoted and not fact.job):
                continue
            self._check_change(caller, fact, admin)
        for save in saves:
            if isinstance(save, SavePeriodic):
                self._check_periodic(caller, save.periodic, starts=not save.deleted and not save.periodic.paused)
            elif not admin and not isinstance(save, SaveKey | SaveAudit):
                raise _needs_admin(caller)

    def check_owner(self, job: Job) -> None:
        """NotPermitted unless the job belongs to the caller, or the caller is an admin."""
        caller = CALLER.get()
        if caller is not None and caller.entry.role != "admin" and job.spec.user != caller.entry.who:
            raise _not_owner(caller, f"job {job.id}", job.spec.user)

    def _check_change(self, caller: Caller, fact: Fact, admin: bool) -> None:
        number = getattr(fact, "job", None)
        if not isinstance(number, int):
            if not admin:
                raise _needs_admin(caller)
            return
        job = getattr(fact, "record", None) or self._jobs.get(number)
        if job is None:
            return  # the job has ended: the fact changes nothing
        self.check_owner(job)
        if isinstance(fact, JobRequeued | JobReleased):
            # It queues again: the limits for new jobs apply.
            self._within_limits(_as_submitted(job), caller.entry.role)

    def _check_periodic(self, caller: Caller, periodic: Periodic, *, starts: bool) -> None:
        if caller.entry.role != "admin" and periodic.by != caller.entry.who:
            raise _not_owner(caller, f"the periodic job {periodic.name!r}", periodic.by)
        if starts:
            self.admitted([structs.replace(periodic.job, user=periodic.by)])


def _as_submitted(job: Job) -> JobSpec:
    """Without promotions by the escalation rules."""
    before = job.escalation_state.priority_before
    return structs.replace(job.spec, priority=before) if before >= 0 else job.spec


def _needs_admin(caller: Caller) -> NotPermitted:
    return NotPermitted(f"this needs the role admin; {caller.entry.who} has the role {caller.entry.role}")


def _not_owner(caller: Caller, what: str, owner: str) -> NotPermitted:
    return NotPermitted(
        f"{what} belongs to {owner or 'no user'}; {caller.entry.who} may change only their own",
        hint="ask its owner, or an administrator",
        code="NOT_OWNER",
    )
