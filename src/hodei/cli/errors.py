"""Report errors on stderr (what, where, what to do next, and a stable code), and their exit codes."""

from __future__ import annotations

import os
import traceback

import click

from hodei.cli.output import clean, uses_colour
from hodei.model.errors import Conflict, HodeiError, InvalidInput, NotFound

OK, ERROR, USAGE, NOT_FOUND, DENIED, UNSCHEDULABLE = 0, 1, 2, 3, 4, 5
TIMED_OUT, UNREACHABLE, CONFLICT, JOB_FAILED = 6, 7, 8, 10

_PROBLEMS_SHOWN = 20


class UsageProblem(HodeiError):
    """The command line or an input file is wrong."""

    code = "USAGE"


def report(error: BaseException) -> int:
    """Print the error on stderr; returns the exit code. A traceback is printed only with HODEI_DEBUG."""
    if os.environ.get("HODEI_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, click.Abort):
        return 130
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # A bare `hodei` or `hodei job` asks for help.
        click.echo(error.format_message())
        return OK
    for line in describe(error):
        click.echo(_painted(line), err=True)
    return exit_code_of(error)


def _painted(line: str) -> str:
    """`error:` in red, `next:` in cyan and the code in grey, on a terminal with colours."""
    if not uses_colour(err=True):
        return line
    for start, style in (("error: ", {"fg": "red", "bold": True}), ("  next: ", {"fg": "cyan"})):
        if line.startswith(start):
            return click.style(start, **style) + line.removeprefix(start)
    return click.style(line, fg="bright_black") if line.startswith("[") else line


def describe(error: BaseException) -> list[str]:
    if isinstance(error, click.ClickException):
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"{error.ctx.command_path} --help"
        text = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            # click sorts them by name; the closest comes first.
            text = f"{error.message.rstrip('.')}; did you mean {' or '.join(list(error.possibilities)[:3])}?"
        return _lines(text, hint=hint, code="USAGE")
    if isinstance(error, HodeiError):
        problems = error.problems if isinstance(error, InvalidInput) else ()
        if len(problems) == 1:
            path, text = problems[0]
            if error.message.startswith(path or text) or error.message.endswith(f"{path}: {text}"):
                problems = ()  # the message already has this problem
        return _lines(error.message, problems=problems, hint=error.hint, code=error.code)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _lines(f"{where}{error.strerror}", code="OS")
    what = f"unexpected {type(error).__name__}: {error}"
    return _lines(what, hint="this is a bug in hodei; run it again with HODEI_DEBUG=1 and report it", code="BUG")


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, click.UsageError | UsageProblem):
        return USAGE
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, Conflict):
        return CONFLICT
    if isinstance(error, HodeiError):
        from hodei.client import Denied, ServerUnreachable, WaitTimedOut  # lazy: a wrong option needs no client

        for kind, code in ((Denied, DENIED), (ServerUnreachable, UNREACHABLE), (WaitTimedOut, TIMED_OUT)):
            if isinstance(error, kind):
                return code
    return ERROR


def _lines(what: str, *, problems: tuple[tuple[str, str], ...] = (), hint: str = "", code: str) -> list[str]:
    out = [f"error: {clean(what)}"]
    out += [
        f"  {clean(path)}: {clean(text)}" if path else f"  {clean(text)}" for path, text in problems[:_PROBLEMS_SHOWN]
    ]
    if len(problems) > _PROBLEMS_SHOWN:
        out.append(f"  … and {len(problems) - _PROBLEMS_SHOWN} more")
    if hint:
        out.append(f"  next: {clean(hint)}")
    return [*out, f"[{code}]"]
