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
        ("POST", "/jobs", lambda spec: spec),
        ("POST", "/jobs", lambda spec: {"jobs": [job(), spec]}),
        ("POST", "/jobs", lambda spec: spec | {"array": 3}),
        ("POST", "/periodic", lambda spec: TICK | {"job": spec}),
        ("POST", "/plan", lambda spec: spec),
        ("POST", "/whatif", lambda spec: {"jobs": [spec]}),
    ],
    ids=["submit", "bulk", "array", "periodic", "plan", "whatif"],
)
def test_no_path_lets_a_user_exceed_the_rights_of_the_role(live: LiveApp, method: str, path: str, wrap: Any):
    assert live.refused("ana", method, path, wrap(job(priority=401))) == "PRIORITY_TOO_HIGH"
    assert live.refused("ana", method, path, wrap(job(escalation={"promote_to": "critical"}))) == "PRIORITY_TOO_HIGH"
    assert live.refused("ana", method, path, wrap(job(project="closed"))) == "PROJECT_FORBIDDEN"
    assert live.jobs() == []
    assert live.service.cron.periodics() == []
    for user, spec in (("ana", job(priority=400)), ("bo", job(project="closed")), ("root", job(priority=1000))):
        assert live.call(user, method, path, wrap(spec) | ({"name": user} if path == "/periodic" else {})).status < 300


def test_a_periodic_job_is_checked_with_the_rights_of_its_owner_when_it_is_due(live: LiveApp):
    live.set_role("ana", "admin")
    assert live.call("ana", "POST", "/periodic", TICK | {"job": job(priority=1000)}).status == 201
    live.advance_clock(MINUTE)
    assert [(each.spec.user, each.spec.priority) for each in live.jobs()] == [("ana", 1000)]
    for role, code in (("user", "PRIORITY_TOO_HIGH"), ("viewer", "OWNER_FORBIDDEN"), ("", "OWNER_FORBIDDEN")):
        live.set_role("ana", role)
        live.advance_clock(MINUTE)
        assert len(live.jobs()) == 1
        refusals = [event for event in live.store.events() if event.kind == "periodic.refused"]
        assert refusals[-1].detail["reason_code"] == code
        # An administrator who starts it by hand acts for its owner and adds no rights.
        assert live.refused("root", "POST", "/periodic/tick/run") == code
    live.set_role("ana", "admin")
    live.advance_clock(MINUTE)
    assert len(live.jobs()) == 2


def test_an_unreadable_token_file_delays_periodic_jobs_and_loses_none(live: LiveApp):
    live.call("ana", "POST", "/periodic", TICK | {"job": job()})
    live.tokens._error = "it is open to others"
    with pytest.raises(Exception, match="open to others"):
        live.advance_clock(MINUTE)
    assert live.jobs() == []
    live.tokens._error = ""
    live.advance_clock(0)
    assert len(live.jobs()) == 1


def test_a_job_is_promoted_at_most_to_the_priority_of_its_user(live: LiveApp):
    live.submit("root", cpu=4)
    own = live.submit("ana", cpu=4, priority=100, escalation={"promote_after": "1s"})
    of_admin = live.submit("root", cpu=4, priority=100, escalation={"promote_after": "1s"})
    for _ in range(6):
        live.advance_clock(2000)
    priorities = {each.id: apply_escalation(each.spec, each.escalation_state).priority for each in live.jobs()}
    assert priorities[own] == 400
    assert priorities[of_admin] == 750


ACTS = ("cancel", "hold", "release", "requeue", "suspend", "resume", "checkpoint", "migrate")


@pytest.mark.parametrize("state", ["pending", "held", "running", "ended"])
def test_users_change_their_own_jobs_and_administrators_all(live: LiveApp, state: str):
    if state in ("pending", "held"):
        live.submit("root", cpu=4, priority=1000)
    id = live.submit("ana", cpu=4, priority=250, checkpoint={"signal": "USR1"})
    if state == "held":
        live.call("ana", "POST", f"/jobs/{id}/hold")
    elif state in ("running", "ended"):
        live.advance_runs()
    if state == "ended":
        live.advance_runs()
    before = live.store.job(id)
    for act in ACTS:
        response = live.call("bo", "POST", f"/jobs/{id}/{act}", {} if act in ("cancel", "migrate") else None)
        assert response.status in (403, 409), (act, response.body)  # 409: not possible in this state
        assert live.store.job(id) == before
    action = {"pending": "hold", "held": "release", "running": "suspend", "ended": "requeue"}[state]
    assert live.refused("bo", "POST", f"/jobs/{id}/{action}") == "NOT_OWNER"
    assert live.call("ana", "POST", f"/jobs/{id}/{action}").status == 200
    assert live.call("root", "POST", f"/jobs/{id}/cancel", {}).status == 200


def test_an_array_is_changed_by_its_owner_and_administrators(live: LiveApp):
    live.submit("root", cpu=4)
    id = live.submit("ana", cpu=4, priority=250, array=3)
    for act in ("hold", "cancel"):
        assert live.refused("bo", "POST", f"/arrays/{id}/{act}", {} if act == "cancel" else None) == "NOT_OWNER"
    assert live.call("ana", "POST", f"/arrays/{id}/hold").status == 200
    assert live.refused("bo", "POST", f"/arrays/{id}/release") == "NOT_OWNER"
    assert live.call("root", "POST", f"/arrays/{id}/cancel", {}).status == 200


def test_a_bulk_requeue_needs_ownership_and_revives_only_own_dependents(live: LiveApp):
    id = live.submit("ana", cpu=1, priority=250, array=2)
    live.advance_runs()
    live.run(live.service.loop.commit([RunObserved(f"{id + 1}.0.1", "failed", live.clock.ms, exit_code=3)]))
    live.advance_runs()
    own_dependent, foreign_dependent = (live.submit(user, priority=250, after=[id, id + 1]) for user in ("ana", "bo"))
    second_dependent = live.submit("ana", priority=250, after=[own_dependent])
    assert [
        live.store.job(each).state for each in (id, id + 1, own_dependent, foreign_dependent, second_dependent)
    ] == ["succeeded"] + ["failed"] * 4
    assert live.refused("bo", "POST", "/jobs/requeue", {"arrays": [id], "failed": True}) == "NOT_OWNER"
    assert live.call("ana", "POST", "/jobs/requeue", {"jobs": [99], "failed": True}).status == 404
    done = live.call("ana", "POST", "/jobs/requeue", {"arrays": [id], "failed": True})
    why = {
        "id": foreign_dependent,
        "code": "NOT_OWNER",
        "reason": f"job {foreign_dependent} belongs to bo; ana may change only their own",
    }
    assert done.json == {"requeued": [id + 1], "revived": [own_dependent, second_dependent], "refused": [why]}
    # The revived jobs wait for their dependency and start when it succeeds.
    assert [live.store.job(each).reason_code for each in (own_dependent, second_dependent)] == [
        "WAITING_FOR_DEPENDENCY"
    ] * 2
    for _ in range(8):
        live.advance_runs()
    assert [live.store.job(each).state for each in (id + 1, own_dependent, second_dependent)] == ["succeeded"] * 3
    assert live.store.job(foreign_dependent).state == "failed"
    repeated = live.call("ana", "POST", "/jobs/requeue", {"arrays": [id], "failed": True})
    assert repeated.json == {"requeued": [], "revived": [], "refused": []}


def test_of_all_failed_jobs_only_those_are_requeued_that_the_caller_may_requeue(live: LiveApp):
    foreign, own = live.submit("ana", cpu=1, priority=250), live.submit("bo", cpu=1, priority=250)
    live.advance_runs()
    live.run(
        live.service.loop.commit(
            [RunObserved(f"{id}.0.1", "failed", live.clock.ms, exit_code=3) for id in (foreign, own)]
        )
    )
    body = {"jobs": [foreign, own, 99], "failed": True}
    assert live.call("bo", "POST", "/jobs/requeue", body).status == 404
    assert live.refused("bo", "POST", "/jobs/requeue", body | {"jobs": [foreign, own]}) == "NOT_OWNER"
    assert live.store.job(own).state == "failed"
    done = live.call("bo", "POST", "/jobs/requeue", body | {"permitted": True}).json
    assert (done["requeued"], [(each["id"], each["code"]) for each in done["refused"]]) == (
        [own],
        [(foreign, "NOT_OWNER")],
    )
    assert live.store.job(foreign).state == "failed"


@pytest.mark.parametrize("act", ["requeue", "release", "resume"])
def test_a_user_cannot_requeue_a_job_above_the_priority_limit(live: LiveApp, act: str):
    live.set_role("ana", "admin")
    if act == "requeue":
        id = live.submit("ana", priority=1000)
        live.advance_runs()
        live.advance_runs()
    else:
        live.submit("root", cpu=4, priority=2000)
        id = live.submit("ana", cpu=4, priority=1000)
        live.call("ana", "POST", f"/jobs/{id}/hold")
    live.set_role("ana", "user")
    assert live.refused("ana", "POST", f"/jobs/{id}/{act}") == "PRIORITY_TOO_HIGH"
    assert live.call("root", "POST", f"/jobs/{id}/{act}").status == 200


def test_a_promoted_job_stays_releasable_by_its_user(live: LiveApp):
    live.submit("root", cpu=4)
    id = live.submit("ana", cpu=4, priority=250, escalation={"promote_after": "1s"})
    for _ in range(3):
        live.advance_clock(2000)
    assert live.call("ana", "POST", f"/jobs/{id}/hold").status == 200
    assert live.call("ana", "POST", f"/jobs/{id}/release").status == 200


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/pause"), ("POST", "/resume"), ("POST", "/run"), ("DELETE", "")]
)
def test_a_periodic_job_is_changed_by_its_owner_and_administrators(live: LiveApp, method: str, path: str):
    for user in ("ana", "root"):
        live.call("ana", "POST", "/periodic", TICK | {"job": job()})
        before = live.service.cron.get("tick")
        assert live.refused("bo", method, f"/periodic/tick{path}") == "NOT_OWNER"
        assert live.service.cron.get("tick") == before
        assert live.call(user, method, f"/periodic/tick{path}").status < 300
        live.call("root", "DELETE", "/periodic/tick")
    assert {each.spec.user for each in live.jobs()} <= {"ana"}


def test_a_refusal_is_in_the_audit(live: LiveApp):
    live.refused("ana", "POST", "/periodic", TICK | {"job": job(priority=1000)})
    rows = live.call("root", "GET", "/audit").json["entries"]
    assert [(row["who"], row["verb"], row["code"]) for row in rows] == [("ana", "periodic.create", "PRIORITY_TOO_HIGH")]


def test_periodic_jobs_per_user_and_the_size_of_plans_are_limited(live: LiveApp, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hodei.runtime.cron.MAX_PER_USER", 2)
    for number in range(3):
        response = live.call("ana", "POST", "/periodic", TICK | {"name": f"t{number}", "job": job()})
        assert response.status == (201 if number < 2 else 429), response.body
    assert live.call("bo", "POST", "/periodic", TICK | {"job": job()}).status == 201
    long = TICK | {"name": "long", "schedule": ",".join(["1"] * 1000) + " * * * *", "job": job()}
    assert live.call("bo", "POST", "/periodic", long).status == 422
    assert live.call("vera", "POST", "/plan", {"jobs": [job()] * 100}).status == 200
    assert live.call("vera", "POST", "/plan", {"jobs": [job()] * 101}).status == 422
    assert live.call("vera", "POST", "/plan", job(count=2001)).status == 422
