"""Submissions without an answer, with a fake batch system and short time windows. `tests/real/slurm` has real systems."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.backends.base import BackendContext
from hodei.backends.hpc import poll, submission
from hodei.backends.hpc.backend import HpcBackend
from hodei.backends.hpc.nodes import ClusterSettings
from hodei.backends.hpc.ports import BatchSystem, Cluster, JobStatus, OutcomeUnknown, Partition, Submission
from hodei.backends.hpc.tracked_run import read_record
from hodei.model.backend import Capabilities
from hodei.model.effects import Forget, Stop
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused
from hodei.model.node import Node
from hodei.model.outcome import StopReason
from hodei.runtime.clock import SystemClock

CAPACITY = {"cpu": 64_000, "memory": 1 << 40}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(submission, "CONFIRM_WINDOW_S", 0.15)
    monkeypatch.setattr(submission, "CONFIRM_EVERY_S", 0.01)
    monkeypatch.setattr(poll, "RESUBMIT_AFTER_MS", 20)
    monkeypatch.setattr(poll, "LOST_AFTER_MS", 200)


class FakeBatchSystem(BatchSystem):
    """`jobs`: the visible jobs. `replies`: the results of the next submissions, None for success. `hung`: no call gets an
    answer. `late`: accepted and not visible yet."""

    uses_commands, max_array_size = False, 1
    job_variable, node_variable, element_id = "JOB", "NODE", ""

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.replies: list[Exception | None] = []
        self.hung = False
        self.answered = 0
        self.late: list[JobStatus] = []
        self.submitted: list[Submission] = []
        self.cancelled: list[str] = []

    def show_late(self) -> None:
        self.jobs |= {status.job: status for status in self.late}
        self.late = []

    def _check_hung(self) -> None:
        if self.hung:
            raise BackendError("no answer")

    async def cluster(self) -> Cluster:
        self._check_hung()
        return Cluster((Node("n1", "", capacity=CAPACITY),), (Partition("main", ("n1",), largest=CAPACITY),))

    async def submit(self, submission: Submission) -> str:
        self.submitted.append(submission)
        number = str(len(self.submitted))
        error = self.replies.pop(0) if self.replies else None
        if not isinstance(error, (BackendError, BackendRefused)) or isinstance(error, OutcomeUnknown):
            self.late.append(JobStatus(number, submission.mark, "pending", "PENDING", submit_s=len(self.submitted)))
        if error is not None:
            raise error
        self.show_late()
        return number

    async def submit_array(self, submission: Any, mark: str) -> list[str]:
        self.submitted += submission
        number = str(len(self.submitted))
        numbers = [f"{number}_{index}" for index in range(len(submission))]
        self.late += [JobStatus(job, f"{mark}#{n}", "pending", "PENDING") for n, job in enumerate(numbers)]
        if self.replies and (error := self.replies.pop(0)) is not None:
            raise error
        self.show_late()
        return numbers

    async def status(self, jobs: Any) -> list[JobStatus]:
        self._check_hung()
        return [self.jobs[job] for job in jobs if job in self.jobs]

    async def marked(self, prefix: str) -> list[JobStatus]:
        self._check_hung()
        self.answered += 1
        return list(self.jobs.values())

    async def history(self, jobs: Any) -> list[JobStatus]:
        return []

    async def cancel(self, jobs: Any) -> None:
        self.cancelled += jobs

    async def signal(self, jobs: Any, signal: str) -> None: ...

    async def close(self) -> None: ...


def a_backend(home: Path, system: FakeBatchSystem) -> HpcBackend:
    context = BackendContext("inst", 1, home / "backends", SystemClock())
    settings = ClusterSettings(output=str(home / "output"), poll="10ms")
    no_options = lambda order, partition: ()  # noqa: E731
    return HpcBackend("hpc", "slurm", "Fake", settings, context, system, (), no_options, Capabilities())


@contextlib.asynccontextmanager
async def open_backend(home: Path, system: FakeBatchSystem) -> AsyncIterator[ReconnectingRecorder]:
    backend = a_backend(home, system)
    await backend.open()
    try:
        yield ReconnectingRecorder(backend, 5)
    finally:
        await backend.close()


def order(job: int = 1) -> Any:
    start = an_order(job, "/bin/true")
    return structs.replace(start, run=structs.replace(start.run, node="hpc-n1", backend="hpc"))


def codes(answer: dict[str, Any]) -> dict[str, str]:
    return {run: error.code for run, error in answer.items()}


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


UNKNOWN = {"1.0.1": IN_DOUBT}


def test_a_submission_stays_unconfirmed_without_answers_and_is_adopted_when_it_appears(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies, system.hung = [OutcomeUnknown("timed out")], True
            for _ in range(20):
                assert codes(await recorder.backend.start([order()])) == UNKNOWN
                await asyncio.sleep(0.02)  # longer than the window in total: a missing answer proves nothing
            system.show_late()
            system.hung = False
            await until(lambda: "1.0.1" in recorder.backend.tracked)
            assert await recorder.backend.start([order()]) == {}
            assert len(system.submitted) == 1

    asyncio.run(scenario())


def test_the_confirmation_window_starts_with_the_first_complete_job_list(tmp_path):
    """A system that hung longer than the window may accept a queued request shortly after its first answer."""

    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies, system.hung = [OutcomeUnknown("timed out")], True
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            await asyncio.sleep(0.3)  # longer than the window
            system.hung = False
            before = system.answered
            await until(lambda: system.answered >= before + 2)  # the first one is processed by then
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.show_late()
            await until(lambda: "1.0.1" in recorder.backend.tracked)
            assert len(system.submitted) == 1

    asyncio.run(scenario())


def test_a_rejected_run_is_submitted_again_with_the_same_mark_and_another_claim(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out")]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.late = []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            assert await recorder.backend.start([order()]) == {}
            first, second = system.submitted
            assert first.mark == second.mark
            assert first.claim != second.claim
            assert recorder.backend.tracked["1.0.1"].entry.submissions == 2

    asyncio.run(scenario())


def test_an_unconfirmed_submission_survives_a_restart_of_the_server(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies, system.hung = [OutcomeUnknown("timed out")], True
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
        await asyncio.sleep(0.3)  # longer than the window, without a request in between
        system.hung = False
        async with open_backend(tmp_path, system) as recorder:
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.show_late()
            await until(lambda: "1.0.1" in recorder.backend.tracked)
            assert await recorder.backend.start([order()]) == {}
            assert len(system.submitted) == 1

    asyncio.run(scenario())


def test_a_rejected_run_is_searched_for_once_more_before_it_is_submitted_again(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out")]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            system.hung = True
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.hung = False
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            system.show_late()  # very late
            assert await recorder.backend.start([order()]) == {}
            assert len(system.submitted) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [BackendError("busy"), BackendRefused("invalid partition")])
def test_an_error_for_an_unconfirmed_run_is_returned_only_once_it_cannot_start(tmp_path, error):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out"), error]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.late = []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            assert await recorder.backend.start([order()]) == {"1.0.1": error}
            assert read_record(recorder.backend.files.of("1.0.1")).claim == "sealed"

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [BackendError("busy"), BackendRefused("invalid partition")])
def test_no_error_is_returned_for_an_unconfirmed_run_that_has_started(tmp_path, error):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out"), error]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            (late,), system.late = system.late, []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            record = Path(f"{recorder.backend.files.of('1.0.1')}.status")

            async def start_and_submit(submission: Submission) -> str:
                record.write_text(f"claim x\nstarted {late.job} n1 1.000 \n")
                return await FakeBatchSystem.submit(system, submission)

            system.submit = start_and_submit
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            await until(lambda: "1.0.1" in recorder.backend.tracked)
            assert recorder.backend.tracked["1.0.1"].job == late.job

    asyncio.run(scenario())


def test_an_unconfirmed_run_is_not_refused_when_its_node_disappears(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies, system.hung = [OutcomeUnknown("timed out")], True
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            recorder.backend.cluster_nodes.cluster = Cluster((), ())
            assert codes(await recorder.backend.start([order()])) == UNKNOWN

    asyncio.run(scenario())


def test_an_unconfirmed_run_that_cannot_be_sent_again_is_not_reached_and_still_known(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out"), BackendError("refused", code=NOT_REACHED)]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            system.late = []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            with pytest.raises(BackendError) as unreached:
                await recorder.backend.start([order()])
            assert unreached.value.code == NOT_REACHED
            assert "1.0.1" in recorder.backend.submissions.unconfirmed
            assert await recorder.backend.start([order()]) == {}

    asyncio.run(scenario())


def test_a_slow_submission_is_unconfirmed_and_does_not_delay_others(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "START_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        system = FakeBatchSystem()
        release = asyncio.Event()

        async def submit_slowly(submission: Submission) -> str:
            if submission.mark.endswith(":1.0.1"):
                await release.wait()
            return await FakeBatchSystem.submit(system, submission)

        system.submit = submit_slowly
        async with open_backend(tmp_path, system) as recorder:
            assert codes(await recorder.backend.start([order(1), order(2)])) == UNKNOWN
            release.set()
            await until(lambda: "1.0.1" in recorder.backend.tracked)
            assert len(system.submitted) == 2

    asyncio.run(scenario())


def test_an_unconfirmed_array_is_adopted_as_a_whole_or_submitted_again_element_by_element(tmp_path):
    async def scenario(accepted: bool) -> None:
        system = FakeBatchSystem()
        system.max_array_size = 10
        async with open_backend(tmp_path / str(accepted), system) as recorder:
            orders = [structs.replace(order(job), spec=order().spec) for job in (1, 2, 3)]
            system.replies = [OutcomeUnknown("timed out")]
            assert codes(await recorder.backend.start(orders)) == dict.fromkeys(("1.0.1", "2.0.1", "3.0.1"), IN_DOUBT)
            if accepted:
                system.show_late()
                async with asyncio.timeout(5):
                    while await recorder.backend.start(orders) != {}:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert [tracked.job for tracked in recorder.backend.tracked.values()] == ["3_0", "3_1", "3_2"]
            else:
                system.late = []
                await until(lambda: all(each.rejected for each in recorder.backend.submissions.unconfirmed.values()))
                marks = [each.entry.mark for each in recorder.backend.submissions.unconfirmed.values()]
            assert await recorder.backend.start(orders) == {}
            assert len(system.submitted) == (3 if accepted else 6)
            if not accepted:  # they may still appear
                assert [tracked.entry.other_marks for tracked in recorder.backend.tracked.values()] == [
                    (mark,) for mark in marks
                ]

    asyncio.run(scenario(True))
    asyncio.run(scenario(False))


def test_of_two_jobs_of_a_run_the_one_that_runs_it_counts_and_the_other_is_cancelled(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out")]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            (late,), system.late = system.late, []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            assert await recorder.backend.start([order()]) == {}
            assert recorder.backend.tracked["1.0.1"].job == "2"
            # The first one is accepted after all, and starts first.
            system.jobs["1"] = structs.replace(late, phase="running", state="RUNNING", start_s=1)
            status = Path(f"{recorder.backend.files.of('1.0.1')}.status")
            status.write_text("claim x\nstarted 1 n1 1.000 \n")
            await recorder.running("1.0.1")
            assert recorder.backend.tracked["1.0.1"].job == "1"
            system.jobs["1"] = structs.replace(system.jobs["1"], phase="ended", state="FAILED", exit_code=7)
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("failed", 7)
            await until(lambda: system.cancelled == ["2"])
            await recorder.backend.forget([Forget("1.0.1", "hpc")])
            assert status.exists(), "the system may start it again"

    asyncio.run(scenario())


def test_a_second_job_of_a_run_that_ends_at_once_is_not_the_end_of_the_run(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out")]
            await recorder.backend.start([order()])
            (late,), system.late = system.late, []
            await until(lambda: recorder.backend.submissions.unconfirmed["1.0.1"].rejected)
            assert await recorder.backend.start([order()]) == {}
            Path(f"{recorder.backend.files.of('1.0.1')}.status").write_text(
                "claim x\nstarted 1 n1 1.000 \nexit 3 2.000\n"
            )
            system.jobs["1"] = structs.replace(late, phase="ended", state="FAILED", exit_code=3)
            system.jobs["2"] = structs.replace(system.jobs["2"], phase="ended", state="FAILED", exit_code=125)
            assert (await recorder.end_of("1.0.1")).exit_code == 3

    asyncio.run(scenario())


def test_a_resubmitted_job_without_an_answer_is_searched_for_before_it_is_lost(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            assert await recorder.backend.start([order()]) == {}
            system.jobs, system.replies = {}, [OutcomeUnknown("timed out")]
            await until(lambda: len(system.submitted) == 2)
            system.hung = True
            await asyncio.sleep(0.4)  # longer than a missing job is waited for
            system.show_late()
            system.hung = False
            await until(lambda: recorder.backend.tracked["1.0.1"].job == "2")
            assert recorder.backend.tracked["1.0.1"].final is None

    asyncio.run(scenario())


def test_a_job_given_up_before_its_start_cannot_start_any_more(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            assert await recorder.backend.start([order()]) == {}
            system.jobs, system.replies = {}, [BackendRefused("invalid")]
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.reason_code) == ("lost", "lost")
            assert read_record(recorder.backend.files.of("1.0.1")).claim == "sealed"

    asyncio.run(scenario())


def test_a_stop_of_an_unconfirmed_run_is_sent_when_it_appears(tmp_path):
    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            system.replies = [OutcomeUnknown("timed out")]
            assert codes(await recorder.backend.start([order()])) == UNKNOWN
            await recorder.backend.stop([Stop("1.0.1", "hpc", 0, StopReason("cancelled", "by user"))])
            system.show_late()
            await until(lambda: system.cancelled[:1] == ["1"])

    asyncio.run(scenario())


def test_jobs_missing_from_the_journal_are_adopted(tmp_path):
    """As after a power failure before the last lines were synced."""

    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            assert await recorder.backend.start([order(1), order(2)]) == {}
        journal = tmp_path / "backends/hpc/journal"
        journal.write_bytes(b"".join(line for line in journal.read_bytes().splitlines(True) if b'"2.0.1"' not in line))
        async with open_backend(tmp_path, system) as recorder:
            assert sorted(recorder.backend.tracked) == ["1.0.1", "2.0.1"]
            assert await recorder.backend.start([order(2)]) == {}
            assert len(system.submitted) == 2

    asyncio.run(scenario())


def test_a_second_start_of_a_job_does_not_end_the_run(tmp_path):
    """It crashed with the job recorded as pending: the second script finds the record and exits with 125."""

    async def scenario(ends: bool) -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path / str(ends), system) as recorder:
            assert await recorder.backend.start([order()]) == {}
            status = Path(f"{recorder.backend.files.of('1.0.1')}.status")
            status.write_text("claim x\nstarted 1 n1 1.000 \n")
            system.jobs["1"] = structs.replace(system.jobs["1"], phase="ended", state="FAILED", exit_code=125)
            await recorder.backend.poll.poll()
            assert recorder.backend.tracked["1.0.1"].final is None
            if ends:
                status.write_text(status.read_text() + "exit 0 2.000\n")
            end = await recorder.end_of("1.0.1")
            assert end.state == ("succeeded" if ends else "lost")

    asyncio.run(scenario(True))
    asyncio.run(scenario(False))


def test_a_job_reported_as_completed_that_never_started_is_lost(tmp_path):
    """A controller that was killed may report a job as completed that no node has seen."""

    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            assert await recorder.backend.start([order()]) == {}
            system.jobs["1"] = structs.replace(system.jobs["1"], phase="ended", state="COMPLETED", exit_code=0)
            await recorder.backend.poll.poll()
            assert recorder.backend.tracked["1.0.1"].final is None, "a shared file system may show its record late"
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == ("lost", None)
            assert read_record(recorder.backend.files.of("1.0.1")).claim == "sealed", "it cannot start any more"

    asyncio.run(scenario())


@pytest.mark.parametrize(("exit_line", "state"), [("exit 0 2.000\n", "succeeded"), ("", "failed")])
def test_a_job_cancelled_after_its_command_succeeded_has_succeeded(tmp_path, exit_line, state):
    """A controller that was killed may cancel jobs that it does not know to have ended."""

    async def scenario() -> None:
        system = FakeBatchSystem()
        async with open_backend(tmp_path, system) as recorder:
            assert await recorder.backend.start([order()]) == {}
            status = Path(f"{recorder.backend.files.of('1.0.1')}.status")
            status.write_text(f"claim x\nstarted 1 n1 1.000 \n{exit_line}")
            system.jobs["1"] = structs.replace(
                system.jobs["1"],
                phase="ended",
                state="CANCELLED",
                exit_code=143,
                reason_code="killed",
                reason="cancelled",
            )
            assert (await recorder.end_of("1.0.1")).state == state

    asyncio.run(scenario())
