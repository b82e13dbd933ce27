"""`python -m hodei.sim replay|compare|forecasts|policies|traces`, which `hodei sim` runs.

Exit codes: 0 done; 1 a run failed; 2 the command line or an input is wrong; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from hodei.cli.groups import Group, exit_code
from hodei.sim.commands import compare, forecasts, lists, replay


@click.group("sim", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def sim() -> None:
    """Try out policies: the real scheduler in simulated time, with a recorded or generated workload.

    \b
      hodei sim replay kth.swf.gz --policy easy --procs 100
      hodei sim compare 'generate:lublin?jobs=5000' --policies fcfs,easy,conservative --out report
      hodei sim forecasts kth.swf.gz --policies easy,sjf --procs 100
    """


for command in (replay.replay, compare.compare, forecasts.forecasts, lists.list_policies, lists.list_traces):
    sim.add_command(command)


def main(args: list[str] | None = None) -> int:
    return exit_code(sim.main, args, "hodei sim", invalid_input=2)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # an exception, so that temporary files are removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(main())
