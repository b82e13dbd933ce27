"""Candidates for a lease in an API that is a dictionary, with a simulated clock.

It does not prove that a real API server guards versions (tests/real/kubernetes does), nor how long real requests take.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest

from hodei.kube.api.client import ApiError
from hodei.kube.api.lease import Leadership


class FakeLeases:
    """A lease, a shared clock, and the connection of each candidate."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.now = 0.0
        self.sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self.writes: list[str] = []

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, len(self.sleepers), woken))
        await woken

    async def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Advance the clock from sleeper to sleeper."""
        deadline = self.now + timeout_s
        while True:
            for _ in range(30):
                await asyncio.sleep(0)
            if condition():
                return
            self.sleepers = [sleeper for sleeper in self.sleepers if not sleeper[2].done()]
            assert self.sleepers, "no task sleeps"
            at, _, woken = min(self.sleepers, key=lambda sleeper: sleeper[:2])
            assert at <= deadline, f"not within {timeout_s} s"
            self.now = max(self.now, at)
            woken.set_result(None)

    async def advance(self, seconds: float) -> None:
        ends = self.now + seconds
        alarm = asyncio.create_task(self.sleep(seconds))
        await self.until(lambda: self.now >= ends and alarm.done(), seconds + 1)


class FakeApi:
    def __init__(self, cluster: FakeLeases) -> None:
        self.cluster = cluster
        self.failing: ApiError | None = None

    async def request(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 30) -> bytes:
        if self.failing is not None:
            raise self.failing
        cluster = self.cluster
        sent = json.loads(body or b"null")
        if method == "POST":
            if cluster.lease is not None:
                raise ApiError(409, "AlreadyExists", "it exists")
        elif cluster.lease is None:
            raise ApiError(404, "NotFound", "no such lease")
        if method == "PUT" and sent["metadata"]["resourceVersion"] != cluster.lease["metadata"]["resourceVersion"]:  # type: ignore[index]
            raise ApiError(409, "Conflict", "the object has been modified")
        if method != "GET":
            cluster.version += 1
            sent["metadata"] |= {"uid": "u1", "resourceVersion": str(cluster.version)}
            cluster.lease = sent
            cluster.writes.append(sent["spec"]["holderIdentity"])
        return json.dumps(cluster.lease).encode()


def candidate(
    cluster: FakeLeases, name: str, *, clock_off_s: float = 0.0, **options: Any
) -> tuple[Leadership, FakeApi]:
    api = FakeApi(cluster)
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    leadership = Leadership(
        api,  # type: ignore[arg-type]
        "kube-system", "hodei", name,
        monotonic=lambda: cluster.now + clock_off_s, sleep=cluster.sleep, random_fraction=lambda: 0.5,
        now=lambda: start + datetime.timedelta(seconds=cluster.now + clock_off_s), **options,
    )  # fmt: skip
    return leadership, api


def run_scenario(scenario: Callable[[FakeLeases, list[asyncio.Task[None]]], Any]) -> None:
    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.timeout(20):
            await scenario(FakeLeases(), tasks)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result

    asyncio.run(main())


def test_one_of_two_leads_and_keeps_the_lead():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        two, _ = candidate(cluster, "two", clock_off_s=1_000_000.0)
        tasks += [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        await cluster.until(lambda: one.leads)
        await cluster.advance(100)
        assert one.leads
        assert not two.acquired.is_set()
        assert two.holder == "one"
        assert set(cluster.writes) == {"one"}

    run_scenario(scenario)


def test_the_lease_reads_as_kubernetes_writes_it():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        assert cluster.lease is not None
        assert cluster.lease["spec"] == {
            "holderIdentity": "one", "leaseDurationSeconds": 15, "leaseTransitions": 0,
            "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.000000Z",
        }  # fmt: skip

    run_scenario(scenario)


def test_a_released_lease_is_taken_over_at_once():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        two, _ = candidate(cluster, "two")
        tasks += [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        await cluster.until(lambda: one.leads)
        await cluster.advance(10)
        began = cluster.now
        await one.release()
        assert one.lost.is_set()
        await cluster.until(lambda: two.leads)
        assert cluster.now - began < 3
        assert cluster.lease is not None
        assert cluster.lease["spec"]["leaseTransitions"] == 1

    run_scenario(scenario)


def test_a_dead_leader_is_replaced_when_its_lease_has_expired():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        two, _ = candidate(cluster, "two", clock_off_s=-5000.0)
        tasks += [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        await cluster.until(lambda: one.leads)
        await cluster.advance(20)
        tasks[0].cancel()
        died = cluster.now
        await cluster.until(lambda: two.leads)
        assert 13 <= cluster.now - died <= 20

    run_scenario(scenario)


def test_a_leader_that_cannot_renew_stops_before_another_starts():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        stopped: list[float] = []
        one, api = candidate(cluster, "one", on_lost=lambda: stopped.append(cluster.now))
        two, _ = candidate(cluster, "two")
        tasks += [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        await cluster.until(lambda: one.leads)
        await cluster.advance(20)
        api.failing = ApiError(0, "Unreached", "cut off")
        cut = cluster.now
        await cluster.until(lambda: two.leads)
        assert one.lost.is_set()
        assert len(stopped) == 1
        assert 8 <= stopped[0] - cut <= 12.5
        assert stopped[0] < cluster.now
        assert "cut off" in one.problem

    run_scenario(scenario)


def test_a_short_outage_does_not_cost_the_lead():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, api = candidate(cluster, "one")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        api.failing = ApiError(503, "ServiceUnavailable", "later")
        await cluster.advance(7)
        api.failing = None
        await cluster.advance(30)
        assert one.leads

    run_scenario(scenario)


@pytest.mark.parametrize("new_holder", ["another", ""])
def test_a_leader_that_lost_its_lease_to_another_stops_at_once(new_holder: str):
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        assert cluster.lease is not None
        cluster.lease["spec"]["holderIdentity"] = new_holder
        cluster.lease["metadata"]["resourceVersion"] = "999"
        await cluster.until(one.lost.is_set, 3)

    run_scenario(scenario)


def test_a_deleted_lease_is_created_again_by_its_leader_only():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        two, _ = candidate(cluster, "two")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        tasks.append(asyncio.create_task(two.run()))
        for _ in range(5):
            await cluster.advance(3)
            cluster.lease = None
            await cluster.until(lambda: cluster.lease is not None, 5)
            assert cluster.lease is not None
            assert cluster.lease["spec"]["holderIdentity"] == "one"
        assert one.leads
        assert not two.acquired.is_set()

    run_scenario(scenario)


def test_a_leader_stops_if_another_created_its_deleted_lease():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        cluster.lease = None
        other, _ = candidate(cluster, "other")  # it has seen no lease at all
        tasks.append(asyncio.create_task(other.run()))
        await cluster.until(lambda: other.leads, 1)
        await cluster.until(one.lost.is_set, 3)

    run_scenario(scenario)


def test_a_deleted_lease_of_a_dead_leader_is_created_by_the_next_after_its_duration():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, api = candidate(cluster, "one")
        two, _ = candidate(cluster, "two")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        tasks.append(asyncio.create_task(two.run()))
        await cluster.advance(3)
        api.failing = ApiError(0, "Unreached", "unreachable")
        cluster.lease, began = None, cluster.now
        await cluster.until(lambda: two.leads, 30)
        assert cluster.now - began > 10  # not before the other has stopped
        assert one.lost.is_set()

    run_scenario(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        {"metadata": {}},
        {
            "metadata": {"uid": "u", "resourceVersion": "9"},
            "spec": {"leaseDurationSeconds": "soon", "holderIdentity": "x"},
        },
        [],
    ],
)
def test_an_unreadable_lease_does_not_end_the_election(garbage: Any):
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        cluster.lease = garbage
        tasks.append(asyncio.create_task(one.run()))
        await cluster.advance(5)
        assert not one.leads
        assert one.problem
        cluster.lease = None
        await cluster.until(lambda: one.leads, 60)

    run_scenario(scenario)


def test_a_foreign_write_of_the_lease_does_not_cost_the_lead():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        tasks.append(asyncio.create_task(one.run()))
        await cluster.until(lambda: one.leads)
        assert cluster.lease is not None
        cluster.lease["metadata"] |= {"resourceVersion": "999", "labels": {"touched": "yes"}}
        await cluster.advance(10)
        assert one.leads
        assert cluster.lease["metadata"]["labels"] == {"touched": "yes"}

    run_scenario(scenario)


def test_a_candidate_that_releases_before_leading_writes_nothing():
    async def scenario(cluster: FakeLeases, tasks: list[asyncio.Task[None]]) -> None:
        one, _ = candidate(cluster, "one")
        two, _ = candidate(cluster, "two")
        tasks += [asyncio.create_task(one.run()), asyncio.create_task(two.run())]
        await cluster.until(lambda: one.leads)
        await two.release()
        await cluster.until(tasks[1].done)
        assert set(cluster.writes) == {"one"}
        assert not two.lost.is_set()

    run_scenario(scenario)
