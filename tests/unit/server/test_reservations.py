"""The routes of reservations, with a fake service."""

from __future__ import annotations

import json

import pytest

from builders import NOW_MS, a_job

RESERVATIONS = "/api/v1/reservations"
NIGHTLY = {"name": "nightly", "project": "ml", "from": "+1h", "for": "2h", "node": ["n1"], "cpu": 2}


def test_a_reservation_is_created_shown_listed_and_deleted(call, service):
    created = call("POST", RESERVATIONS, body=json.dumps(NIGHTLY).encode(), role="admin")
    assert created.status == 201
    assert created.json["by"] == "admin"
    assert created.json["places"] == [{"node": "n1", "resources": {"cpu": "2"}}]
    assert created.json["late"] == [{"node": "n1", "run": "7.0.1", "end_at": ""}]
    assert call("GET", f"{RESERVATIONS}/nightly").json == created.json
    assert call("GET", RESERVATIONS).json == {"reservations": [created.json]}
    assert call("DELETE", f"{RESERVATIONS}/nightly", role="admin").status == 200
    assert service.calls == [("unreserve", "nightly", "admin")]
    assert call("GET", f"{RESERVATIONS}/nightly").status == 404


@pytest.mark.parametrize("role", ["viewer", "user"])
def test_only_an_administrator_creates_or_deletes_a_reservation(call, service, role):
    assert call("POST", RESERVATIONS, body=json.dumps(NIGHTLY).encode(), role=role).status == 403
    assert call("DELETE", f"{RESERVATIONS}/nightly", role=role).status == 403
    assert not service.reserved


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"{", 400, id="not JSON"),
        pytest.param(b"{}", 422, id="empty"),
        pytest.param(json.dumps(NIGHTLY | {"colour": "red"}).encode(), 422, id="an unknown field"),
        pytest.param(json.dumps(NIGHTLY | {"for": "soon"}).encode(), 422, id="a wrong duration"),
        pytest.param(json.dumps(NIGHTLY | {"nodes": 1}).encode(), 422, id="a number and names"),
    ],
)
def test_an_invalid_request_creates_no_reservation(call, service, body, status):
    response = call("POST", RESERVATIONS, body=body, role="admin")
    assert response.status == status
    assert not service.reserved


def test_a_job_shows_its_expected_run_time_until_it_has_ended(call, service):
    service.store.by_id = {1: a_job(1), 2: a_job(2, state="succeeded", finished_ms=NOW_MS)}
    shown = {job["id"]: (job["expected_ms"], job["expected_by"]) for job in call("GET", "/api/v1/jobs").json["jobs"]}
    assert shown == {1: (60_000, "P75 of its last 8 runs"), 2: (0, "")}
