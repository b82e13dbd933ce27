"""Every request that may change something has an audit row, by construction, without the body."""

from __future__ import annotations

import re

import pytest

from hodei.server.audit import verb_of
from hodei.server.route import API
from hodei.server.routes import route_table

CHANGING = [route for route in route_table() if route.method != "GET" and not route.read_only]


def route_id(route) -> str:
    return f"{route.method} {route.path}"


def test_only_queries_are_read_only():
    paths = {route.path.removeprefix(API) for route in route_table() if route.read_only}
    assert {"/plan", "/whatif"} <= paths
    # The exchange carries messages: what they change is recorded where it changes.
    assert all(re.search(r"plan|whatif|check|preview|try|agent/exchange", path) for path in paths), paths


def test_audit_verbs_are_distinct():
    verbs = [verb_of(route) for route in CHANGING]
    assert len(set(verbs)) == len(verbs)
    assert {"jobs.submit", "jobs.cancel", "nodes.change", "reservations.create", "reservations.delete"} <= set(verbs)


@pytest.mark.parametrize("route", CHANGING, ids=route_id)
def test_every_request_to_a_changing_route_adds_one_audit_row(call, service, route):
    path = re.sub(r"\{(\w+)\}", lambda part: "1" if part[1] == "id" else "n1", route.path)
    response = call(route.method, path, role="admin", body=b"" if route.request is None else b"{}")
    (row,) = service.recorded
    assert (row.who, row.role, row.verb) == ("admin", "admin", verb_of(route))
    assert bool(row.code) == (response.status >= 400)
    if response.status < 400 or response.json.get("code"):
        assert row.request == response.headers["hodei-request-id"]


def test_a_forbidden_request_is_audited_with_its_caller(call, service):
    assert call("PATCH", f"{API}/nodes/n1", role="viewer", body=b"{}").status == 403
    (row,) = service.recorded
    assert (row.who, row.role, row.verb, row.target, row.code) == (
        "viewer",
        "viewer",
        "nodes.change",
        "n1",
        "FORBIDDEN",
    )


def test_requests_without_a_token_and_reads_add_no_audit_row(call, service):
    call("POST", f"{API}/jobs", role="", body=b'{"command": ["true"]}')
    call("GET", f"{API}/jobs")
    call("POST", f"{API}/plan", body=b'{"command": ["true"]}')
    assert service.recorded == []


def test_an_audit_row_contains_nothing_of_the_body(call, service):
    body = b'{"command": ["s3cret"], "env": {"API_TOKEN": "s3cret"}, "name": "s3cret", "nonsense": 1}'
    call("POST", f"{API}/jobs", body=body)
    call("POST", f"{API}/jobs/1/cancel", body=b'{"reason": "s3cret"}')
    assert len(service.recorded) == 2
    assert "s3cret" not in str(service.recorded)


def test_only_administrators_read_the_audit(call):
    assert call("GET", f"{API}/audit", role="user").status == 403
    assert call("GET", f"{API}/audit?what=jobs&since=1h", role="admin").json == {"entries": []}
