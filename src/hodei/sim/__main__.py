"""`python -m hodei.sim replay|compare|forecasts|policies|traces`, which is what `hodei sim` becomes.

Exit codes: 0 all is done; 1 something failed on the way; 2 the command line or an input is wrong; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from types import FrameType

from hodei.model.errors import HodeiError, InvalidInput
from hodei.model.subcommands import Parser, or_help
from hodei.sim.commands import compare, forecasts, lists, replay

_ABOUT = """\
Try out scheduling: the scheduler itself, moved through simulated time by a recorded or invented workload.

  hodei sim replay kth.swf.gz --policy easy --procs 100
  hodei sim compare 'generate:lublin?jobs=5000' --policies fcfs,easy,conservative --out report
  hodei sim forecasts kth.swf.gz --policies easy,sjf --procs 100
"""


def main(args: list[str] | None = None) -> int:
    parser = Parser(prog="hodei sim", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    for module in (replay, compare, forecasts, lists):
        module.add_arguments(kinds)
    given = parser.parse_args(or_help(sys.argv[1:] if args is None else args))
    try:
        code: int = given.go(given)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone: no complaint at exit either
        return 141
    except KeyboardInterrupt:
        return 130
    except (HodeiError, OSError) as error:
        return _complain(error)
    return code


def _complain(error: HodeiError | OSError) -> int:
    if os.environ.get("HODEI_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}\n[OS]", file=sys.stderr)
        return 1
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  next: {error.hint}", file=sys.stderr)
    print(f"[{error.code}]", file=sys.stderr)
    return 2 if isinstance(error, InvalidInput) else 1


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as an exception, so that nothing half-written is left behind


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
