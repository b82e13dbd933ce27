"""What each role may do, on every path that creates or changes a job. The property over all sequences: tests/property."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hodei.control.accounting.accounts import AccountsPolicy
from hodei.model.escalation_state import apply_escalation
from hodei.model.facts import RunObserved
from unit.server.live_app import LiveApp

MINUTE = 60_000
TICK: dict[str, Any] = {"name": "tick", "schedule": "* * * * *", "overlap": "allow"}


@pytest.fixture
def live() -> Iterator[LiveApp]:
    with LiveApp(AccountsPolicy(max_priority={"user": 400}, project_users={"closed": ("bo",)})) as app:
        yield app


def job(**fields: Any) -> dict[str, Any]:
    return {"name": "job", "command": ["true"], "priority": 250, **fields}


@pytest.mark.parametrize(
    ("method", "path", "wrap"),
    [
        ("POST", "/jobs", lambda one: one),
        ("POST", "/jobs", lambda one: {"jobs": [job(), one]}),
        ("POST", "/jobs", lambda one: one | {"array": 3}),
        ("POST", "/periodic", lambda one: TICK | {"job": one}),
        ("POST", "/plan", lambda one: one),
        ("POST", "/whatif", lambda one: {"jobs": [one]}),
    ],
    ids=["submit", "bulk", "array", "periodic", "plan", "whatif"],
)
def test_no_path_lets_a_user_ask_for_more_than_the_role_may_have(live: LiveApp, method: str, path: str, wrap: Any):
    assert live.refused("ana", method, path, wrap(job(priority=401))) == "PRIORITY_TOO_HIGH"
    assert live.refused("ana", method, path, wrap(job(escalation={"promote_to": "critical"}))) == "PRIORITY_TOO_HIGH"
    assert live.refused("ana", method, path, wrap(job(project="closed"))) == "PROJECT_FORBIDDEN"
    assert live.jobs() == []
    assert live.service.cron.periodics() == []
    for who, one in (("ana", job(priority=400)), ("bo", job(project="closed")), ("root", job(priority=1000))):
        assert live.ask(who, method, path, wrap(one) | ({"name": who} if path == "/periodic" else {})).status < 300


def test_a_periodic_job_is_judged_by_the_rights_that_its_owner_has_when_it_is_due(live: LiveApp):
    live.give("ana", "admin")
    assert live.ask("ana", "POST", "/periodic", TICK | {"job": job(priority=1000)}).status == 201
    live.pass_time(MINUTE)
    assert [(one.spec.user, one.spec.priority) for one in live.jobs()] == [("ana", 1000)]
    for role, code in (("user", "PRIORITY_TOO_HIGH"), ("viewer", "OWNER_FORBIDDEN"), ("", "OWNER_FORBIDDEN")):
        live.give("ana", role)
        live.pass_time(MINUTE)
        assert len(live.jobs()) == 1
        told = [event for event in live.store.events() if event.kind == "periodic.refused"]
        assert told[-1].detail["reason_code"] == code
        # An administrator who sets it going out of turn acts for its owner, and gives it no more rights.
        assert live.refused("root", "POST", "/periodic/tick/run") == code
    live.give("ana", "admin")
    live.pass_time(MINUTE)
    assert len(live.jobs()) == 2


def test_a_token_file_in_trouble_delays_periodic_jobs_and_loses_none(live: LiveApp):
    live.ask("ana", "POST", "/periodic", TICK | {"job": job()})
    live.tokens._error = "it is open to others"
    with pytest.raises(Exception, match="open to others"):
        live.pass_time(MINUTE)
    assert live.jobs() == []
    live.tokens._error = ""
    live.pass_time(0)
    assert len(live.jobs()) == 1


def test_a_job_that_promotes_itself_goes_no_higher_than_its_user_may(live: LiveApp):
    live.submit("root", cpu=4)
    mine = live.submit("ana", cpu=4, priority=100, escalation={"promote_after": "1s"})
    theirs = live.submit("root", cpu=4, priority=100, escalation={"promote_after": "1s"})
    for _ in range(6):
        live.pass_time(2000)
    priorities = {one.id: apply_escalation(one.spec, one.escalation_state).priority for one in live.jobs()}
    assert priorities[mine] == 400
    assert priorities[theirs] == 750


ACTS = ("cancel", "hold", "release", "requeue", "suspend", "resume", "checkpoint", "migrate")


@pytest.mark.parametrize("state", ["pending", "held", "running", "ended"])
def test_users_change_their_own_jobs_and_administrators_all(live: LiveApp, state: str):
    if state in ("pending", "held"):
        live.submit("root", cpu=4, priority=1000)
    id = live.submit("ana", cpu=4, priority=250, checkpoint={"signal": "USR1"})
    if state == "held":
        live.ask("ana", "POST", f"/jobs/{id}/hold")
    elif state in ("running", "ended"):
        live.runs_go_on()
    if state == "ended":
        live.runs_go_on()
    before = live.store.job(id)
    for act in ACTS:
        got = live.ask("bo", "POST", f"/jobs/{id}/{act}", {} if act in ("cancel", "migrate") else None)
        assert got.status in (403, 409), (act, got.body)  # 409: it could not be done to a job in this state anyway
        assert live.store.job(id) == before
    able = {"pending": "hold", "held": "release", "running": "suspend", "ended": "requeue"}[state]
    assert live.refused("bo", "POST", f"/jobs/{id}/{able}") == "NOT_OWNER"
    assert live.ask("ana", "POST", f"/jobs/{id}/{able}").status == 200
    assert live.ask("root", "POST", f"/jobs/{id}/cancel", {}).status == 200


def test_an_array_is_changed_by_its_owner_and_administrators(live: LiveApp):
    live.submit("root", cpu=4)
    id = live.submit("ana", cpu=4, priority=250, array=3)
    for act in ("hold", "cancel"):
        assert live.refused("bo", "POST", f"/arrays/{id}/{act}", {} if act == "cancel" else None) == "NOT_OWNER"
    assert live.ask("ana", "POST", f"/arrays/{id}/hold").status == 200
    assert live.refused("bo", "POST", f"/arrays/{id}/release") == "NOT_OWNER"
    assert live.ask("root", "POST", f"/arrays/{id}/cancel", {}).status == 200


def test_many_are_started_again_by_their_owner_and_what_waited_for_them_only_if_it_is_theirs_too(live: LiveApp):
    id = live.submit("ana", cpu=1, priority=250, array=2)
    live.runs_go_on()
    live.run(live.service.loop.commit([RunObserved(f"{id + 1}.0.1", "failed", live.clock.ms, exit_code=3)]))
    live.runs_go_on()
    hers, his = (live.submit(who, priority=250, after=[id, id + 1]) for who in ("ana", "bo"))
    after_hers = live.submit("ana", priority=250, after=[hers])
    assert [live.store.job(one).state for one in (id, id + 1, hers, his, after_hers)] == ["succeeded"] + ["failed"] * 4
    assert live.refused("bo", "POST", "/jobs/requeue", {"arrays": [id], "failed": True}) == "NOT_OWNER"
    assert live.ask("ana", "POST", "/jobs/requeue", {"jobs": [99], "failed": True}).status == 404
    done = live.ask("ana", "POST", "/jobs/requeue", {"arrays": [id], "failed": True})
    assert done.json == {"requeued": [id + 1], "revived": [hers, after_hers], "refused": [his]}
    # They wait for it again, and start when it has succeeded this time.
    assert [live.store.job(one).reason_code for one in (hers, after_hers)] == ["WAITING_FOR_DEPENDENCY"] * 2
    for _ in range(8):
        live.runs_go_on()
    assert [live.store.job(one).state for one in (id + 1, hers, after_hers)] == ["succeeded"] * 3
    assert live.store.job(his).state == "failed"
    nothing = live.ask("ana", "POST", "/jobs/requeue", {"arrays": [id], "failed": True})
    assert nothing.json == {"requeued": [], "revived": [], "refused": []}


@pytest.mark.parametrize("act", ["requeue", "release", "resume"])
def test_a_job_above_the_ceiling_does_not_come_back_into_line_by_a_users_word(live: LiveApp, act: str):
    live.give("ana", "admin")
    if act == "requeue":
        id = live.submit("ana", priority=1000)
        live.runs_go_on()
        live.runs_go_on()
    else:
        live.submit("root", cpu=4, priority=2000)
        id = live.submit("ana", cpu=4, priority=1000)
        live.ask("ana", "POST", f"/jobs/{id}/hold")
    live.give("ana", "user")
    assert live.refused("ana", "POST", f"/jobs/{id}/{act}") == "PRIORITY_TOO_HIGH"
    assert live.ask("root", "POST", f"/jobs/{id}/{act}").status == 200


def test_a_promotion_by_the_operators_rules_is_no_crime_of_the_user(live: LiveApp):
    live.submit("root", cpu=4)
    id = live.submit("ana", cpu=4, priority=250, escalation={"promote_after": "1s"})
    for _ in range(3):
        live.pass_time(2000)
    assert live.ask("ana", "POST", f"/jobs/{id}/hold").status == 200
    assert live.ask("ana", "POST", f"/jobs/{id}/release").status == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/pause"), ("POST", "/resume"), ("POST", "/run"), ("DELETE", "")]
)
def test_a_periodic_job_is_changed_by_its_owner_and_administrators(live: LiveApp, method: str, path: str):
    for who in ("ana", "root"):
        live.ask("ana", "POST", "/periodic", TICK | {"job": job()})
        before = live.service.cron.get("tick")
        assert live.refused("bo", method, f"/periodic/tick{path}") == "NOT_OWNER"
        assert live.service.cron.get("tick") == before
        assert live.ask(who, method, f"/periodic/tick{path}").status < 300
        live.ask("root", "DELETE", "/periodic/tick")
    assert {one.spec.user for one in live.jobs()} <= {"ana"}


def test_a_refusal_is_in_the_audit(live: LiveApp):
    live.refused("ana", "POST", "/periodic", TICK | {"job": job(priority=1000)})
    rows = live.ask("root", "GET", "/audit").json["entries"]
    assert [(row["who"], row["verb"], row["code"]) for row in rows] == [("ana", "periodic.create", "PRIORITY_TOO_HIGH")]


def test_nobody_fills_the_calendar_or_makes_the_scheduler_wait_for_a_plan(
    live: LiveApp, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hodei.runtime.cron.MAX_PER_USER", 2)
    for number in range(3):
        got = live.ask("ana", "POST", "/periodic", TICK | {"name": f"t{number}", "job": job()})
        assert got.status == (201 if number < 2 else 429), got.body
    assert live.ask("bo", "POST", "/periodic", TICK | {"job": job()}).status == 201
    long = TICK | {"name": "long", "schedule": ",".join(["1"] * 1000) + " * * * *", "job": job()}
    assert live.ask("bo", "POST", "/periodic", long).status == 422
    assert live.ask("vera", "POST", "/plan", {"jobs": [job()] * 100}).status == 200
    assert live.ask("vera", "POST", "/plan", {"jobs": [job()] * 101}).status == 422
    assert live.ask("vera", "POST", "/plan", job(count=2001)).status == 422
