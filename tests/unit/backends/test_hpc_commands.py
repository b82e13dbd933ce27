"""Commands of a batch system, with real processes."""

from __future__ import annotations

import asyncio

from hodei.backends.hpc.commands import Commands
from hodei.backends.hpc.slurm import executed


def test_the_output_of_a_command_that_times_out_is_kept():
    done = asyncio.run(Commands().run(("sh", "-c", "echo begin; echo err >&2; exec sleep 300"), timeout_s=2))
    result = executed(done)
    assert (result.exit_code, result.stdout) == (None, b"begin\n")
    assert result.stderr == b"err\nsh did not answer within 2 s\n"
