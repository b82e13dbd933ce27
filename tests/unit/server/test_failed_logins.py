"""Requests with a wrong token are counted and audited, without the token, and at a bounded rate."""

from __future__ import annotations

import asyncio

import pytest

from hodei.server.app import App
from hodei.server.auth import new_token
from unit.server.conftest import call_app
from unit.server.fake_service import FakeService


def count(service: FakeService, reason: str) -> float:
    return service.prometheus.registry.get_sample_value("hodei_auth_failures_total", {"reason": reason}) or 0.0


def log_in(app: App, *credentials: str, path: str = "/api/v1/jobs") -> list[int]:
    async def call_all() -> list[int]:
        statuses = []
        for credential in credentials:
            headers = {"authorization": credential} if credential else {}
            statuses.append((await call_app(app, "GET", path, role="", headers=headers)).status)
        await asyncio.sleep(0)
        return statuses

    return asyncio.run(call_all())


@pytest.mark.parametrize(
    ("credential", "reason"),
    [("", "missing"), ("Basic x", "malformed"), (f"Bearer {new_token()}", "unknown"), ("Bearer hod_half", "malformed")],
    ids=["missing", "no bearer", "unknown", "half a token"],
)
def test_every_failure_is_counted_by_its_reason(app, service, credential, reason):
    assert log_in(app, credential, credential) == [401, 401]
    assert count(service, reason) == 2
    assert bool(service.recorded) == (reason != "missing")


def test_an_audit_row_has_the_route_and_not_the_token(app, service):
    secret = new_token()
    log_in(app, f"Bearer {secret}", path="/api/v1/nodes/s3cret")
    (row,) = service.recorded
    assert (row.who, row.role, row.verb, row.code) == ("", "", "login.failed", "UNAUTHORIZED")
    assert row.target == "GET /api/v1/nodes/{name}"
    assert secret not in repr(row)


def test_many_failures_add_few_audit_rows(app, service):
    log_in(app, *["Bearer wrong"] * 500)
    assert count(service, "unknown") == 500
    assert len(service.recorded) == 1


def test_failures_from_many_addresses_add_few_audit_rows(app, service, monkeypatch):
    addresses = iter(f"10.0.{number // 250}.{number % 250}" for number in range(500))
    monkeypatch.setattr("hodei.server.audit.client_address", lambda client: next(addresses))
    log_in(app, *["Bearer wrong"] * 500)
    assert 1 < len(service.recorded) <= 40
    assert len({row.remote for row in service.recorded}) == len(service.recorded)
