"""Who is told what, and how often: counted in reports that would be sent. That they arrive is shown against a real cluster."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.messages import Told
from hodei.kube.scheduler.status_reporter import PAUSE_MS, StatusReporter
from unit.kube.town import Town


class Crier:
    """A town with a Telling whose reports are kept and not sent."""

    def __init__(self) -> None:
        self.town = Town()
        harness = self.town.harness
        self.telling = StatusReporter(harness.controller, harness.pods, cast("Any", None), harness.explainer)

    def step(self) -> int:
        """How many reports one step gives cause for."""
        return len(list(self.telling.after(self.town.step(), self.town.now_ms)))

    def late(self, after_ms: int) -> int:
        self.town.now_ms += after_ms
        return len(list(self.telling.late(self.town.now_ms)))

    def told(self, name: str) -> str:
        return self.town.harness.pods.entries[f"uid-{name}"].told or ""


def a_full_town() -> Crier:
    crier = Crier()
    crier.town.node("a", cpu="4")
    crier.town.pod("first", cpu="4", nodeName="a")
    crier.step()
    return crier


def test_all_who_sleep_behind_one_refusal_are_told() -> None:
    crier = a_full_town()
    for name in ("x", "y", "z"):
        crier.town.pod(name, cpu="2")
    assert crier.step() == 3
    assert crier.told("z") == crier.told("x") != ""


def test_a_pod_that_comes_later_to_sleep_with_the_others_is_told_too() -> None:
    crier = a_full_town()
    crier.town.pod("x", cpu="2")
    crier.step()
    crier.town.pod("y", cpu="2")
    assert crier.step() == 1
    assert crier.told("y") == crier.told("x")


def test_new_numbers_are_told_after_a_pause_and_only_the_newest() -> None:
    crier = a_full_town()
    crier.town.pod("x", cpu="8")
    crier.step()
    first = crier.told("x")
    for name in ("b", "c", "d"):
        crier.town.node(name, cpu="4")
        crier.town.now_ms += 100
        assert crier.step() == 0
    assert crier.told("x") == first
    assert crier.late(PAUSE_MS) == 1
    assert "0/4 nodes" in crier.told("x")
    assert crier.late(PAUSE_MS) == 0


def test_another_reason_is_told_at_once() -> None:
    crier = a_full_town()
    said = {"pod-group": "ring", "pod-group-size": "2"}
    crier.town.pod("x", cpu="2", annotations=said)
    assert crier.step() == 1
    crier.town.pod("y", cpu="2", annotations=said)
    assert crier.step() == 2
    assert crier.told("x") == crier.told("y")


def test_who_has_found_a_node_meanwhile_is_left_in_peace() -> None:
    crier = a_full_town()
    crier.town.pod("x", cpu="2")
    crier.step()
    crier.town.node("b", cpu="1")
    crier.step()
    crier.town.node("c", cpu="4")
    crier.step()
    assert crier.town.where("x") == "c"
    assert crier.late(PAUSE_MS) == 0


# ------------------------------------------------------------------------------------------------ in order


class SlowActor:
    """Each condition takes until the test lets it through."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: list[str] = []
        self.doors: list[asyncio.Event] = []

    async def set_unscheduled(self, pod: Pod, reason: str, message: str, nominated: str | None = None) -> None:
        said = f"{message}@{nominated}" if nominated is not None else message
        self.begun.append(said)
        self.doors.append(asyncio.Event())
        await self.doors[-1].wait()
        self.done.append(said)

    async def say_failed(self, pod: Pod, text: str) -> None:
        return


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def slow_town() -> tuple[Crier, SlowActor]:
    crier, actor = a_full_town(), SlowActor()
    crier.town.pod("x", cpu="2")
    crier.step()
    harness = crier.town.harness
    crier.telling = StatusReporter(harness.controller, harness.pods, cast("Any", actor), harness.explainer)
    return crier, actor


def test_two_conditions_of_a_pod_never_overtake_each_other_and_the_newest_wins():
    async def story() -> None:
        crier, actor = slow_town()
        id = crier.town.job("x")
        entry = crier.town.harness.pods.entries["uid-x"]
        tasks = []
        for at, text in enumerate(("first", "second", "third")):
            entry.told_ms = 0
            for work in crier.telling.tell(id, Told(f"Reason{at}", text)):
                tasks.append(asyncio.create_task(work()))  # type: ignore[arg-type]
            await turn()
        nominating = crier.telling._queued(entry, None, "a")
        tasks.append(asyncio.create_task(nominating()))
        await turn()
        assert actor.begun == ["first"]
        actor.doors[0].set()
        await turn()
        assert actor.begun == ["first", "third@a"]  # what was meanwhile is told in one
        actor.doors[1].set()
        await asyncio.gather(*tasks)
        assert actor.done == ["first", "third@a"]

    asyncio.run(story())


def test_no_condition_arrives_after_the_binding():
    async def story() -> None:
        crier, actor = slow_town()
        id, entry = crier.town.job("x"), crier.town.harness.pods.entries["uid-x"]
        telling = [asyncio.create_task(work()) for work in crier.telling.tell(id, Told("One", "first"))]  # type: ignore[arg-type]
        await turn()
        assert actor.begun == ["first"]
        late = [*crier.telling.tell(id, Told("Two", "second"))]
        entry.stage, entry.node = "placed", "b"  # it has found a node
        binding = asyncio.create_task(crier.telling.quiet(entry.uid))
        telling += [asyncio.create_task(work()) for work in late]  # type: ignore[arg-type]
        await turn()
        assert not binding.done()
        actor.doors[0].set()
        await binding
        await asyncio.gather(*telling)
        assert actor.begun == ["first"]

    asyncio.run(story())
