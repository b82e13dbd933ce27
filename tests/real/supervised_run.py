"""Run 1.0.1 under a real agent: commands that wait and that save checkpoints, and a start that waits until it is ready."""

from __future__ import annotations

import sys
from typing import Any

from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.model.effects import Start
from hodei.model.node import Grant
from hodei.testing.backend import sh

RUN = "1.0.1"
HOUR_MS = 3_600_000
WAITS = sh("echo ready; exec sleep 300")
# Saves a checkpoint on SIGUSR1 and continues. The rename makes the checkpoint appear whole.
_SAVES = """
import os, signal, time
def save(*_):
    with open(os.environ["HODEI_CHECKPOINT_FILE"] + ".new", "w") as file:
        file.write("step 7")
    os.rename(file.name, os.environ["HODEI_CHECKPOINT_FILE"])
    print("saved", flush=True)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
while True:
    time.sleep(300)
"""


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", script)


SAVES_ON_USR1 = python(_SAVES)


def with_grant(order: Start, grant: Grant) -> Start:
    return structs.replace(order, run=structs.replace(order.run, grant=grant))


async def begin(recorder: ReconnectingRecorder, *command: str, grant: Grant | None = None, **fields: Any) -> None:
    """Start run 1.0.1 and wait until it has written "ready"."""
    order = an_order(1, *command, **fields)
    assert await recorder.backend.start([with_grant(order, grant) if grant else order]) == {}
    await recorder.log_has(RUN, b"ready")
