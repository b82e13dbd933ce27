"""The commands of a queueing system, with real processes that stand in for them."""

from __future__ import annotations

import asyncio

from hodei.backends.hpc.commands import Commands
from hodei.backends.hpc.slurm_commands import _executed


def test_a_command_that_is_not_over_in_time_has_said_what_it_said():
    done = asyncio.run(Commands().run(("sh", "-c", "echo begin; echo err >&2; exec sleep 300"), timeout_s=2))
    told = _executed(done)
    assert (told.exit_code, told.stdout) == (None, b"begin\n")
    assert told.stderr == b"err\nsh did not answer within 2 s\n"
