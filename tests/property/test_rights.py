"""No sequence of requests gives a caller more than its role allows.

The real application and the real service run in one process (see `live_app` for what that does not cover). The checks read
the store, not the responses.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from hodei.control.accounting.accounts import AccountsPolicy
from hodei.model.escalation_state import apply_escalation
from unit.server.conftest import Response
from unit.server.live_app import LiveApp

ROUNDS = int(os.environ.get("HODEI_ROUNDS", "1"))
MAX_PRIORITY = {"user": 400}
PROJECT_USERS = {"closed": ("bo",)}
PEOPLE = ("vera", "ana", "bo", "root")

people = st.sampled_from(PEOPLE)
workers = st.sampled_from(["ana", "bo", "ana", "bo", "root", "vera"])
VALID = {"name": "job", "command": ["true"], "priority": 250}
# A document that is valid for every user, with one change: some are allowed for some roles, some for none.
CHANGES = (
    {}, {}, {"cpu": 4}, {"cpu": 4}, {"cpu": 4, "priority": 400}, {"array": 2}, {"priority": 0},
    {"priority": 401}, {"priority": "critical"}, {"priority": 10_000}, {"priority": 1000, "array": 2},
    {"project": "open"}, {"project": "closed"}, {"project": "closed", "cpu": 4},
    {"cpu": 4, "escalation": {"promote_after": "1s"}},
    {"cpu": 4, "escalation": {"promote_after": "1s", "promote_to": "critical"}},
    {"cpu": 4, "escalation": {"promote_after": "1s", "promote_to": 300}}, {"escalation": {"promote_to": 1_000_000}},
    {"user": "root"}, {"owner": "root"}, {"by": "root"}, {"routed_by": "rule 1"}, {"preempts": True},
    {"labels": {"hodei/periodic": "x", "user": "root"}}, {"annotations": {"hodei/user": "root"}},
    {"profile": "default"}, {"profile": "other"}, {"metadata": {"user": "root"}},
)  # fmt: skip
documents = st.sampled_from([VALID | change for change in CHANGES])
verbs = st.sampled_from(["cancel", "hold", "release", "requeue", "suspend", "resume", "checkpoint", "migrate"])


class Callers(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.live = LiveApp(AccountsPolicy(max_priority=MAX_PRIORITY, project_users=PROJECT_USERS))
        self.store, self.roles, self.service = self.live.store, self.live.roles, self.live.service
        self.periodics = 0
        self.checked: dict[int, str] = {}  # the role by which each job was checked
        self.made_by: dict[str, str] = {}  # the owner of each periodic job

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.live.close()

    def ask(self, who: str, method: str, path: str, document: Any = None) -> Response:
        got = self.live.call(who, method, path, document)
        assert got.status < 500, got.body
        if not self.roles[who]:
            assert got.status == 401
        elif method != "GET" and self.roles[who] == "viewer" and path not in ("/plan", "/whatif"):
            assert got.status == 403
        self.check_new_jobs(who)
        return got

    def check_new_jobs(self, caller: str) -> None:
        """Jobs since the last check are within the rights of their owner: the caller, or the owner of the periodic job."""
        for job in self.live.jobs():
            if job.id in self.checked:
                continue
            owner = self.made_by.get(job.spec.labels.get("hodei/periodic", ""), caller)
            assert owner, "a job without a request"
            role = self.roles[owner]
            assert job.spec.user == owner
            assert role in ("user", "admin")
            assert job.spec.priority <= MAX_PRIORITY.get(role, 10**9)
            assert role == "admin" or owner in PROJECT_USERS.get(job.spec.project, (owner,))
            self.checked[job.id] = role

    @rule(who=workers, given=documents)
    def submit(self, who: str, given: dict[str, Any]) -> None:
        self.ask(who, "POST", "/jobs", given)

    @rule(who=people, given=documents, path=st.sampled_from(["/plan", "/whatif"]))
    def plan_or_whatif(self, who: str, given: dict[str, Any], path: str) -> None:
        before = self.service._last_job
        self.ask(who, "POST", path, {"jobs": [given]})
        assert not self.store.job(before + 1) or self.store.job(before + 1).spec.labels.get("hodei/periodic")  # type: ignore[union-attr]

    @rule(who=workers, given=documents, overlap=st.sampled_from(["allow", "skip", "replace"]))
    def make_periodic(self, who: str, given: dict[str, Any], overlap: str) -> None:
        name = f"p{self.periodics}"
        request = {"name": name, "schedule": "* * * * *", "job": given, "overlap": overlap}
        if self.ask(who, "POST", "/periodic", request).status == 201:
            self.periodics += 1
            self.made_by[name] = who
            periodic = self.service.cron.get(name)
            assert (periodic.by, periodic.job.user) == (who, who)
            assert periodic.job.priority <= MAX_PRIORITY.get(self.roles[who], 10**9)

    @precondition(lambda self: self.periodics)
    @rule(who=people, which=st.integers(0, 9), verb=st.sampled_from(["pause", "resume", "run", ""]))
    def change_periodic(self, who: str, which: int, verb: str) -> None:
        name = f"p{which % self.periodics}"
        owner = self.made_by[name]
        path = f"/periodic/{name}/{verb}" if verb else f"/periodic/{name}"
        got = self.ask(who, "POST" if verb else "DELETE", path)
        if who != owner and self.roles[who] != "admin":
            assert got.status in (401, 403, 404)

    @rule()
    def waiting_jobs_are_promoted(self) -> None:
        for _ in range(3):
            self.live.advance_clock(2000)
        self.check_new_jobs("")

    @rule(minutes=st.integers(1, 3))
    def time_passes(self, minutes: int) -> None:
        """Periodic jobs that are due are submitted, and jobs that wait are promoted."""
        self.live.advance_clock(minutes * 60_000)
        self.waiting_jobs_are_promoted()
        self.check_new_jobs("")

    @precondition(lambda self: self.checked)
    @rule(who=people, which=st.integers(0, 30), verb=verbs)
    def change_job(self, who: str, which: int, verb: str) -> None:
        ids = sorted(self.checked)
        before = self.store.job(ids[which % len(ids)])
        assert before is not None
        body = {} if verb in ("cancel", "migrate") else None
        got = self.ask(who, "POST", f"/jobs/{before.id}/{verb}", body)
        after = self.store.job(before.id)
        assert after is not None
        assert structs.replace(after.spec, escalation=before.spec.escalation) == before.spec
        role = self.roles[who]
        if role != "admin" and who != before.spec.user:
            assert got.status >= 400
            assert not (after.cancel_requested > before.cancel_requested)
            assert not (after.suspend_requested > before.suspend_requested)
            assert not (after.requeue_requested > before.requeue_requested)
        if verb in ("requeue", "release", "resume") and before.spec.priority > MAX_PRIORITY.get(role, 10**9):
            assert got.status >= 400

    @precondition(lambda self: self.checked)
    @rule(who=people, which=st.integers(0, 30), verb=st.sampled_from(["cancel", "hold", "release"]))
    def change_array(self, who: str, which: int, verb: str) -> None:
        ids = sorted(self.checked)
        job = self.store.job(ids[which % len(ids)])
        assert job is not None
        got = self.ask(who, "POST", f"/arrays/{job.id}/{verb}", {} if verb == "cancel" else None)
        if self.roles[who] != "admin" and who != job.spec.user:
            assert got.status >= 400

    @rule(
        who=people,
        call=st.sampled_from([
            ("PATCH", "/nodes/n1", {"cordon": False}), ("POST", "/reservations", {"name": "r", "project": "open"}),
            ("PUT", "/config", {"admission": {"max_priority": {}}}), ("GET", "/config", None), ("GET", "/audit", None),
            ("POST", "/backends", {"name": "b", "kind": "local"}), ("DELETE", "/backends/obedient", None),
            ("POST", "/config/undo", None), ("DELETE", "/reservations/r", None),
        ]),
    )  # fmt: skip
    def request_admin_actions(self, who: str, call: tuple[str, str, Any]) -> None:
        method, path, document = call
        if self.roles[who] != "admin":
            assert self.ask(who, method, path, document).status in (401, 403)

    @rule(who=st.sampled_from(["ana", "bo"]), role=st.sampled_from(["viewer", "user", "admin", ""]))
    def change_role(self, who: str, role: str) -> None:
        self.live.set_role(who, role)

    @rule()
    def runs_end(self) -> None:
        self.live.advance_runs()
        self.check_new_jobs("")

    @invariant()
    def no_job_is_above_the_priority_limit_of_its_role(self) -> None:
        for job in self.live.jobs() if hasattr(self, "live") else ():
            limit = MAX_PRIORITY.get(self.checked.get(job.id, "admin"), 10**9)
            assert apply_escalation(job.spec, job.escalation_state).priority <= limit


TestCallers = Callers.TestCase
TestCallers.settings = settings(max_examples=40 * ROUNDS, stateful_step_count=40, deadline=None)
