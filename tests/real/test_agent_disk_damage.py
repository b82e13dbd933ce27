"""Damage to the agent's files: bytes flipped, zeroed, removed or replaced while no agent runs and its runs continue.

Whatever is damaged, the next agent knows every live run and starts none twice, and an exit code is right or unknown.
HODEI_ROUNDS=N damages N times as many places; SEED=N repeats a failed test.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_host import agent_pid, alive, an_order, kill_agent, local_agent, until
from hodei.agent import proc
from hodei.agent.journal import Journal
from hodei.backends.local import LocalBackend
from hodei.model.effects import Forget, Start, Stop
from hodei.model.errors import StaleEpoch
from hodei.model.facts import RunObserved
from hodei.model.outcome import StopReason
from real.file_damage import DAMAGES, flip_anywhere, seeded_rng

pytestmark = pytest.mark.real
ROUNDS = int(os.environ.get("HODEI_ROUNDS") or 1)
LIVE, ENDED, FORGOTTEN = range(1, 6), range(11, 16), range(21, 24)

T = TypeVar("T")


class KilledAgent:
    """An agent that is killed while it has live, ended and forgotten runs. Each run writes its id and pid to `proof`;
    the live ones wait for `gate`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.gate, self.proof = folder / "home", folder / "gate", folder / "proof"
        self.epoch = 1

    def run(self, scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return asyncio.run(scenario())
        finally:
            self.gate.touch()  # also after a failure no run may keep waiting

    def order(self, job: int, *, waits: bool) -> Start:
        wait = f"until [ -e {self.gate} ]; do sleep 0.05; done; " if waits else ""
        script = f'echo "$HODEI_RUN_ID $$" >>{self.proof}; {wait}exit {job}'
        return an_order(job, "/bin/sh", "-c", script, timeout_ms=600_000)

    async def begin(self) -> None:
        async with local_agent(self.home) as recorder:
            await recorder.run(*(self.order(job, waits=False) for job in FORGOTTEN))
            await recorder.backend.forget([Forget(f"{job}.0.1", "local") for job in FORGOTTEN])
            await recorder.run(*(self.order(job, waits=False) for job in ENDED))
            await recorder.backend.start([self.order(job, waits=True) for job in LIVE])
            await until(lambda: len(self.pids()) == len([*LIVE, *ENDED, *FORGOTTEN]))
            await recorder.backend.close()
            await kill_agent(self.home)

    def pids(self) -> dict[str, int]:
        """The process of every run that has ever started, by run."""
        lines = [line.split() for line in self.proof.read_text().splitlines()] if self.proof.exists() else []
        assert all(count == 1 for count in Counter(run for run, _ in lines).values()), "a run ran twice"
        return {run: int(pid) for run, pid in lines}

    async def known_to_a_new_agent(self) -> dict[str, RunObserved]:
        """What the next agent knows of all runs. It refuses servers of an older epoch, and is killed afterwards."""
        with pytest.raises(StaleEpoch):
            await LocalBackend("local", home=self.home, installation="test", epoch=0, linger_s=1).open()
        self.epoch += 1
        backend = local_agent(self.home, epoch=self.epoch)
        recorder = await backend.__aenter__()
        known = await recorder.backend.known()
        await recorder.backend.close()
        await kill_agent(self.home)
        return known

    async def end_live_runs(self) -> dict[str, RunObserved]:
        self.epoch += 1
        async with local_agent(self.home, epoch=self.epoch) as recorder:
            self.gate.touch()
            return {run: await recorder.end_of(run) for run in (f"{job}.0.1" for job in LIVE)}


def lost_ends(known: dict[str, RunObserved], agent: KilledAgent) -> int:
    """Assert that live runs are known as running and that ends are right or lost; returns how many are lost.

    A run whose end was acknowledged may be reported once more in any state, because the server knows how it ended.
    """
    for job in LIVE:
        run = f"{job}.0.1"
        assert alive(agent.pids()[run])
        assert run in known, f"{run} is alive, and the agent does not know it"
        assert known[run].state == "running", known[run]
    for job in ENDED:
        seen = known[f"{job}.0.1"]
        assert (seen.state, seen.exit_code) in (("failed", job), ("lost", None)), seen
    return sum(known[f"{job}.0.1"].state == "lost" for job in ENDED)


@pytest.mark.slow
def test_a_damaged_journal_stops_no_run_and_reports_no_wrong_end(tmp_path: Path) -> None:
    rng = seeded_rng()
    agent = KilledAgent(tmp_path)
    damages = 0

    async def scenario() -> None:
        nonlocal damages
        await agent.begin()
        journal = agent.home / "journal"
        intact = journal.read_bytes()
        for _ in range(ROUNDS):
            for name, damage in DAMAGES.items():
                journal.write_bytes(damage(rng, intact))
                print(name)
                # The status files are intact and hold all ends.
                assert lost_ends(await agent.known_to_a_new_agent(), agent) == 0
                damages += 1
        ends = await agent.end_live_runs()
        assert {run: (end.state, end.exit_code) for run, end in ends.items()} == {
            f"{job}.0.1": ("failed", job) for job in LIVE
        }
        assert len(agent.pids()) == len([*LIVE, *ENDED, *FORGOTTEN])

    agent.run(scenario)
    print(f"{damages} damages: no end was lost or wrong, no run ran twice")


@pytest.mark.slow
def test_garbage_in_the_files_of_runs_makes_no_wrong_end_and_no_second_run(tmp_path: Path) -> None:
    rng = seeded_rng()

    def damage(path: Path, kind: str) -> None:
        data = path.read_bytes() if path.is_file() else b""
        if kind == "removed":
            path.unlink(missing_ok=True)
        elif kind in ("a pipe", "a directory", "a link"):
            path.unlink(missing_ok=True)
            {"a pipe": os.mkfifo, "a directory": os.mkdir, "a link": lambda p: os.symlink("/etc/passwd", p)}[kind](path)
        else:
            with path.open("r+b" if path.exists() else "wb") as file:  # the same file: its writer still has it open
                file.truncate(0)
                file.write(
                    {
                        "emptied": b"",
                        "truncated": data[: len(data) // 2],
                        "binary": rng.randbytes(200),
                        "one byte": flip_anywhere(rng, data or b"x"),
                    }[kind]
                )

    kinds = ["removed", "a pipe", "a directory", "a link", "emptied", "truncated", "binary", "one byte"]

    async def scenario(agent: KilledAgent, kinds: list[str], while_running: bool) -> int:
        await agent.begin()
        if not while_running:  # the runs end without an agent, and then the files are damaged
            pids = [agent.pids()[f"{job}.0.1"] for job in LIVE]
            agent.gate.touch()
            await until(lambda: not any(map(alive, pids)))
        for job, kind in zip([*LIVE, *ENDED], kinds, strict=False):
            directory = agent.home / "runs" / "test" / f"{job}.0.1"
            damage(directory / "status", kind)
            for name in ("hook", "save", "health", "execute0", "stdout.gap", "stderr.gap", "checkpoint"):
                damage(directory / name, rng.choice(["binary", "emptied", "a pipe", "a directory"]))
        if while_running:
            lost_ends(await agent.known_to_a_new_agent(), agent)
        ends = await agent.end_live_runs()
        for job in LIVE:
            end = ends[f"{job}.0.1"]
            assert (end.state, end.exit_code) in (("failed", job), ("lost", None)), end
        assert len(agent.pids()) == len([*LIVE, *ENDED, *FORGOTTEN])
        return sum(end.state == "lost" for end in ends.values())

    lost = 0
    for number in range(ROUNDS):
        for while_running in (True, False):
            rng.shuffle(kinds)
            folder = tmp_path / f"{number}-{while_running}"
            folder.mkdir()
            agent = KilledAgent(folder)
            lost += agent.run(functools.partial(scenario, agent, kinds, while_running))
            shutil.rmtree(folder)
    print(f"{ROUNDS * 2 * len(LIVE)} runs with garbage in their files: {lost} ends were lost, none was wrong")


def test_a_run_without_records_is_found_by_its_process_and_keeps_its_timeout(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            script = "echo $$; exec sleep 300"
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", script, timeout_ms=8000)])
            pid = int((await recorder.log_has("1.0.1", b"\n")).split()[0])
            await recorder.backend.close()
            await kill_agent(home)
        shutil.rmtree(home / "runs" / "test" / "1.0.1")
        (home / "journal").write_bytes(b"")
        async with local_agent(home, epoch=2) as recorder:
            assert (await recorder.running("1.0.1")).state == "running"
            end = await recorder.end_of("1.0.1")
            assert (end.reason_code, alive(pid)) == ("timeout", False)

    asyncio.run(scenario())


def test_a_run_continues_when_the_journal_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        home = tmp_path / "home"
        async with local_agent(home) as recorder:
            await recorder.backend.start([an_order(1, "/bin/sh", "-c", "echo $$; exec sleep 300")])
            pid = int((await recorder.log_has("1.0.1", b"\n")).split()[0])
            await recorder.backend.close()
            await kill_agent(home)
        (home / "journal").unlink()
        async with local_agent(home, epoch=2) as recorder:
            assert (await recorder.running("1.0.1")).state == "running"
            assert alive(pid)
            await recorder.backend.stop([Stop("1.0.1", "local", 0, StopReason("cancelled", "enough"))])
            assert (await recorder.end_of("1.0.1")).state == "stopped"
            assert not alive(pid)

    asyncio.run(scenario())


def test_a_new_home_does_not_know_the_runs_of_the_old_one(tmp_path: Path) -> None:
    agent = KilledAgent(tmp_path)

    async def scenario() -> None:
        await agent.begin()
        shutil.rmtree(agent.home)
        async with local_agent(agent.home) as recorder:
            assert await recorder.backend.known() == {}
            (end,) = await recorder.run(an_order(LIVE[0], "/bin/sh", "-c", "exit 99"))
            assert end.exit_code == 99

    agent.run(scenario)


def test_unreadable_records_are_reported_and_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with local_agent(tmp_path) as recorder:
            await recorder.run(an_order(1))
            await recorder.backend.close()
            await kill_agent(tmp_path)
        (tmp_path / "journal").write_bytes(b"no step\n" + (tmp_path / "journal").read_bytes())
        async with local_agent(tmp_path, epoch=2) as recorder:
            assert "journal could not be read" in await recorder.backend.ping()
            assert (tmp_path / "journal.damaged").read_bytes().startswith(b"no step\n")
            assert agent_pid(tmp_path)

    asyncio.run(scenario())


def a_claim(home: Path, *, boot: str, damaged: bool = False) -> Path:
    """The files of an agent that was killed right after it claimed run 1.0.1. Returns the directory for the run."""
    (home / "runs" / "test").mkdir(parents=True)
    journal = Journal(str(home / "journal"))
    journal.add({"step": "claimed", "run": "test/1.0.1", "at": 1, "grace": 10_000, "boot": boot})
    journal.sync()
    journal.close()
    if damaged:
        with (home / "journal").open("ab") as file:
            file.write(b"damaged\n")
    return home / "runs" / "test" / "1.0.1"


@pytest.mark.parametrize(
    ("status", "same_boot", "damaged", "may_have_started"),
    [
        pytest.param(None, True, False, False, id="no directory"),
        pytest.param(None, True, True, False, id="no directory and a damaged journal"),
        pytest.param(b"", True, False, False, id="an empty status file"),
        pytest.param(b"9.0.1 pid 7 7\n9.0.1 exit 0 0\n", True, True, False, id="a directory of another run"),
        pytest.param(None, False, False, True, id="another boot: writes may not have reached the disk"),
        pytest.param(b"", True, True, True, id="an empty status file and a damaged journal"),
        pytest.param(b"\0\0\0", True, False, True, id="garbage"),
        pytest.param(b"1.0.1 pid 99999 99999\n", True, False, True, id="a started run"),
    ],
)
def test_only_runs_that_certainly_did_not_start_are_started_again(
    tmp_path: Path, status, same_boot, damaged, may_have_started
) -> None:
    proof = tmp_path / "proof"
    directory = a_claim(tmp_path / "home", boot=proc.boot_id() if same_boot else "another", damaged=damaged)
    if status is not None:
        directory.mkdir()
        (directory / "status").write_bytes(status)

    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            known = await recorder.backend.known()
            assert {run: seen.state for run, seen in known.items()} == ({"1.0.1": "lost"} if may_have_started else {})
            assert await recorder.backend.start([an_order(1, "/bin/sh", "-c", f"echo ran >>{proof}; exit 7")]) == {}
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.exit_code) == (("lost", None) if may_have_started else ("failed", 7))
            assert proof.exists() != may_have_started

    asyncio.run(scenario())


def test_a_wrapper_without_output_is_awaited(tmp_path: Path) -> None:
    """It has its status file open, so it may start the command at any moment; here it never does."""
    home = tmp_path / "home"
    directory = a_claim(home, boot=proc.boot_id())
    directory.mkdir()
    with (directory / "status").open("ab") as status:
        words = ["hodei", "-c", "sleep 300", "hodei", "1.0.1", "/", "0", "", "--", "true"]
        wrapper = subprocess.Popen(words, executable="/bin/sh", stdout=status, start_new_session=True)
    try:

        async def scenario() -> None:
            async with local_agent(home) as recorder:
                assert (await recorder.backend.known())["1.0.1"].state == "running"
                os.killpg(wrapper.pid, signal.SIGKILL)
                wrapper.wait()
                assert (await recorder.end_of("1.0.1")).state == "lost"

        asyncio.run(scenario())
    finally:
        if wrapper.poll() is None:
            os.killpg(wrapper.pid, signal.SIGKILL)
            wrapper.wait()


def test_a_stop_ordered_before_the_run_started_is_carried_out(tmp_path: Path) -> None:
    a_claim(tmp_path / "home", boot=proc.boot_id())
    journal = Journal(str(tmp_path / "home" / "journal"))
    stop = {"code": "stop", "reason": "enough", "kill_at": 1, "grace": 0}
    journal.add({"step": "stopping", "run": "test/1.0.1", **stop})
    journal.sync()

    async def scenario() -> None:
        async with local_agent(tmp_path / "home") as recorder:
            end = await recorder.end_of("1.0.1")
            assert (end.state, end.reason) == ("stopped", "enough")

    asyncio.run(scenario())


def test_the_runs_of_an_older_agent_are_taken_over(tmp_path: Path) -> None:
    """Its journal has no checksums and no boot ids, and its status files have every number once and no claim."""
    agent = KilledAgent(tmp_path)

    def old_format(line: bytes) -> bytes:
        step = json.loads(line.rpartition(b" ")[0])
        if step["step"] == "claimed":
            del step["boot"]
        return json.dumps(step).encode() + b"\n"

    async def scenario() -> None:
        await agent.begin()
        journal = agent.home / "journal"
        journal.write_bytes(b"".join(old_format(line) for line in journal.read_bytes().splitlines()))
        for status in (agent.home / "runs" / "test").glob("*/status"):
            with status.open("r+b") as file:
                once = [b" ".join(line.split()[:3]) + b"\n" for line in file.read().splitlines()]
                file.seek(0)
                file.truncate()
                file.write(b"".join(once))
        assert lost_ends(await agent.known_to_a_new_agent(), agent) == 0
        assert all(not line.endswith(b"}") for line in journal.read_bytes().splitlines())
        ends = await agent.end_live_runs()
        assert [ends[f"{job}.0.1"].exit_code for job in LIVE] == [*LIVE]

    agent.run(scenario)
