"""Every request that may change something has an audit row, by construction, without the body."""

from __future__ import annotations

import re

import pytest

from hodei.server.audit import verb_of
from hodei.server.route import API
from hodei.server.routes import route_table

CHANGING = [route for route in route_table() if route.method != "GET" and not route.read_only]


def named(route) -> str:
    return f"{route.method} {route.path}"


def test_only_queries_are_read_only():
    harmless = {route.path.removeprefix(API) for route in route_table() if route.read_only}
    assert {"/plan", "/whatif"} <= harmless
    assert all(re.search(r"plan|whatif|check|preview|try", path) for path in harmless), harmless


def test_audit_verbs_are_distinct():
    verbs = [verb_of(route) for route in CHANGING]
    assert len(set(verbs)) == len(verbs)
    assert {"jobs.submit", "jobs.cancel", "nodes.change", "reservations.create", "reservations.delete"} <= set(verbs)


@pytest.mark.parametrize("route", CHANGING, ids=named)
def test_every_request_to_a_changing_route_leaves_one_audit_row(ask, service, route):
    path = re.sub(r"\{(\w+)\}", lambda part: "1" if part[1] == "id" else "n1", route.path)
    got = ask(route.method, path, role="admin", body=b"" if route.request is None else b"{}")
    (row,) = service.recorded
    assert (row.who, row.role, row.verb) == ("admin", "admin", verb_of(route))
    assert bool(row.code) == (got.status >= 400)
    if got.status < 400 or got.json.get("code"):
        assert row.request == got.headers["hodei-request-id"]


def test_a_forbidden_request_is_audited_with_its_caller(ask, service):
    assert ask("PATCH", f"{API}/nodes/n1", role="viewer", body=b"{}").status == 403
    (row,) = service.recorded
    assert (row.who, row.role, row.verb, row.target, row.code) == (
        "viewer",
        "viewer",
        "nodes.change",
        "n1",
        "FORBIDDEN",
    )


def test_requests_without_a_token_and_reads_leave_no_audit_row(ask, service):
    ask("POST", f"{API}/jobs", role="", body=b'{"command": ["true"]}')
    ask("GET", f"{API}/jobs")
    ask("POST", f"{API}/plan", body=b'{"command": ["true"]}')
    assert service.recorded == []


def test_an_audit_row_contains_nothing_of_the_body(ask, service):
    body = b'{"command": ["s3cret"], "env": {"API_TOKEN": "s3cret"}, "name": "s3cret", "nonsense": 1}'
    ask("POST", f"{API}/jobs", body=body)
    ask("POST", f"{API}/jobs/1/cancel", body=b'{"reason": "s3cret"}')
    assert len(service.recorded) == 2
    assert "s3cret" not in str(service.recorded)


def test_the_audit_is_for_administrators(ask):
    assert ask("GET", f"{API}/audit", role="user").status == 403
    assert ask("GET", f"{API}/audit?what=jobs&since=1h", role="admin").json == {"entries": []}
