"""The host agent hangs (SIGSTOP) or is dead while runs end: it is reported, nothing runs twice or is lost, times are right."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from agent_host import ReconnectingRecorder, agent_pid, an_order, kill_agent, local_agent
from agent_host import until as eventually
from hodei.model.facts import RunObserved
from real.installation import Installation, until

pytestmark = pytest.mark.real
ROUNDS = int(os.environ.get("HODEI_ROUNDS") or 1)
# By then it must have been told; it is after eight seconds, but for a busy machine.
TOLD_S = 18.0
# Files are stamped by a coarser clock than `date` reads.
STAMP_MS = 20
LATE_MS = 700


def ran(proof: Path) -> Counter[str]:
    return Counter(proof.read_text().split()) if proof.exists() else Counter()


@pytest.mark.slow
def test_an_agent_that_hangs_is_reported_and_continues_afterwards(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    installation.works()
    for number in range(ROUNDS):
        proof = tmp_path / f"proof-{number}"
        command = ("sh", "-c", 'echo "$HODEI_JOB_ID" >>"$1"', "sh", str(proof))
        agent = installation.agent()
        os.kill(agent, signal.SIGSTOP)
        try:
            # Placed before anyone can know: its order to start hangs.
            hung = [installation.submit(*command, restart="never") for _ in range(3)]
            until(lambda: installation.client().backends()[0].state == "unhealthy", "the backend is unhealthy", TOLD_S)
            (backend,) = installation.client().backends()
            assert f"process {agent}, does not answer" in backend.reason
            doctor = installation.hodei("doctor")
            assert doctor.code == 1
            assert "does not answer" in doctor.out
            assert installation.request("GET", "/readyz", token="").body == b"ok\nbackend local is unhealthy\n"
            (node,) = installation.client().nodes()
            assert "does not answer" in installation.ok("nodes").out + installation.ok("node", "show", node.name).out
            waiting = installation.submit(*command, restart="never")
            until(lambda: "does not answer" in installation.ok("why", str(waiting)).out, "told why it waits")  # noqa: B023
            assert installation.state(waiting) == "pending"
            assert not ran(proof)
        finally:
            os.kill(agent, signal.SIGCONT)
        details = installation.ended(*hung, waiting)
        assert [(detail.job.state, len(detail.runs)) for detail in details] == [("succeeded", 1)] * 4
        assert installation.rows("SELECT sum(losses), max(attempt) FROM job") == [(0, 1)]
        assert ran(proof) == Counter(map(str, [*hung, waiting]))
        until(lambda: installation.client().backends()[0].state == "ok", "the backend is well again")
        assert installation.agent() == agent
        installation.works()


@pytest.mark.slow
def test_a_start_that_hung_for_longer_than_a_call_may_take_is_not_made_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        proof, home = tmp_path / "proof", tmp_path / "home"
        order = an_order(1, "/bin/sh", "-c", f"echo ran >>{proof}")
        async with local_agent(home) as recorder:
            agent = agent_pid(home)
            os.kill(agent, signal.SIGSTOP)
            try:
                link = recorder.backend._agent.link
                first = asyncio.create_task(recorder.backend.start([order]))
                await eventually(lambda: link._pending, "the order is on its way")
                first.cancel()  # what a server does when its patience is over
                recorder.ordered = {order.run.id: order}
            finally:
                os.kill(agent, signal.SIGCONT)
            assert await recorder.backend.start([order]) == {}
            assert (await recorder.end_of(order.run.id)).state == "succeeded"
            assert proof.read_text() == "ran\n"

    asyncio.run(scenario())


def true_times(file: Path) -> tuple[int, int]:
    """When the run itself says that it began and ended, in ms."""
    began, ended = (int(line) // 1_000_000 for line in file.read_text().split())
    return began, ended


def is_true(end: RunObserved, file: Path) -> None:
    began, ended = true_times(file)
    assert began - LATE_MS < end.started_ms <= began + STAMP_MS
    assert ended - STAMP_MS <= end.at_ms < ended + LATE_MS
    assert end.started_ms <= end.at_ms


def a_dated_order(tmp_path: Path):
    script = f"date +%s%N >>{tmp_path}/dates; until [ -e {tmp_path}/gate ]; do sleep 0.02; done; date +%s%N >>{tmp_path}/dates"
    return an_order(1, "/bin/sh", "-c", f"{script}; exit 5")


async def ends_unseen(recorder: ReconnectingRecorder, tmp_path: Path) -> None:
    """The run ends, and some time passes in which nobody sees it."""
    await recorder.backend.start([a_dated_order(tmp_path)])
    await recorder.running("1.0.1")
    await eventually(lambda: (tmp_path / "dates").exists())


async def passes(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    await eventually(lambda: len((tmp_path / "dates").read_text().split()) == 2)
    ended = true_times(tmp_path / "dates")[1]
    await eventually(lambda: time.time() * 1000 > ended + 2 * LATE_MS)


def test_a_run_that_ended_while_the_agent_was_dead_has_its_end_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await ends_unseen(recorder, tmp_path)
            await recorder.backend.close()
            await kill_agent(home)
            await passes(tmp_path)
        async with local_agent(home, epoch=2) as recorder:
            end = await recorder.end_of("1.0.1")
            assert end.exit_code == 5
            is_true(end, tmp_path / "dates")
            # It is on record now, and is told the same way again.
            await recorder.backend.close()
            await kill_agent(home)
        async with local_agent(home, epoch=3) as recorder:
            assert (await recorder.backend.known())["1.0.1"] == end

    asyncio.run(scenario())


def test_a_run_that_ended_while_the_agent_hung_has_its_end_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await ends_unseen(recorder, tmp_path)
            agent = agent_pid(home)
            os.kill(agent, signal.SIGSTOP)
            try:
                await passes(tmp_path)
            finally:
                os.kill(agent, signal.SIGCONT)
            is_true(await recorder.end_of("1.0.1"), tmp_path / "dates")

    asyncio.run(scenario())


@pytest.mark.parametrize("lives", [True, False], ids=["it lives", "it has ended"])
def test_a_run_without_a_start_record_has_its_start_time(tmp_path: Path, lives: bool) -> None:
    """The agent dies between a birth and its next sync: the claim is all that is in the journal."""

    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await ends_unseen(recorder, tmp_path)
            await recorder.backend.close()
            await kill_agent(home)
            journal = home / "journal"
            lines = journal.read_bytes().splitlines(keepends=True)
            journal.write_bytes(b"".join(line for line in lines if b'"started"' not in line))
            if not lives:
                await passes(tmp_path)
        async with local_agent(home, epoch=2) as recorder:
            if lives:
                running = await recorder.running("1.0.1")
                await passes(tmp_path)
                assert abs(running.at_ms - true_times(tmp_path / "dates")[0]) < LATE_MS
            is_true(await recorder.end_of("1.0.1"), tmp_path / "dates")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_job_that_ran_while_the_server_was_down_has_correct_times(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    job = installation.submit(*a_dated_order(tmp_path).task.command)
    until(lambda: (tmp_path / "dates").exists(), "it has begun")
    installation.kill()
    asyncio.run(passes(tmp_path))
    installation.up()
    (detail,) = installation.ended(job)
    ((state, started_ms, finished_ms),) = installation.rows(
        "SELECT state, started_ms, finished_ms FROM run WHERE job = ?", job
    )
    began, ended = true_times(tmp_path / "dates")
    assert (detail.job.exit_code, state) == (5, "failed")
    assert abs(started_ms - began) < LATE_MS
    assert abs(finished_ms - ended) < LATE_MS
