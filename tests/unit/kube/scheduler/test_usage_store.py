"""Usage of namespaces in a ConfigMap: written rarely, read first, limited in size."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.scheduler.history import KEY, MAX_BYTES, WRITE_EVERY_S, UsageStore
from hodei.kube.scheduler.run import Options
from hodei.model.accounting import UsageRow
from hodei.model.config import ProfileConfig, SchedulingConfig, SharesConfig
from hodei.model.effects import SaveUsage
from unit.kube.fake_cluster import NOW_MS, FakeCluster

HOUR_MS = 3_600_000
SHARES = Options(
    scheduling=SchedulingConfig(
        profiles={"default": ProfileConfig(queue="multifactor")}, shares=SharesConfig(enabled=True)
    )
)


class ConfigMaps:
    """One ConfigMap with versions that refuses outdated writes. It proves nothing about permissions."""

    def __init__(self) -> None:
        self.config_map: dict[str, Any] | None = None
        self.version = 0
        self.writes = 0
        self.failure: ApiError | None = None

    async def request(self, method: str, path: str, body: bytes | None = None, **_: Any) -> bytes:
        if self.failure is not None:
            raise self.failure
        if method == "GET":
            if self.config_map is None:
                raise ApiError(404, "NotFound", "not found")
            return json.dumps(self.config_map).encode()
        assert body is not None
        written = json.loads(body)
        current = self.config_map["metadata"]["resourceVersion"] if self.config_map else ""
        if written["metadata"].get("resourceVersion", "") != current:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.version += 1
        self.writes += 1
        written["metadata"]["resourceVersion"] = str(self.version)
        self.config_map = written
        return json.dumps(written).encode()


class StoredUsage:
    """A usage store, its ConfigMap, and a monotonic clock that the test advances."""

    def __init__(self, api: ConfigMaps | None = None, **more: Any) -> None:
        self.api, self.at_s, self.cluster = api or ConfigMaps(), 1000.0, FakeCluster(SHARES)
        self.store = UsageStore(
            self.api, "hodei-system", "hodei-usage", self.cluster.parts.controller, lambda: self.cluster.now_ms,
            monotonic=lambda: self.at_s, **more,
        )  # fmt: skip

    def use(self, *rows: UsageRow) -> None:
        step = self.cluster.parts.controller.step(self.cluster.now_ms)
        step.saves.append(SaveUsage(rows))
        self.store.on_step(step)

    def check(self) -> None:
        """One round of the store's own loop."""

        async def once() -> None:
            if self.store._changed and self.at_s - self.store._written_at >= WRITE_EVERY_S:
                await self.store._write(overwrite=True)

        asyncio.run(once())


def _row(namespace: str, hour: int = 0, amount: int = 1, resource: str = "billing") -> UsageRow:
    return UsageRow((namespace, "user"), resource, NOW_MS // HOUR_MS * HOUR_MS - hour * HOUR_MS, HOUR_MS, amount)


def test_usage_is_loaded_before_the_first_decision():
    first = StoredUsage()
    asyncio.run(first.store.start())
    first.use(_row("greedy", amount=1 << 80), _row("modest", amount=5))
    asyncio.run(first.store.stop())
    second = StoredUsage(first.api)
    asyncio.run(second.store.start())
    sharing = second.cluster.parts.controller.accounts.sharing
    assert sharing is not None
    assert {row.path[0]: row.amount for row in sharing.ledger.rows()} == {"greedy": 1 << 80, "modest": 5}


def test_usage_is_written_at_most_once_a_minute():
    stored = StoredUsage()
    for _ in range(30):
        stored.use(_row("a"))
        stored.check()
        stored.at_s += 10
    assert stored.api.writes == 5


def test_dropped_rows_are_removed_from_the_configmap():
    stored = StoredUsage()
    stored.use(_row("a", 1), _row("a", 2))
    stored.use(_row("a", 1, amount=0))
    asyncio.run(stored.store.stop())
    again = StoredUsage(stored.api)
    asyncio.run(again.store.start())
    assert list(again.store._rows.values()) == [_row("a", 2)]


def test_only_the_given_resources_are_kept():
    stored = StoredUsage(resources=frozenset({"billing"}))
    stored.use(_row("a"), _row("a", resource="memory"))
    assert [row.resource for row in stored.store._rows.values()] == ["billing"]


def test_the_leader_overwrites_a_conflicting_version():
    api = ConfigMaps()
    old, new = StoredUsage(api), StoredUsage(api)
    asyncio.run(new.store.start())
    old.use(_row("a"))
    asyncio.run(old.store.stop())
    new.use(_row("b"))
    new.check()
    reader = StoredUsage(api)
    asyncio.run(reader.store.start())
    assert [row.path[0] for row in reader.store._rows.values()] == ["b"]


def test_a_stopping_process_does_not_overwrite_another():
    api = ConfigMaps()
    old, new = StoredUsage(api), StoredUsage(api)
    new.use(_row("new"))
    new.check()
    old.use(_row("old"))
    asyncio.run(old.store.stop())
    assert api.writes == 1


def test_too_much_usage_drops_the_oldest_of_all_accounts():
    stored, rng = StoredUsage(max_bytes=20_000), random.Random(1)
    stored.use(*(_row(f"ns-{n % 50}", n // 50, rng.getrandbits(62)) for n in range(5000)))
    stored.check()
    assert stored.api.config_map is not None
    assert len(base64.b64decode(stored.api.config_map["binaryData"][KEY])) <= 20_000
    kept = sorted(row.start_ms for row in stored.store._rows.values())
    hours = len(kept) // 50
    assert 10 < hours < 100
    assert kept == sorted(_row("any", hour).start_ms for hour in range(hours) for _ in range(50))


def test_usage_never_exceeds_the_size_of_a_configmap():
    assert MAX_BYTES * 4 // 3 + 10_000 < 1 << 20


@pytest.mark.parametrize("data", [b"?", b"", b"\x1f\x8b"], ids=["not gzip", "empty", "cut off"])
def test_unreadable_usage_starts_from_zero(data: bytes):
    stored = StoredUsage()
    packed = {KEY: base64.b64encode(data).decode()}
    stored.api.config_map = {"metadata": {"name": "hodei-usage", "resourceVersion": ""}, "binaryData": packed}
    asyncio.run(stored.store.start())
    assert stored.store._rows == {}
    stored.use(_row("a"))
    stored.check()
    assert stored.api.writes == 1


def test_pods_are_scheduled_without_the_right_to_read_usage(caplog: pytest.LogCaptureFixture):
    stored = StoredUsage()
    stored.api.failure = ApiError(403, "Forbidden", "configmaps is forbidden")
    asyncio.run(stored.store.start())
    assert "rbac.yaml" in caplog.text


def test_a_write_that_failed_is_tried_again_a_minute_later():
    stored = StoredUsage()
    stored.api.failure = ApiError(503, "Unavailable", "later")
    stored.use(_row("a"))
    stored.check()
    stored.api.failure = None
    stored.check()
    assert stored.api.writes == 0
    stored.at_s += WRITE_EVERY_S
    stored.check()
    assert stored.api.writes == 1
