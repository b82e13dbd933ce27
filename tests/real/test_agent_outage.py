"""The host agent hangs (SIGSTOP) or is killed while runs end: the outage is reported, each run ends once, times are right."""

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
# Times of files come from a coarser clock than that of `date`.
STAMP_MS = 20
# How long a busy machine may take between the start of a run and its first command, and from its end to the status file.
LATE_MS = 2000


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
            # Placed before the hang is noticed, so their starts hang.
            hung = [installation.submit(*command, restart="never") for _ in range(3)]
            until(lambda: installation.client().backends()[0].state == "unhealthy", "the backend is unhealthy")
            (backend,) = installation.client().backends()
            assert f"process {agent}, does not answer" in backend.reason
            doctor = installation.hodei("doctor")
            assert doctor.code == 1
            assert "does not answer" in doctor.out
            assert installation.request("GET", "/readyz", token="").body == b"ok\nbackend local is unhealthy\n"
            (node,) = installation.client().nodes()
            assert "does not answer" in installation.ok("nodes").out + installation.ok("node", "show", node.name).out
            waiting = installation.submit(*command, restart="never")
            until(lambda: "does not answer" in installation.ok("why", str(waiting)).out, "why names the reason")  # noqa: B023
            assert installation.state(waiting) == "pending"
            assert not ran(proof)
        finally:
            os.kill(agent, signal.SIGCONT)
        details = installation.ended(*hung, waiting)
        assert [(detail.job.state, len(detail.runs)) for detail in details] == [("succeeded", 1)] * 4
        assert installation.rows("SELECT sum(losses), max(attempt) FROM job") == [(0, 1)]
        assert ran(proof) == Counter(map(str, [*hung, waiting]))
        until(lambda: installation.client().backends()[0].state == "ok", "the backend is ok again")
        assert installation.agent() == agent
        installation.works()


@pytest.mark.slow
def test_a_start_that_timed_out_while_the_agent_hung_is_not_made_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        proof, home = tmp_path / "proof", tmp_path / "home"
        order = an_order(1, "/bin/sh", "-c", f"echo ran >>{proof}")
        async with local_agent(home) as recorder:
            agent = agent_pid(home)
            os.kill(agent, signal.SIGSTOP)
            try:
                link = recorder.backend._agent.link
                first = asyncio.create_task(recorder.backend.start([order]))
                await eventually(lambda: link._pending, "the order is sent")
                first.cancel()  # as a server does at the timeout of a call
                recorder.ordered = {order.run.id: order}
            finally:
                os.kill(agent, signal.SIGCONT)
            assert await recorder.backend.start([order]) == {}
            assert (await recorder.end_of(order.run.id)).state == "succeeded"
            assert proof.read_text() == "ran\n"

    asyncio.run(scenario())


def own_times(file: Path) -> tuple[int, int]:
    """When the run started and ended by its own clock, in ms."""
    started, ended = (int(line) // 1_000_000 for line in file.read_text().split())
    return started, ended


def assert_right_times(end: RunObserved, file: Path) -> None:
    started, ended = own_times(file)
    assert started - LATE_MS < end.started_ms <= started + STAMP_MS
    assert ended - STAMP_MS <= end.at_ms < ended + LATE_MS
    assert end.started_ms <= end.at_ms


def a_dated_order(tmp_path: Path):
    script = f"date +%s%N >>{tmp_path}/dates; until [ -e {tmp_path}/gate ]; do sleep 0.02; done; date +%s%N >>{tmp_path}/dates"
    return an_order(1, "/bin/sh", "-c", f"{script}; exit 5")


async def start_run(recorder: ReconnectingRecorder, tmp_path: Path) -> None:
    await recorder.backend.start([a_dated_order(tmp_path)])
    await recorder.running("1.0.1")
    await eventually(lambda: (tmp_path / "dates").exists())


async def end_long_ago(tmp_path: Path) -> None:
    """Let the run end, and wait until a time that is taken now would be recognised as wrong."""
    (tmp_path / "gate").touch()
    await eventually(lambda: len((tmp_path / "dates").read_text().split()) == 2)
    ended = own_times(tmp_path / "dates")[1]
    await eventually(lambda: time.time() * 1000 > ended + 2 * LATE_MS)


def test_a_run_that_ended_while_the_agent_was_dead_has_its_end_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await start_run(recorder, tmp_path)
            await recorder.backend.close()
            await kill_agent(home)
            await end_long_ago(tmp_path)
        async with local_agent(home, epoch=2) as recorder:
            end = await recorder.end_of("1.0.1")
            assert end.exit_code == 5
            assert_right_times(end, tmp_path / "dates")
            # Another agent reports the same end.
            await recorder.backend.close()
            await kill_agent(home)
        async with local_agent(home, epoch=3) as recorder:
            assert (await recorder.backend.known())["1.0.1"] == end

    asyncio.run(scenario())


def test_a_run_that_ended_while_the_agent_hung_has_its_end_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await start_run(recorder, tmp_path)
            agent = agent_pid(home)
            os.kill(agent, signal.SIGSTOP)
            try:
                await end_long_ago(tmp_path)
            finally:
                os.kill(agent, signal.SIGCONT)
            assert_right_times(await recorder.end_of("1.0.1"), tmp_path / "dates")

    asyncio.run(scenario())


@pytest.mark.parametrize("running", [True, False], ids=["running", "ended"])
def test_a_run_without_a_start_record_has_its_start_time(tmp_path: Path, running: bool) -> None:
    """The agent is killed after a start and before its next sync: the journal has only the claim."""

    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await start_run(recorder, tmp_path)
            await recorder.backend.close()
            await kill_agent(home)
            journal = home / "journal"
            lines = journal.read_bytes().splitlines(keepends=True)
            journal.write_bytes(b"".join(line for line in lines if b'"started"' not in line))
            if not running:
                await end_long_ago(tmp_path)
        async with local_agent(home, epoch=2) as recorder:
            if running:
                seen = await recorder.running("1.0.1")
                await end_long_ago(tmp_path)
                assert abs(seen.at_ms - own_times(tmp_path / "dates")[0]) < LATE_MS
            assert_right_times(await recorder.end_of("1.0.1"), tmp_path / "dates")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_job_that_ran_while_the_server_was_down_has_correct_times(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    job = installation.submit(*a_dated_order(tmp_path).task.command)
    until(lambda: (tmp_path / "dates").exists(), "the run has started")
    installation.kill()
    asyncio.run(end_long_ago(tmp_path))
    installation.up()
    (detail,) = installation.ended(job)
    ((state, started_ms, finished_ms),) = installation.rows(
        "SELECT state, started_ms, finished_ms FROM run WHERE job = ?", job
    )
    started, ended = own_times(tmp_path / "dates")
    assert (detail.job.exit_code, state) == (5, "failed")
    assert abs(started_ms - started) < LATE_MS
    assert abs(finished_ms - ended) < LATE_MS
