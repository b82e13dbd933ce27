"""Runs whose handing in was not answered: with a queue that does as it is told, and a loop whose time the test sets by short
windows. It proves nothing about real systems: see `tests/real/slurm`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import Desk, an_order
from hodei.backends.base import BackendContext
from hodei.backends.hpc import poll, submission
from hodei.backends.hpc.base import HpcBackend
from hodei.backends.hpc.nodes import ClusterNodes
from hodei.backends.hpc.ports import Cluster, Doubtful, Line, Queue, Seen, Submission
from hodei.backends.hpc.request import RequestBuilder
from hodei.backends.hpc.tracked_run import read_record
from hodei.model.backend import Capabilities
from hodei.model.effects import Forget, Stop
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused
from hodei.model.node import Node
from hodei.model.outcome import StopReason
from hodei.runtime.clock import SystemClock

ROOM = {"cpu": 64_000, "memory": 1 << 40}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(submission, "IN_DOUBT_S", 0.15)
    monkeypatch.setattr(submission, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(poll, "FORGOTTEN_AFTER_MS", 20)
    monkeypatch.setattr(poll, "LOST_AFTER_MS", 200)


class Fake(Queue):
    """`jobs`: what the system knows. `replies`: what becomes of the next submissions, None for a good answer. `deaf`: it
    answers nothing; `late`: accepted, and not yet to be seen."""

    by_commands, most_at_once = False, 1
    job_variable, node_variable, element = "JOB", "NODE", ""

    def __init__(self) -> None:
        self.jobs: dict[str, Seen] = {}
        self.replies: list[Exception | None] = []
        self.deaf = False
        self.answered = 0
        self.late: list[Seen] = []
        self.submitted: list[Submission] = []
        self.cancelled: list[str] = []

    def come_through(self) -> None:
        self.jobs |= {seen.job: seen for seen in self.late}
        self.late = []

    def _answers(self) -> None:
        if self.deaf:
            raise BackendError("no answer")

    async def cluster(self) -> Cluster:
        self._answers()
        return Cluster((Node("n1", "", capacity=ROOM),), (Line("main", ("n1",), largest=ROOM),))

    async def submit(self, wanted: Submission) -> str:
        self.submitted.append(wanted)
        number = str(len(self.submitted))
        error = self.replies.pop(0) if self.replies else None
        if not isinstance(error, (BackendError, BackendRefused)) or isinstance(error, Doubtful):
            self.late.append(Seen(number, wanted.mark, "waiting", "PENDING", submit_s=len(self.submitted)))
        if error is not None:
            raise error
        self.come_through()
        return number

    async def submit_many(self, wanted: Any, mark: str) -> list[str]:
        self.submitted += wanted
        number = str(len(self.submitted))
        numbers = [f"{number}_{place}" for place in range(len(wanted))]
        self.late += [Seen(one, f"{mark}#{n}", "waiting", "PENDING") for n, one in enumerate(numbers)]
        if self.replies and (error := self.replies.pop(0)) is not None:
            raise error
        self.come_through()
        return numbers

    async def look(self, jobs: Any) -> list[Seen]:
        self._answers()
        return [self.jobs[job] for job in jobs if job in self.jobs]

    async def ours(self, prefix: str) -> list[Seen]:
        self._answers()
        self.answered += 1
        return list(self.jobs.values())

    async def remembered(self, jobs: Any) -> list[Seen]:
        return []

    async def cancel(self, jobs: Any) -> None:
        self.cancelled += jobs

    async def signal(self, jobs: Any, signal: str) -> None: ...

    async def close(self) -> None: ...


def a_backend(home: Path, queue: Fake) -> HpcBackend:
    context = BackendContext("inst", 1, home / "backends", SystemClock())
    offers = ClusterNodes("hpc", "slurm", queue, "placed", ())
    wants = RequestBuilder(
        offers, lambda order, line: (), job_variable="JOB", node_variable="NODE", element="", system="Fake", beside=False
    )  # fmt: skip
    return HpcBackend(
        "hpc", context, queue, wants, offers, kind="slurm", system="Fake", output=home / "output", poll_s=0.01,
        capabilities=Capabilities(),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def a_desk(home: Path, queue: Fake) -> AsyncIterator[Desk]:
    backend = a_backend(home, queue)
    await backend.open()
    try:
        yield Desk(backend, 5)
    finally:
        await backend.close()


def order(job: int = 1) -> Any:
    made = an_order(job, "/bin/true")
    return structs.replace(made, run=structs.replace(made.run, node="hpc-n1", backend="hpc"))


def codes(answer: dict[str, Any]) -> dict[str, str]:
    return {run: error.code for run, error in answer.items()}


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


DOUBT = {"1.0.1": IN_DOUBT}


def test_a_run_stays_in_doubt_as_long_as_the_system_does_not_answer_and_is_adopted_when_it_turns_up(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies, queue.deaf = [Doubtful("timed out")], True
            for _ in range(20):
                assert codes(await desk.backend.start([order()])) == DOUBT
                await asyncio.sleep(0.02)  # longer than the window together: no answer is no answer
            queue.come_through()
            queue.deaf = False
            await until(lambda: "1.0.1" in desk.backend.tickets)
            assert await desk.backend.start([order()]) == {}
            assert len(queue.submitted) == 1

    asyncio.run(story())


def test_the_window_begins_with_the_first_complete_answer_and_not_with_the_doubt(tmp_path):
    """A system that hung longer than the window accepts what waited a moment after its first answer."""

    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies, queue.deaf = [Doubtful("timed out")], True
            assert codes(await desk.backend.start([order()])) == DOUBT
            await asyncio.sleep(0.3)  # longer than the window
            queue.deaf = False
            before = queue.answered
            await until(lambda: queue.answered >= before + 2)  # the first of them has been heard then
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.come_through()
            await until(lambda: "1.0.1" in desk.backend.tickets)
            assert len(queue.submitted) == 1

    asyncio.run(story())


def test_what_never_turns_up_is_handed_in_again_under_the_same_mark_with_another_claim(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out")]
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.late = []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            assert await desk.backend.start([order()]) == {}
            first, second = queue.submitted
            assert first.mark == second.mark
            assert first.claim != second.claim
            assert desk.backend.tickets["1.0.1"].entry.times == 2

    asyncio.run(story())


def test_a_doubt_outlives_the_server_and_is_waited_for_anew(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies, queue.deaf = [Doubtful("timed out")], True
            assert codes(await desk.backend.start([order()])) == DOUBT
        await asyncio.sleep(0.3)  # longer than the window: nobody asked meanwhile
        queue.deaf = False
        async with a_desk(tmp_path, queue) as desk:
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.come_through()
            await until(lambda: "1.0.1" in desk.backend.tickets)
            assert await desk.backend.start([order()]) == {}
            assert len(queue.submitted) == 1

    asyncio.run(story())


def test_right_before_a_run_is_handed_in_again_it_is_looked_for_once_more(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out")]
            assert codes(await desk.backend.start([order()])) == DOUBT
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            queue.deaf = True
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.deaf = False
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            queue.come_through()  # very late
            assert await desk.backend.start([order()]) == {}
            assert len(queue.submitted) == 1

    asyncio.run(story())


@pytest.mark.parametrize("error", [BackendError("busy"), BackendRefused("invalid partition")])
def test_a_run_once_in_doubt_is_said_not_to_begin_only_when_it_cannot_any_more(tmp_path, error):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out"), error]
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.late = []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            assert await desk.backend.start([order()]) == {"1.0.1": error}
            assert read_record(desk.backend.files.of("1.0.1")).claim == "sealed"

    asyncio.run(story())


@pytest.mark.parametrize("error", [BackendError("busy"), BackendRefused("invalid partition")])
def test_a_run_once_in_doubt_that_has_begun_after_all_is_not_said_not_to_begin(tmp_path, error):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out"), error]
            assert codes(await desk.backend.start([order()])) == DOUBT
            (late,), queue.late = queue.late, []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            began = Path(f"{desk.backend.files.of('1.0.1')}.status")

            async def while_it_begins(wanted: Submission) -> str:
                began.write_text(f"claim x\nbegan {late.job} n1 1.000 \n")
                return await Fake.submit(queue, wanted)

            queue.submit = while_it_begins
            assert codes(await desk.backend.start([order()])) == DOUBT
            await until(lambda: "1.0.1" in desk.backend.tickets)
            assert desk.backend.tickets["1.0.1"].job == late.job

    asyncio.run(story())


def test_a_run_in_doubt_is_not_refused_because_its_node_is_gone(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies, queue.deaf = [Doubtful("timed out")], True
            assert codes(await desk.backend.start([order()])) == DOUBT
            desk.backend.offers.cluster = Cluster((), ())
            assert codes(await desk.backend.start([order()])) == DOUBT

    asyncio.run(story())


def test_a_run_in_doubt_that_cannot_even_be_sent_again_is_out_of_reach_and_still_known(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out"), BackendError("refused", code=NOT_REACHED)]
            assert codes(await desk.backend.start([order()])) == DOUBT
            queue.late = []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            with pytest.raises(BackendError) as unreached:
                await desk.backend.start([order()])
            assert unreached.value.code == NOT_REACHED
            assert "1.0.1" in desk.backend._handing_in.doubts
            assert await desk.backend.start([order()]) == {}

    asyncio.run(story())


def test_what_takes_too_long_is_in_doubt_and_others_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "START_TIMEOUT_S", 0.05)

    async def story() -> None:
        queue = Fake()
        free = asyncio.Event()

        async def slowly(wanted: Submission) -> str:
            if wanted.mark.endswith(":1.0.1"):
                await free.wait()
            return await Fake.submit(queue, wanted)

        queue.submit = slowly
        async with a_desk(tmp_path, queue) as desk:
            assert codes(await desk.backend.start([order(1), order(2)])) == DOUBT
            free.set()
            await until(lambda: "1.0.1" in desk.backend.tickets)
            assert len(queue.submitted) == 2

    asyncio.run(story())


def test_an_array_in_doubt_is_adopted_whole_or_handed_in_again_member_by_member(tmp_path):
    async def story(accepted: bool) -> None:
        queue = Fake()
        queue.most_at_once = 10
        async with a_desk(tmp_path / str(accepted), queue) as desk:
            orders = [structs.replace(order(job), spec=order().spec) for job in (1, 2, 3)]
            queue.replies = [Doubtful("timed out")]
            assert codes(await desk.backend.start(orders)) == dict.fromkeys(("1.0.1", "2.0.1", "3.0.1"), IN_DOUBT)
            if accepted:
                queue.come_through()
                async with asyncio.timeout(5):
                    while await desk.backend.start(orders) != {}:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert [ticket.job for ticket in desk.backend.tickets.values()] == ["3_0", "3_1", "3_2"]
            else:
                queue.late = []
                await until(lambda: all(doubt.over for doubt in desk.backend._handing_in.doubts.values()))
                marks = [doubt.entry.mark for doubt in desk.backend._handing_in.doubts.values()]
            assert await desk.backend.start(orders) == {}
            assert len(queue.submitted) == (3 if accepted else 6)
            if not accepted:  # it may turn up late all the same
                assert [ticket.entry.also for ticket in desk.backend.tickets.values()] == [(mark,) for mark in marks]

    asyncio.run(story(True))
    asyncio.run(story(False))


def test_of_two_jobs_of_a_run_the_one_that_runs_it_counts_and_the_other_is_ended_with_it(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out")]
            assert codes(await desk.backend.start([order()])) == DOUBT
            (late,), queue.late = queue.late, []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            assert await desk.backend.start([order()]) == {}
            assert desk.backend.tickets["1.0.1"].job == "2"
            # The first one comes through all the same, and is the first to begin.
            queue.jobs["1"] = structs.replace(late, phase="running", state="RUNNING", start_s=1)
            status = Path(f"{desk.backend.files.of('1.0.1')}.status")
            status.write_text("claim x\nbegan 1 n1 1.000 \n")
            await desk.running("1.0.1")
            assert desk.backend.tickets["1.0.1"].job == "1"
            queue.jobs["1"] = structs.replace(queue.jobs["1"], phase="ended", state="FAILED", code=7)
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 7)
            await until(lambda: queue.cancelled == ["2"])
            await desk.backend.forget([Forget("1.0.1", "hpc")])
            assert status.exists(), "the system may start it again"

    asyncio.run(story())


def test_a_second_job_of_a_run_that_ends_at_once_is_not_the_end_of_the_run(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out")]
            await desk.backend.start([order()])
            (late,), queue.late = queue.late, []
            await until(lambda: desk.backend._handing_in.doubts["1.0.1"].over)
            assert await desk.backend.start([order()]) == {}
            Path(f"{desk.backend.files.of('1.0.1')}.status").write_text("claim x\nbegan 1 n1 1.000 \nexit 3 2.000\n")
            queue.jobs["1"] = structs.replace(late, phase="ended", state="FAILED", code=3)
            queue.jobs["2"] = structs.replace(queue.jobs["2"], phase="ended", state="FAILED", code=125)
            assert (await desk.end_of("1.0.1")).exit_code == 3

    asyncio.run(story())


def test_a_forgotten_job_that_is_handed_in_again_and_not_answered_is_not_lost_before_it_was_waited_for(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            assert await desk.backend.start([order()]) == {}
            queue.jobs, queue.replies = {}, [Doubtful("timed out")]
            await until(lambda: len(queue.submitted) == 2)
            queue.deaf = True
            await asyncio.sleep(0.4)  # longer than a missing job is waited for
            queue.come_through()
            queue.deaf = False
            await until(lambda: desk.backend.tickets["1.0.1"].job == "2")
            assert desk.backend.tickets["1.0.1"].end is None

    asyncio.run(story())


def test_a_job_that_is_given_up_before_it_began_cannot_begin_any_more(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            assert await desk.backend.start([order()]) == {}
            queue.jobs, queue.replies = {}, [BackendRefused("no more")]
            end = await desk.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("lost", "lost")
            assert read_record(desk.backend.files.of("1.0.1")).claim == "sealed"

    asyncio.run(story())


def test_a_stop_for_a_run_in_doubt_reaches_it_when_it_turns_up(tmp_path):
    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            queue.replies = [Doubtful("timed out")]
            assert codes(await desk.backend.start([order()])) == DOUBT
            await desk.backend.stop([Stop("1.0.1", "hpc", 0, StopReason("cancelled", "enough"))])
            queue.come_through()
            await until(lambda: queue.cancelled[:1] == ["1"])

    asyncio.run(story())


def test_jobs_that_the_journal_does_not_know_are_adopted(tmp_path):
    """The power failed before the last lines were on disk."""

    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            assert await desk.backend.start([order(1), order(2)]) == {}
        journal = tmp_path / "backends/hpc/journal"
        journal.write_bytes(b"".join(line for line in journal.read_bytes().splitlines(True) if b'"2.0.1"' not in line))
        async with a_desk(tmp_path, queue) as desk:
            assert sorted(desk.backend.tickets) == ["1.0.1", "2.0.1"]
            assert await desk.backend.start([order(2)]) == {}
            assert len(queue.submitted) == 2

    asyncio.run(story())


def test_a_job_that_the_system_starts_a_second_time_is_not_the_end_of_the_first(tmp_path):
    """It crashed, and had written down that the job waits: the second script finds the record, and ends with 125."""

    async def story(ends: bool) -> None:
        queue = Fake()
        async with a_desk(tmp_path / str(ends), queue) as desk:
            assert await desk.backend.start([order()]) == {}
            status = Path(f"{desk.backend.files.of('1.0.1')}.status")
            status.write_text("claim x\nbegan 1 n1 1.000 \n")
            queue.jobs["1"] = structs.replace(queue.jobs["1"], phase="ended", state="FAILED", code=125)
            await desk.backend._looking.round()
            assert desk.backend.tickets["1.0.1"].end is None
            if ends:
                status.write_text(status.read_text() + "exit 0 2.000\n")
            end = await desk.end_of("1.0.1")
            assert end.state == ("succeeded" if ends else "lost")

    asyncio.run(story(True))
    asyncio.run(story(False))


def test_a_job_that_is_said_to_be_complete_and_never_began_is_lost_not_done(tmp_path):
    """A controller that was killed may call a job complete that no node ever saw."""

    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            assert await desk.backend.start([order()]) == {}
            queue.jobs["1"] = structs.replace(queue.jobs["1"], phase="ended", state="COMPLETED", code=0)
            await desk.backend._looking.round()
            assert desk.backend.tickets["1.0.1"].end is None, "a shared file system may show its record late"
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("lost", None)
            assert read_record(desk.backend.files.of("1.0.1")).claim == "sealed", "it cannot begin any more"

    asyncio.run(story())


@pytest.mark.parametrize(("exit_line", "state"), [("exit 0 2.000\n", "succeeded"), ("", "failed")])
def test_a_job_that_is_cancelled_after_its_command_has_ended_well_is_done(tmp_path, exit_line, state):
    """A controller that was killed may cancel jobs that it does not know to be over."""

    async def story() -> None:
        queue = Fake()
        async with a_desk(tmp_path, queue) as desk:
            assert await desk.backend.start([order()]) == {}
            status = Path(f"{desk.backend.files.of('1.0.1')}.status")
            status.write_text(f"claim x\nbegan 1 n1 1.000 \n{exit_line}")
            queue.jobs["1"] = structs.replace(
                queue.jobs["1"], phase="ended", state="CANCELLED", code=143, reason_code="killed", reason="cancelled"
            )
            assert (await desk.end_of("1.0.1")).state == state

    asyncio.run(story())
