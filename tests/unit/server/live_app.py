"""The real application and service in one process, without sockets, with callers of every role.

The store is in memory, the backend a fake, the clock set by the test: does not test durability, real runs or real waiting.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from builders import a_node
from hodei.control.accounting.accounts import AccountsPolicy
from hodei.model.backend import Capabilities
from hodei.model.facts import RunObserved
from hodei.model.job import Job
from hodei.ports import JobQuery
from hodei.server.app import make_app
from hodei.server.auth import Entry, Tokens
from hodei.server.route import Principal
from hodei.store.memory import MemoryStore
from unit.runtime.harness import FakeBackend, FakeClock, a_service
from unit.server.conftest import Response, call_app

API = "/api/v1"
ROLES = {"vera": "viewer", "ana": "user", "bo": "user", "root": "admin"}


class LiveApp:
    """`roles`: the role of each user; "" after the token was revoked. A user's token is the user's name."""

    def __init__(self, accounts: AccountsPolicy | None = None) -> None:
        self.runner = asyncio.Runner()
        self.roles = dict(ROLES)
        self.tokens = Tokens(self._entries())
        self.store, self.clock = MemoryStore(), FakeClock()
        self.backend = FakeBackend(nodes=[a_node("n1", 4, backend="fake")])
        self.backend.capabilities = Capabilities(checkpoint=True)
        self.service = a_service(self.store, self.backend, clock=self.clock, accounts=accounts)
        self.run(self._start())
        self.app = make_app(self.service, self.tokens, now_ms=self.clock.now_ms)

    async def _start(self) -> None:
        await self.service.start()
        assert await self.service.until_ready(5)

    def __enter__(self) -> LiveApp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.run(self.service.stop())
        self.runner.close()

    def run(self, work: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await work

        return self.runner.run(bounded())

    def _entries(self) -> tuple[Entry, ...]:
        return tuple(
            Entry(Principal(name, role), hashlib.sha256(name.encode()).digest())  # type: ignore[arg-type]
            for name, role in self.roles.items()
            if role
        )

    def set_role(self, user: str, role: str) -> None:
        self.roles[user] = role
        self.tokens._entries = self._entries()

    def call(self, user: str, method: str, path: str, document: Any = None) -> Response:
        body = json.dumps(document).encode() if document is not None else b""
        headers = {"authorization": f"Bearer {user}"}
        response: Response = self.run(call_app(self.app, method, API + path, role="", body=body, headers=headers))
        return response

    def submit(self, user: str, **fields: Any) -> int:
        response = self.call(user, "POST", "/jobs", {"name": "job", "command": ["true"], **fields})
        assert response.status == 201, response.body
        return int(response.json["ids"][0])

    def refused(self, user: str, method: str, path: str, document: Any = None) -> str:
        """Check that the request is forbidden; returns the code."""
        response = self.call(user, method, path, document)
        assert response.status == 403, (response.status, response.body)
        return response.code

    def jobs(self) -> list[Job]:
        return self.store.jobs(JobQuery(limit=1000)).jobs

    def advance_clock(self, ms: int) -> None:
        """Advance the clock: due periodic jobs are submitted, due promotions happen."""
        self.clock.ms += ms
        self.run(self.service.cron.run_due())
        self.run(self.service.loop.commit([]))

    def advance_runs(self) -> None:
        """Placed runs start, running ones succeed."""
        live = [run for runs in self.service.controller.cluster.runs.values() for run in runs.values()]
        reports = [
            RunObserved(run.id, "running" if run.state == "placed" else "succeeded", self.clock.ms) for run in live
        ]
        if reports:
            self.run(self.service.loop.commit(reports))
