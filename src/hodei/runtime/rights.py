"""What a user may have and may change, checked in the one place that every job and every change passes.

A job is judged by the rights of the user whose name it carries: by the role of the token that submits it, or, when no call
is behind it (a periodic job that is due), by the role that its owner has at that moment. A change is judged by the role of
the caller. What is not listed here as open to users needs the role `admin`.

The routes' policies stand before this; they say who may call, this says what a call may bring about.
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
from hodei.model.escalation_state import decode_escalation
from hodei.model.facts import EventNoted, Fact, JobReleased, JobRequeued, JobSubmitted, ReservationMade
from hodei.model.job import Job, JobSpec

# ---------------------------------------------------------------------------------------------- caller
# On whose behalf something is done. Whoever lets a caller in says so here; the loop signs the caller's facts with the
# name, and puts the audit row into the very commit that carries the act.


class Caller:
    """One call of somebody. `entry` says who and what; its target is completed by what the call brings about."""

    def __init__(self, entry: AuditEntry) -> None:
        self.entry = entry
        self.recorded = False
        self._begun = False

    def sign(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        # Jobs carry the name of their user already, and come by the hundred thousand.
        if all(fact.by or type(fact) is JobSubmitted for fact in facts):
            return facts
        return [fact if fact.by else structs.replace(fact, by=self.entry.who) for fact in facts]

    def record(self, facts: Sequence[Fact], saves: Sequence[Save]) -> Sequence[Save]:
        """The audit row, once, to be committed together with these."""
        if self.recorded:
            return ()
        self.recorded = True
        if not self.entry.target:
            self.entry = structs.replace(self.entry, target=_made(facts, saves))
        return (SaveAudit(self.entry),)

    def begin(self, detail: str) -> None:
        """The row is about to be written before its act. If that then comes to nothing, a second row says so."""
        self.entry = structs.replace(self.entry, detail=detail)
        self._begun = True

    def refused(self, code: str) -> SaveAudit | None:
        """The row of a call that came to nothing; None if its act had been committed before."""
        if self.recorded and not (self._begun and code):
            return None
        self.recorded = True
        self.entry = structs.replace(self.entry, code=code)
        return SaveAudit(self.entry)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def _made(facts: Sequence[Fact], saves: Sequence[Save]) -> str:
    """What has come into being, for calls that do not name it in their path."""
    ids = [fact.job.id for fact in facts if isinstance(fact, JobSubmitted)]
    if ids:
        return str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
    names = [fact.reservation.name for fact in facts if isinstance(fact, ReservationMade)]
    names += [save.periodic.name for save in saves if isinstance(save, SavePeriodic)]
    names += [fact.detail["backend"] for fact in facts if isinstance(fact, EventNoted) and fact.kind == "backend.added"]
    return ", ".join(names)


# ----------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from hodei.control.accounting.accounts import AccountsPolicy
    from hodei.model.ids import JobId

_SUBMITTERS = ("user", "admin")
_NO_ESCALATION = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("escalation")].default


class Rights:
    """`policy` is the one in force now. `role_of` tells which role a user has now, None for a user without a token; the
    server sets it. Without it (trials, benchmarks, the Kubernetes scheduler) only calls are judged."""

    def __init__(self, policy: Callable[[], AccountsPolicy], jobs: Mapping[JobId, Job]) -> None:
        self._policy, self._jobs = policy, jobs
        self.role_of: Callable[[str], str | None] | None = None

    # ------------------------------------------------------------------------------------------- new jobs

    def admitted(self, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
        """The specs as they may be submitted; NotPermitted if one asks for more than its user may have."""
        roles: dict[str, str | None] = {}
        out = []
        for spec in specs:
            if spec.user not in roles:
                roles[spec.user] = self._role_for(spec.user)
            role = roles[spec.user]
            out.append(spec if role is None else self._within(spec, role))
        return out

    def _role_for(self, user: str) -> str | None:
        """The role that a new job of this user is judged by; None if nothing is known of roles."""
        caller = CALLER.get()
        if caller is not None and user == caller.entry.who:
            return caller.entry.role
        if caller is not None and caller.entry.role != "admin":
            raise NotPermitted(f"{caller.entry.who} may not submit jobs in the name of {user}", code="NOT_OWNER")
        if self.role_of is None:
            return None
        role = self.role_of(user)
        if role not in _SUBMITTERS:
            has = f"has the role {role}" if role else "has no token any more"
            raise NotPermitted(
                f"{user} may not submit jobs: {user} {has}",
                hint="an administrator can give them a token again, or remove what submits in their name",
                code="OWNER_FORBIDDEN",
            )
        return role

    def _within(self, spec: JobSpec, role: str) -> JobSpec:
        policy = self._policy()
        most = policy.max_priority.get(role)
        if most is not None:
            asked = max(spec.priority, spec.escalation.promote_to)
            if asked > most:
                raise NotPermitted(
                    f"{spec.name} asks for priority {asked}; the role {role} may give at most {most}",
                    hint="ask for less, or have someone with another role submit it",
                    code="PRIORITY_TOO_HIGH",
                )
            if (
                spec.escalation is not _NO_ESCALATION
                and spec.escalation.promote_after_ms
                and not spec.escalation.promote_to
            ):
                # A job that promotes itself goes no higher than its user may. Below 1 there is nowhere to go.
                own = {"promote_to": most} if most > 0 else {"promote_after_ms": 0}
                spec = structs.replace(spec, escalation=structs.replace(spec.escalation, **own))
        users = policy.project_users.get(spec.project)
        if users is not None and role != "admin" and spec.user not in users:
            raise NotPermitted(
                f"{spec.name}: project {spec.project!r} is not open to {spec.user}",
                hint="name another project, or ask an administrator (scheduling.admission.project_users)",
                code="PROJECT_FORBIDDEN",
            )
        return spec

    # -------------------------------------------------------------------------------------------- changes

    def check(self, caller: Caller, facts: Sequence[Fact], saves: Sequence[Save]) -> None:
        """NotPermitted if the caller's role does not allow one of these. New jobs were judged by `admitted`."""
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
        """For what a call brings about without a commit. NotPermitted unless the job is the caller's, or they are admin."""
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
            return  # it has ended: there is nothing that the fact could change
        self.check_owner(job)
        if isinstance(fact, JobRequeued | JobReleased):
            # Back into the line: with no more than the caller may give a new job.
            self._within(_as_submitted(job), caller.entry.role)

    def _check_periodic(self, caller: Caller, periodic: Periodic, *, starts: bool) -> None:
        if caller.entry.role != "admin" and periodic.by != caller.entry.who:
            raise _not_owner(caller, f"the periodic job {periodic.name!r}", periodic.by)
        if starts:
            self.admitted([structs.replace(periodic.job, user=periodic.by)])


def _as_submitted(job: Job) -> JobSpec:
    """Without the promotion that the operator's own rules gave it."""
    before = decode_escalation(job.escalation_state).priority_before if job.escalation_state else -1
    return structs.replace(job.spec, priority=before) if before >= 0 else job.spec


def _needs_admin(caller: Caller) -> NotPermitted:
    return NotPermitted(f"this needs the role admin; {caller.entry.who} has the role {caller.entry.role}")


def _not_owner(caller: Caller, what: str, owner: str) -> NotPermitted:
    return NotPermitted(
        f"{what} belongs to {owner or 'nobody'}; {caller.entry.who} may change only their own",
        hint="ask them, or an administrator",
        code="NOT_OWNER",
    )
