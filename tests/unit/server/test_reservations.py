"""The routes of reservations, with a fake service."""

from __future__ import annotations

import json

import pytest

from builders import NOW_MS, a_job

RESERVATIONS = "/api/v1/reservations"
NIGHTLY = {"name": "nightly", "project": "ml", "from": "+1h", "for": "2h", "node": ["n1"], "cpu": 2}


def test_a_reservation_is_made_shown_listed_and_given_up(ask, service):
    made = ask("POST", RESERVATIONS, body=json.dumps(NIGHTLY).encode(), role="admin")
    assert made.status == 201
    assert made.json["by"] == "admin"
    assert made.json["places"] == [{"node": "n1", "resources": {"cpu": "2"}}]
    assert made.json["late"] == [{"node": "n1", "run": "7.0.1", "end_at": ""}]
    assert ask("GET", f"{RESERVATIONS}/nightly").json == made.json
    assert ask("GET", RESERVATIONS).json == {"reservations": [made.json]}
    assert ask("DELETE", f"{RESERVATIONS}/nightly", role="admin").status == 200
    assert service.calls == [("unreserve", "nightly", "admin")]
    assert ask("GET", f"{RESERVATIONS}/nightly").status == 404


@pytest.mark.parametrize("role", ["viewer", "user"])
def test_only_an_administrator_makes_or_gives_up_one(ask, service, role):
    assert ask("POST", RESERVATIONS, body=json.dumps(NIGHTLY).encode(), role=role).status == 403
    assert ask("DELETE", f"{RESERVATIONS}/nightly", role=role).status == 403
    assert not service.reserved


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"{", 400, id="not JSON"),
        pytest.param(b"{}", 422, id="nothing said"),
        pytest.param(json.dumps(NIGHTLY | {"colour": "red"}).encode(), 422, id="an unknown field"),
        pytest.param(json.dumps(NIGHTLY | {"for": "soon"}).encode(), 422, id="a wrong duration"),
        pytest.param(json.dumps(NIGHTLY | {"nodes": 1}).encode(), 422, id="a number and names"),
    ],
)
def test_a_wrong_request_is_refused_and_nothing_is_made(ask, service, body, status):
    got = ask("POST", RESERVATIONS, body=body, role="admin")
    assert got.status == status
    assert not service.reserved


def test_a_job_says_how_long_it_is_expected_to_run_until_it_has_ended(ask, service):
    service.store.by_id = {1: a_job(1), 2: a_job(2, state="succeeded", finished_ms=NOW_MS)}
    shown = {job["id"]: (job["expected_ms"], job["expected_by"]) for job in ask("GET", "/api/v1/jobs").json["jobs"]}
    assert shown == {1: (60_000, "P75 of its last 8 runs"), 2: (0, "")}
