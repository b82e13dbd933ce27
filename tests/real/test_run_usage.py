"""What runs used, measured by a real host agent: ends, live runs, kills, restarts, control groups."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_host import agent_pid, an_order
from hodei.agent.limits import enforcement
from hodei.backends.local import LocalBackend
from hodei.model.effects import Stop
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED
from hodei.model.outcome import StopReason
from hodei.model.usage import RunUsage

pytestmark = pytest.mark.real
needs_groups = pytest.mark.skipif(
    not enforcement()["memory"].startswith("cgroup"), reason="no cgroup with a memory controller is writable here"
)
DEADLINE_S = 60
MIB = 1 << 20
# 2 s of CPU time in two children, one of which holds 200 MiB; then it waits for its file, if it has one.
BURN = """
import os, sys, time
def burn(size):
    block = bytearray(size)
    while sum(os.times()[:2]) < 1: pass
    os._exit(0)
children = []
for size in (200 << 20, 0):
    pid = os.fork()
    if not pid: burn(size)
    children.append(pid)
for pid in children: os.waitpid(pid, 0)
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]): time.sleep(0.02)
"""
# The same in the process itself, which never ends.
BURN_AND_STAY = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nblock = bytearray(200 << 20)\n" \
    "while sum(os.times()[:2]) < 1: pass\nprint('burnt', flush=True)\nwhile True: time.sleep(60)\n"  # fmt: skip


def python(job: int, code: str, *arguments: str, **fields: object):
    return an_order(job, sys.executable, "-S", "-c", code, *arguments, **fields)


@contextlib.asynccontextmanager
async def local_backend(home: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend("local", home=home, installation="usage", epoch=1, linger_s=1)
    await backend.open()
    try:
        yield backend
    finally:
        with contextlib.suppress(BackendError):
            live = [run for run, seen in (await backend.known()).items() if seen.state not in RUN_ENDED]
            await backend.stop([Stop(run, "local", 0, StopReason("cancelled")) for run in live])
        await backend.close()


async def end_of(backend: LocalBackend, run: str) -> RunObserved:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(BackendError):
                seen = (await backend.known()).get(run)
                if seen is not None and seen.state in RUN_ENDED:
                    return seen
            await asyncio.sleep(0.02)


async def used_more_than(backend: LocalBackend, run: str, cpu_ms: int) -> RunUsage:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(BackendError):
                used = (await backend.run_usage([run])).get(run)
                if used is not None and (used.cpu_ms or 0) > cpu_ms:
                    return used
            await asyncio.sleep(0.1)


def within(percent: int, amount: int | None, expected: int) -> bool:
    return amount is not None and abs(amount - expected) * 100 <= expected * percent


@pytest.mark.parametrize(
    "limits", [{}, pytest.param({"memory": 1 << 30}, marks=needs_groups)], ids=["process", "cgroup"]
)
def test_cpu_time_and_memory_of_children_are_reported_with_the_end(tmp_path, limits):
    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            assert await backend.start([python(1, BURN, limits=limits)]) == {}
            end = await end_of(backend, "1.0.1")
            assert (end.state, end.exit_code) == ("succeeded", 0)
            assert end.usage is not None
            assert within(20, end.usage.cpu_ms, 2000), end.usage
            assert within(20, end.usage.peak_memory, 200 * MIB), end.usage
            assert (await backend.run_usage(["1.0.1"])) == {}

    asyncio.run(scenario())


def test_written_bytes_are_counted(tmp_path):
    code = f"import os\nfile = open({str(tmp_path / 'out')!r}, 'wb')\nfile.write(b'x' * (20 << 20))\nfile.flush()\nos.fsync(file.fileno())"

    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, code)])
            usage = (await end_of(backend, "1.0.1")).usage
            assert usage is not None
            if os.stat(tmp_path).st_dev in _memory_devices():
                assert usage.write_bytes is not None
            else:
                assert within(20, usage.write_bytes, 20 * MIB), usage

    asyncio.run(scenario())


def _memory_devices() -> set[int]:
    """File systems without a disk, which count no I/O."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return {
        os.stat(where).st_dev
        for _, where, kind, *_ in mounts
        if kind in ("tmpfs", "overlay", "ramfs") and os.path.exists(where)
    }


def test_a_killed_run_keeps_what_it_had_used(tmp_path):
    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, BURN_AND_STAY)])
            live = await used_more_than(backend, "1.0.1", 900)
            assert within(20, live.peak_memory, 200 * MIB), live
            await backend.stop([Stop("1.0.1", "local", 100, StopReason("cancelled"))])
            end = await end_of(backend, "1.0.1")
            assert (end.state, end.exit_code) == ("stopped", 137)
            assert end.usage is not None
            assert within(20, end.usage.cpu_ms, 1000), end.usage
            assert within(20, end.usage.peak_memory, 200 * MIB), end.usage

    asyncio.run(scenario())


def test_a_command_that_a_signal_ends_is_measured(tmp_path):
    code = "import os, signal\nwhile sum(os.times()[:2]) < 1: pass\nos.kill(os.getpid(), signal.SIGKILL)"

    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, code)])
            end = await end_of(backend, "1.0.1")
            assert (end.state, end.exit_code) == ("failed", 137)
            assert end.usage is not None
            assert within(20, end.usage.cpu_ms, 1000), end.usage

    asyncio.run(scenario())


def test_cpu_time_survives_a_kill_of_the_agent(tmp_path):
    """The end comes while no agent runs: the status file has it. The peak of ended processes is lost with the agent."""
    gate = tmp_path / "gate"

    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, BURN, str(gate))])
            await used_more_than(backend, "1.0.1", 1900)
            pid = agent_pid(tmp_path / "home")
            os.kill(pid, signal.SIGKILL)
            gate.touch()
            end = await end_of(backend, "1.0.1")
            assert agent_pid(tmp_path / "home") != pid
            assert (end.state, end.exit_code) == ("succeeded", 0)
            assert end.usage is not None
            assert within(20, end.usage.cpu_ms, 2000), end.usage

    asyncio.run(scenario())


@needs_groups
def test_the_peak_of_a_control_group_survives_a_kill_of_the_agent(tmp_path):
    gate = tmp_path / "gate"

    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, BURN, str(gate), limits={"memory": 1 << 30})])
            await used_more_than(backend, "1.0.1", 1900)
            os.kill(agent_pid(tmp_path / "home"), signal.SIGKILL)
            gate.touch()
            usage = (await end_of(backend, "1.0.1")).usage
            assert usage is not None
            assert within(20, usage.peak_memory, 200 * MIB), usage

    asyncio.run(scenario())


def test_a_stored_end_keeps_its_usage_through_a_restart_of_the_agent(tmp_path):
    async def scenario() -> None:
        async with local_backend(tmp_path / "home") as backend:
            await backend.start([python(1, BURN)])
            before = await end_of(backend, "1.0.1")
            os.kill(agent_pid(tmp_path / "home"), signal.SIGKILL)
            assert (await end_of(backend, "1.0.1")) == before

    asyncio.run(scenario())
