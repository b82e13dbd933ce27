"""What namespaces have used, in a ConfigMap: written seldom, read first, never too large."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.history import EVERY_S, KEY, MOST_BYTES, UsageStore
from hodei.model.accounting import UsageRow
from hodei.model.config import ProfileConfig, SchedulingConfig, SharesConfig
from hodei.model.effects import SaveUsage
from unit.kube.town import NOW_MS, Town

HOUR_MS = 3_600_000
SHARES = Options(
    scheduling=SchedulingConfig(
        profiles={"default": ProfileConfig(queue="multifactor")}, shares=SharesConfig(enabled=True)
    )
)


class ConfigMaps:
    """One ConfigMap that counts its versions and refuses writes over an old one. It proves nothing about rights."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None
        self.version = 0
        self.writes = 0
        self.trouble: ApiError | None = None

    async def request(self, method: str, path: str, body: bytes | None = None, **_: Any) -> bytes:
        if self.trouble is not None:
            raise self.trouble
        if method == "GET":
            if self.kept is None:
                raise ApiError(404, "NotFound", "there is none")
            return json.dumps(self.kept).encode()
        assert body is not None
        given = json.loads(body)
        current = self.kept["metadata"]["resourceVersion"] if self.kept else ""
        if given["metadata"].get("resourceVersion", "") != current:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.version += 1
        self.writes += 1
        given["metadata"]["resourceVersion"] = str(self.version)
        self.kept = given
        return json.dumps(given).encode()


class Hands:
    """A memory, the ConfigMap that it has, and a monotonic clock that stands."""

    def __init__(self, api: ConfigMaps | None = None, **more: Any) -> None:
        self.api, self.at_s, self.town = api or ConfigMaps(), 1000.0, Town(SHARES)
        self.memory = UsageStore(
            self.api, "hodei-system", "hodei-usage", self.town.harness.controller, lambda: self.town.now_ms,
            monotonic=lambda: self.at_s, **more,
        )  # fmt: skip

    def use(self, *rows: UsageRow) -> None:
        step = self.town.harness.controller.step(self.town.now_ms)
        step.saves.append(SaveUsage(rows))
        self.memory.stepped(step)

    def look(self) -> None:
        """What the loop does once a second."""

        async def once() -> None:
            if self.memory._changed and self.at_s - self.memory._written_at >= EVERY_S:
                await self.memory._write(takes_over=True)

        asyncio.run(once())


def _row(namespace: str, hour: int = 0, amount: int = 1, resource: str = "billing") -> UsageRow:
    return UsageRow((namespace, "nobody"), resource, NOW_MS // HOUR_MS * HOUR_MS - hour * HOUR_MS, HOUR_MS, amount)


def test_what_was_used_is_known_to_the_next_process_before_it_decides():
    first = Hands()
    asyncio.run(first.memory.begin())
    first.use(_row("greedy", amount=1 << 80), _row("modest", amount=5))
    asyncio.run(first.memory.end())
    second = Hands(first.api)
    asyncio.run(second.memory.begin())
    sharing = second.town.harness.controller.accounts.sharing
    assert sharing is not None
    assert {row.path[0]: row.amount for row in sharing.ledger.rows()} == {"greedy": 1 << 80, "modest": 5}


def test_it_is_written_at_once_and_then_not_more_than_once_a_minute():
    hands = Hands()
    for _ in range(30):
        hands.use(_row("a"))
        hands.look()
        hands.at_s += 10
    assert hands.api.writes == 5


def test_rows_that_are_gone_are_gone_there_too():
    hands = Hands()
    hands.use(_row("a", 1), _row("a", 2))
    hands.use(_row("a", 1, amount=0))
    asyncio.run(hands.memory.end())
    again = Hands(hands.api)
    asyncio.run(again.memory.begin())
    assert list(again.memory._rows.values()) == [_row("a", 2)]


def test_only_what_counts_is_kept():
    hands = Hands(only=frozenset({"billing"}))
    hands.use(_row("a"), _row("a", resource="memory"))
    assert [row.resource for row in hands.memory._rows.values()] == ["billing"]


def test_one_who_leads_writes_over_what_came_in_between():
    api = ConfigMaps()
    old, new = Hands(api), Hands(api)
    asyncio.run(new.memory.begin())
    old.use(_row("a"))
    asyncio.run(old.memory.end())
    new.use(_row("b"))
    new.look()
    reader = Hands(api)
    asyncio.run(reader.memory.begin())
    assert [row.path[0] for row in reader.memory._rows.values()] == ["b"]


def test_one_who_ends_does_not_write_over_another():
    api = ConfigMaps()
    old, new = Hands(api), Hands(api)
    new.use(_row("new"))
    new.look()
    old.use(_row("old"))
    asyncio.run(old.memory.end())
    assert api.writes == 1


def test_too_much_of_it_is_cut_by_forgetting_the_oldest_of_all_alike():
    hands, chance = Hands(most_bytes=20_000), random.Random(1)
    hands.use(*(_row(f"ns-{n % 50}", n // 50, chance.getrandbits(62)) for n in range(5000)))
    hands.look()
    assert hands.api.kept is not None
    assert len(base64.b64decode(hands.api.kept["binaryData"][KEY])) <= 20_000
    kept = sorted(row.start_ms for row in hands.memory._rows.values())
    hours = len(kept) // 50
    assert 10 < hours < 100
    assert kept == sorted(_row("any", hour).start_ms for hour in range(hours) for _ in range(50))


def test_it_never_takes_more_than_a_configmap_may_have():
    assert MOST_BYTES * 4 // 3 + 10_000 < 1 << 20


@pytest.mark.parametrize("found", [b"?", b"", b"\x1f\x8b"], ids=["not packed", "empty", "cut off"])
def test_what_cannot_be_read_is_begun_anew(found: bytes):
    hands = Hands()
    packed = {KEY: base64.b64encode(found).decode()}
    hands.api.kept = {"metadata": {"name": "hodei-usage", "resourceVersion": ""}, "binaryData": packed}
    asyncio.run(hands.memory.begin())
    assert hands.memory._rows == {}
    hands.use(_row("a"))
    hands.look()
    assert hands.api.writes == 1


def test_without_the_right_to_read_it_pods_are_scheduled_all_the_same(caplog: pytest.LogCaptureFixture):
    hands = Hands()
    hands.api.trouble = ApiError(403, "Forbidden", "configmaps is forbidden")
    asyncio.run(hands.memory.begin())
    assert "rbac.yaml" in caplog.text


def test_a_write_that_failed_is_tried_again_a_minute_later():
    hands = Hands()
    hands.api.trouble = ApiError(503, "Unavailable", "later")
    hands.use(_row("a"))
    hands.look()
    hands.api.trouble = None
    hands.look()
    assert hands.api.writes == 0
    hands.at_s += EVERY_S
    hands.look()
    assert hands.api.writes == 1
