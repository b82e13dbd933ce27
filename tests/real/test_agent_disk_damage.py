"""Damage on the agent's disk: bytes flipped, zeroed, removed or replaced while the agent was dead and its runs continued.

Whatever is damaged, a live run is known and does not run twice, and an exit code is right or unknown.
HODEI_ROUNDS=N repeats each test with other places to damage; SEED=N repeats one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_host import Desk, a_host, agent_pid, alive, an_order, kill_agent, until
from hodei.agent import proc
from hodei.agent.journal import Journal
from hodei.backends.local import LocalBackend
from hodei.model.effects import Forget, Start, Stop
from hodei.model.errors import StaleEpoch
from hodei.model.facts import RunObserved
from hodei.model.outcome import StopReason
from real.file_damage import DAMAGES, flip_anywhere

pytestmark = pytest.mark.real
ROUNDS = int(os.environ.get("HODEI_ROUNDS") or 1)
LIVE, ENDED, FORGOTTEN = range(1, 6), range(11, 16), range(21, 24)

T = TypeVar("T")


def seeded() -> random.Random:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    return random.Random(seed)


class Rotting:
    """Runs of every kind, an agent that is killed, and a count of what really ran."""

    def __init__(self, folder: Path) -> None:
        self.home, self.gate, self.proof = folder / "home", folder / "gate", folder / "proof"
        self.epoch = 1

    def tell(self, story: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return asyncio.run(story())
        finally:
            self.gate.touch()  # nothing is left waiting, however it went

    def order(self, job: int, *, waits: bool) -> Start:
        wait = f"until [ -e {self.gate} ]; do sleep 0.05; done; " if waits else ""
        script = f'echo "$HODEI_RUN_ID $$" >>{self.proof}; {wait}exit {job}'
        return an_order(job, "/bin/sh", "-c", script, timeout_ms=600_000)

    async def begin(self) -> None:
        async with a_host(self.home) as desk:
            await desk.run(*(self.order(job, waits=False) for job in FORGOTTEN))
            await desk.backend.forget([Forget(f"{job}.0.1", "local") for job in FORGOTTEN])
            await desk.run(*(self.order(job, waits=False) for job in ENDED))
            await desk.backend.start([self.order(job, waits=True) for job in LIVE])
            await until(lambda: len(self.began()) == len([*LIVE, *ENDED, *FORGOTTEN]))
            await desk.backend.close()
            await kill_agent(self.home)

    def began(self) -> dict[str, int]:
        """The process of each run, by the run."""
        lines = [line.split() for line in self.proof.read_text().splitlines()] if self.proof.exists() else []
        assert Counter(run for run, _ in lines).most_common(1)[0][1] == 1 if lines else True, "a run ran twice"
        return {run: int(pid) for run, pid in lines}

    async def stand(self) -> dict[str, RunObserved]:
        """How all runs stand to a new agent, which turns away servers of the past, and is killed again."""
        with pytest.raises(StaleEpoch):
            await LocalBackend("local", home=self.home, installation="test", epoch=0, linger_s=1).open()
        self.epoch += 1
        backend = a_host(self.home, epoch=self.epoch)
        desk = await backend.__aenter__()
        known = await desk.backend.known()
        await desk.backend.close()
        await kill_agent(self.home)
        return known

    async def end(self) -> dict[str, RunObserved]:
        """The ends of the living, once their gate is open."""
        self.epoch += 1
        async with a_host(self.home, epoch=self.epoch) as desk:
            self.gate.touch()
            return {run: await desk.end_of(run) for run in (f"{job}.0.1" for job in LIVE)}


def are_sound(known: dict[str, RunObserved], rotting: Rotting) -> int:
    """Those that live are known to, ends are right or lost; how many are lost. (A run whose end was acknowledged may be
    told of once more, as whatever: the server knows how it ended.)"""
    for job in LIVE:
        run = f"{job}.0.1"
        assert alive(rotting.began()[run])
        assert run in known, f"{run} lives, and the agent does not know of it"
        assert known[run].state == "running", known[run]
    for job in ENDED:
        seen = known[f"{job}.0.1"]
        assert (seen.state, seen.exit_code) in (("failed", job), ("lost", None)), seen
    return sum(known[f"{job}.0.1"].state == "lost" for job in ENDED)


@pytest.mark.slow
def test_a_damaged_journal_stops_no_run_and_reports_no_wrong_end(tmp_path: Path) -> None:
    chance = seeded()
    rotting = Rotting(tmp_path)
    damages = 0

    async def story() -> None:
        nonlocal damages
        await rotting.begin()
        journal = rotting.home / "journal"
        whole = journal.read_bytes()
        for _ in range(ROUNDS):
            for name, damage in DAMAGES.items():
                journal.write_bytes(damage(chance, whole))
                print(name)
                # The status files are whole, and tell all ends.
                assert are_sound(await rotting.stand(), rotting) == 0
                damages += 1
        ends = await rotting.end()
        assert {run: (end.state, end.exit_code) for run, end in ends.items()} == {
            f"{job}.0.1": ("failed", job) for job in LIVE
        }
        assert len(rotting.began()) == len([*LIVE, *ENDED, *FORGOTTEN])

    rotting.tell(story)
    print(f"{damages} damages: no end was lost or wrong, no run ran twice")


@pytest.mark.slow
def test_garbage_in_the_files_of_runs_makes_no_wrong_end_and_no_second_run(tmp_path: Path) -> None:
    chance = seeded()

    def spoil(path: Path, how: str) -> None:
        data = path.read_bytes() if path.is_file() else b""
        if how == "gone":
            path.unlink(missing_ok=True)
        elif how in ("a pipe", "a directory", "a link"):
            path.unlink(missing_ok=True)
            {"a pipe": os.mkfifo, "a directory": os.mkdir, "a link": lambda p: os.symlink("/etc/passwd", p)}[how](path)
        else:
            with path.open("r+b" if path.exists() else "wb") as file:  # the same file: its writer still has it open
                file.truncate(0)
                file.write(
                    {
                        "emptied": b"",
                        "half of it": data[: len(data) // 2],
                        "binary": chance.randbytes(200),
                        "one byte": flip_anywhere(chance, data or b"x"),
                    }[how]
                )

    hows = ["gone", "a pipe", "a directory", "a link", "emptied", "half of it", "binary", "one byte"]

    async def story(rotting: Rotting, hows: list[str], at_first: bool) -> int:
        await rotting.begin()
        if not at_first:  # they end while nobody looks, and then it rots
            pids = [rotting.began()[f"{job}.0.1"] for job in LIVE]
            rotting.gate.touch()
            await until(lambda: not any(map(alive, pids)))
        for job, how in zip([*LIVE, *ENDED], hows, strict=False):
            directory = rotting.home / "runs" / "test" / f"{job}.0.1"
            spoil(directory / "status", how)
            for name in ("hook", "save", "health", "execute0", "stdout.gap", "stderr.gap", "checkpoint"):
                spoil(directory / name, chance.choice(["binary", "emptied", "a pipe", "a directory"]))
        if at_first:
            are_sound(await rotting.stand(), rotting)
        ends = await rotting.end()
        for job in LIVE:
            end = ends[f"{job}.0.1"]
            assert (end.state, end.exit_code) in (("failed", job), ("lost", None)), end
        assert len(rotting.began()) == len([*LIVE, *ENDED, *FORGOTTEN])
        return sum(end.state == "lost" for end in ends.values())

    lost = 0
    for number in range(ROUNDS):
        for at_first in (True, False):
            chance.shuffle(hows)
            folder = tmp_path / f"{number}-{at_first}"
            folder.mkdir()
            rotting = Rotting(folder)
            lost += rotting.tell(functools.partial(story, rotting, hows, at_first))
            shutil.rmtree(folder)
    print(f"{ROUNDS * 2 * len(LIVE)} runs with garbage in their files: {lost} ends were lost, none was wrong")


def test_a_run_that_is_known_by_its_process_alone_keeps_its_timeout(tmp_path: Path) -> None:
    async def story() -> None:
        home = tmp_path / "home"
        async with a_host(home) as desk:
            script = "echo $$; exec sleep 300"
            await desk.backend.start([an_order(1, "/bin/sh", "-c", script, timeout_ms=4000)])
            pid = int((await desk.log_has("1.0.1", b"\n")).split()[0])
            await desk.backend.close()
            await kill_agent(home)
        shutil.rmtree(home / "runs" / "test" / "1.0.1")
        (home / "journal").write_bytes(b"")
        async with a_host(home, epoch=2) as desk:
            assert (await desk.running("1.0.1")).state == "running"
            end = await desk.end_of("1.0.1")
            assert (end.reason_code, alive(pid)) == ("timeout", False)

    asyncio.run(story())


def test_a_run_continues_when_the_journal_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        home = tmp_path / "home"
        async with a_host(home) as desk:
            await desk.backend.start([an_order(1, "/bin/sh", "-c", "echo $$; exec sleep 300")])
            pid = int((await desk.log_has("1.0.1", b"\n")).split()[0])
            await desk.backend.close()
            await kill_agent(home)
        (home / "journal").unlink()
        async with a_host(home, epoch=2) as desk:
            assert (await desk.running("1.0.1")).state == "running"
            assert alive(pid)
            await desk.backend.stop([Stop("1.0.1", "local", 0, StopReason("cancelled", "enough"))])
            assert (await desk.end_of("1.0.1")).state == "stopped"
            assert not alive(pid)

    asyncio.run(story())


def test_a_new_home_does_not_know_the_runs_of_the_old_one(tmp_path: Path) -> None:
    rotting = Rotting(tmp_path)

    async def story() -> None:
        await rotting.begin()
        shutil.rmtree(rotting.home)
        async with a_host(rotting.home) as desk:
            assert await desk.backend.known() == {}
            (end,) = await desk.run(an_order(LIVE[0], "/bin/sh", "-c", "exit 99"))
            assert end.exit_code == 99

    rotting.tell(story)


def test_unreadable_records_are_reported_and_kept(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert "journal could not be read" in await desk.backend.ping()
        assert (tmp_path / "journal.damaged").read_bytes().startswith(b"no step\n")

    async def both() -> None:
        async with a_host(tmp_path) as desk:
            await desk.run(an_order(1))
            await desk.backend.close()
            await kill_agent(tmp_path)
        (tmp_path / "journal").write_bytes(b"no step\n" + (tmp_path / "journal").read_bytes())
        async with a_host(tmp_path, epoch=2) as desk:
            await story(desk)
            assert agent_pid(tmp_path)

    asyncio.run(both())


def a_claim(home: Path, *, boot: str, spoilt: bool = False) -> Path:
    """What an agent leaves that dies right behind its claim of run 1.0.1. The directory for the run."""
    (home / "runs" / "test").mkdir(parents=True)
    journal = Journal(str(home / "journal"))
    journal.add({"step": "claimed", "run": "test/1.0.1", "at": 1, "grace": 10_000, "boot": boot})
    journal.sync()
    journal.close()
    if spoilt:
        with (home / "journal").open("ab") as file:
            file.write(b"rotten\n")
    return home / "runs" / "test" / "1.0.1"


@pytest.mark.parametrize(
    ("status", "same_boot", "spoilt", "born"),
    [
        pytest.param(None, True, False, False, id="no directory"),
        pytest.param(None, True, True, False, id="no directory, and a rotten journal"),
        pytest.param(b"", True, False, False, id="died on its way"),
        pytest.param(b"9.0.1 pid 7 7\n9.0.1 exit 0 0\n", True, True, False, id="a directory of another run"),
        pytest.param(None, False, False, True, id="of another boot: what was written may not have reached the disk"),
        pytest.param(b"", True, True, True, id="emptied, or died on its way: the rotten journal cannot tell"),
        pytest.param(b"\0\0\0", True, False, True, id="garbage"),
        pytest.param(b"1.0.1 pid 99999 99999\n", True, False, True, id="it had begun"),
    ],
)
def test_only_runs_that_certainly_did_not_start_are_started_again(
    tmp_path: Path, status, same_boot, spoilt, born
) -> None:
    proof = tmp_path / "proof"
    directory = a_claim(tmp_path / "home", boot=proc.boot_id() if same_boot else "another", spoilt=spoilt)
    if status is not None:
        directory.mkdir()
        (directory / "status").write_bytes(status)

    async def story() -> None:
        async with a_host(tmp_path / "home") as desk:
            known = await desk.backend.known()
            assert {run: seen.state for run, seen in known.items()} == ({"1.0.1": "lost"} if born else {})
            assert await desk.backend.start([an_order(1, "/bin/sh", "-c", f"echo ran >>{proof}; exit 7")]) == {}
            end = await desk.end_of("1.0.1")
            assert (end.state, end.exit_code) == (("lost", None) if born else ("failed", 7))
            assert proof.exists() != born

    asyncio.run(story())


def test_a_wrapper_without_output_is_awaited(tmp_path: Path) -> None:
    """It holds its file, so it may begin any moment; here it stands still for as long as we look."""
    home = tmp_path / "home"
    directory = a_claim(home, boot=proc.boot_id())
    directory.mkdir()
    with (directory / "status").open("ab") as status:
        words = ["hodei", "-c", "sleep 300", "hodei", "1.0.1", "/", "0", "", "--", "true"]
        wrapper = subprocess.Popen(words, executable="/bin/sh", stdout=status, start_new_session=True)
    try:

        async def story() -> None:
            async with a_host(home) as desk:
                assert (await desk.backend.known())["1.0.1"].state == "running"
                os.killpg(wrapper.pid, signal.SIGKILL)
                wrapper.wait()
                assert (await desk.end_of("1.0.1")).state == "lost"

        asyncio.run(story())
    finally:
        if wrapper.poll() is None:
            os.killpg(wrapper.pid, signal.SIGKILL)
            wrapper.wait()


def test_a_stop_before_the_start_of_a_run_is_carried_out(tmp_path: Path) -> None:
    a_claim(tmp_path / "home", boot=proc.boot_id())
    journal = Journal(str(tmp_path / "home" / "journal"))
    stop = {"code": "stop", "reason": "enough", "kill_at": 1, "grace": 0}
    journal.add({"step": "stopping", "run": "test/1.0.1", **stop})
    journal.sync()

    async def story() -> None:
        async with a_host(tmp_path / "home") as desk:
            end = await desk.end_of("1.0.1")
            assert (end.state, end.reason) == ("stopped", "enough")

    asyncio.run(story())


def test_the_runs_of_an_older_agent_are_taken_over(tmp_path: Path) -> None:
    """Its journal has no checksums and no boots, its wrappers wrote each number once and carry no claim."""
    rotting = Rotting(tmp_path)

    def as_it_was(line: bytes) -> bytes:
        step = json.loads(line.rpartition(b" ")[0])
        if step["step"] == "claimed":
            del step["boot"]
        return json.dumps(step).encode() + b"\n"

    async def story() -> None:
        await rotting.begin()
        journal = rotting.home / "journal"
        journal.write_bytes(b"".join(as_it_was(line) for line in journal.read_bytes().splitlines()))
        for status in (rotting.home / "runs" / "test").glob("*/status"):
            with status.open("r+b") as file:
                once = [b" ".join(line.split()[:3]) + b"\n" for line in file.read().splitlines()]
                file.seek(0)
                file.truncate()
                file.write(b"".join(once))
        assert are_sound(await rotting.stand(), rotting) == 0
        assert all(not line.endswith(b"}") for line in journal.read_bytes().splitlines())
        ends = await rotting.end()
        assert [ends[f"{job}.0.1"].exit_code for job in LIVE] == [*LIVE]

    rotting.tell(story)
