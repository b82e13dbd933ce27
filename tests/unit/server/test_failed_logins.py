"""Requests with a wrong token are counted and audited, without the token, and at a bounded rate."""

from __future__ import annotations

import asyncio

import pytest

from hodei.server.app import App
from hodei.server.auth import new_token
from unit.server.conftest import ask_app
from unit.server.fake_service import FakeService


def count(service: FakeService, reason: str) -> float:
    return service.prometheus.registry.get_sample_value("hodei_auth_failures_total", {"reason": reason}) or 0.0


def knock(app: App, *shown: str, path: str = "/api/v1/jobs") -> list[int]:
    async def play() -> list[int]:
        statuses = []
        for one in shown:
            headers = {"authorization": one} if one else {}
            statuses.append((await ask_app(app, "GET", path, role="", headers=headers)).status)
        await asyncio.sleep(0)
        return statuses

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("shown", "reason"),
    [("", "missing"), ("Basic x", "malformed"), (f"Bearer {new_token()}", "unknown"), ("Bearer hod_half", "malformed")],
    ids=["missing", "no bearer", "unknown", "half a token"],
)
def test_every_failure_is_counted_by_what_was_wrong(app, service, shown, reason):
    assert knock(app, shown, shown) == [401, 401]
    assert count(service, reason) == 2
    assert bool(service.recorded) == (reason != "missing")


def test_a_row_says_what_was_called_and_not_what_was_shown(app, service):
    secret = new_token()
    knock(app, f"Bearer {secret}", path="/api/v1/nodes/s3cret")
    (row,) = service.recorded
    assert (row.who, row.role, row.verb, row.code) == ("", "", "login.failed", "UNAUTHORIZED")
    assert row.target == "GET /api/v1/nodes/{name}"
    assert secret not in repr(row)


def test_a_million_tries_leave_a_handful_of_rows(app, service):
    knock(app, *["Bearer wrong"] * 500)
    assert count(service, "unknown") == 500
    assert len(service.recorded) == 1


def test_tries_from_many_addresses_leave_a_handful_of_rows_too(app, service, monkeypatch):
    addresses = iter(f"10.0.{number // 250}.{number % 250}" for number in range(500))
    monkeypatch.setattr("hodei.server.audit.client_address", lambda client: next(addresses))
    knock(app, *["Bearer wrong"] * 500)
    assert 1 < len(service.recorded) <= 40
    assert len({row.remote for row in service.recorded}) == len(service.recorded)
