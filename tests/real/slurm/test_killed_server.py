"""A server is killed while it submits a job. With the stand-in for PBS, whose qsub is slowed down."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.backends.base import BackendContext
from hodei.runtime.clock import SystemClock
from hpc_backends import PbsStandIn

pytestmark = pytest.mark.real


def an_order_for(home: Path):
    order = an_order(1, "/bin/sh", "-c", f"echo ran >> {home}/proof")
    return structs.replace(order, run=structs.replace(order.run, node="hpc-workq", backend="hpc"))


def a_backend(home: Path):
    context = BackendContext("kill9", 1, home / "backends", SystemClock())
    system = object.__new__(PbsStandIn)
    system.home = home / "pbs"
    return system.backend(context, home / "output", "delegate")


async def serve(home: Path) -> None:
    """The server that is killed."""
    backend = a_backend(home)
    await backend.open()
    print("open", flush=True)
    await backend.start([an_order_for(home)])


def test_a_job_being_submitted_when_the_server_is_killed_is_awaited_and_adopted(tmp_path):
    slow = PbsStandIn(tmp_path / "pbs").home / "qsub"
    slow.rename(slow.with_name("real-qsub"))
    real = slow.with_name("inner")
    real.mkdir()
    # The stand-in finds its command by its name and its jobs by its directory.
    text = (
        slow.with_name("real-qsub")
        .read_text()
        .replace("os.path.dirname(os.path.abspath(sys.argv[0]))", repr(str(slow.parent)))
    )
    (real / "qsub").write_text(text)
    (real / "qsub").chmod(0o755)
    # One second is longer than the kill and the start of the next server take.
    slow.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\nsleep 1\nexec {real}/qsub "$@"\n')
    slow.chmod(0o755)
    code = f"import asyncio, sys; from pathlib import Path; from real.slurm.test_killed_server import serve; asyncio.run(serve(Path({str(tmp_path)!r})))"
    tests = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": tests}
    server = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)

    async def scenario() -> None:
        for _ in range(1000):
            if (tmp_path / "called").exists():
                break
            await asyncio.sleep(0.02)
        os.kill(server.pid, signal.SIGKILL)
        server.communicate()
        backend = a_backend(tmp_path)
        await backend.open()
        recorder = ReconnectingRecorder(backend, 60)
        assert await backend.start([an_order_for(tmp_path)]) == {}
        assert (await recorder.end_of("1.0.1")).state == "succeeded"
        assert (tmp_path / "proof").read_text() == "ran\n"
        await backend.close()

    asyncio.run(scenario())
