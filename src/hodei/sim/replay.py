"""`hodei replay [LOG]`: decide everything in a decision log again, and compare the plans."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from hodei.cli.groups import exit_code
from hodei.control.controller import Controller
from hodei.control.snapshot import load, modules_of
from hodei.engine.plan import Plan
from hodei.extensions import BUILT_IN as KNOWN_EXTENSIONS
from hodei.extensions import ESTIMATORS
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import AnyFact, Reconfigured
from hodei.plugins.registry import BUILT_IN
from hodei.plugins.trial import in_use
from hodei.runtime.decision_log import CONTINUED, FORMAT, closed_segments, state_path
from hodei.server.home import CONFIG_FILES
from hodei.wiring import load_config, make_controller

_NAME = "decisions.jsonl"


class Header(msgspec.Struct):
    """`segment`: its number. `gap`: what happened right before it was not written."""

    hodei_decision_log: int
    config: SchedulingConfig
    last_event: int = 0
    segment: int = 0
    gap: bool = False

    @property
    def continues(self) -> bool:
        return self.hodei_decision_log == CONTINUED


class Line(msgspec.Struct):
    now: int
    facts: list[AnyFact]
    plan: msgspec.Raw


class Difference(msgspec.Struct):
    path: Path
    line: int
    now: int
    logged: bytes
    decided: bytes


class Result(msgspec.Struct):
    """`left_out`: files that nothing can be said of, as the state at their beginning is not known."""

    steps: int = 0
    facts: int = 0
    binds: int = 0
    files: int = 0
    difference: Difference | None = None
    left_out: list[Path] = []


class Part(msgspec.Struct):
    """One file of a log, opened. `name`: that of the whole log, without a number."""

    path: Path
    name: Path
    header: Header

    @property
    def state(self) -> Path:
        return state_path(self.name, self.header.segment)


def open_part(path: Path) -> Part:
    try:
        _, first = next(_lines(path))
        header = msgspec.json.decode(first, type=Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidInput(f"{path} is not a decision log: {str(error) or 'it is empty'}") from error
    if header.hodei_decision_log not in (FORMAT, CONTINUED):
        raise InvalidInput(f"{path} is of format {header.hodei_decision_log}, which this version does not know")
    return Part(path, path.with_name(re.sub(r"\.\d+$", "", path.name)), header)


def parts_of(path: Path) -> list[Part]:
    """All that is kept of the log that is being written to `path`, the oldest first."""
    paths = [segment.path for segment in closed_segments(path)] + ([path] if path.exists() else [])
    if not paths:
        raise InvalidInput(f"there is no decision log at {path}", hint="name its file: hodei replay FILE")
    return [open_part(each) for each in paths]


def with_its_beginning(path: Path) -> list[Part]:
    """A file of a log and, if the state at its beginning is not known, those before it from one at which it is."""
    last = open_part(path)
    chain = [last]
    earlier = {each.header.segment: each for each in parts_of(last.name)} if last.header.continues else {}
    while (first := chain[0]).header.continues and not first.state.exists():
        before = earlier.get(first.header.segment - 1)
        if before is None or first.header.gap:
            raise InvalidInput(
                f"{path} goes on from a state that is not known: there is no {first.state.name} beside it",
                hint="keep the .state files with the log",
            )
        chain.insert(0, before)
    return chain


def beginning(part: Part, trusted: Collection[str] | None = ()) -> Controller:
    """A scheduler that stands where that of the log stood before the first line of this file. `trusted`: the plugins
    that the log may name besides the built-in ones; None for any."""
    refuse_strange_plugins(part.header.config, trusted, str(part.path))
    controller = make_controller(part.header.config, part.header.last_event, trusted=trusted)
    if not part.header.continues:
        return controller
    try:
        state = part.state.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {part.state}: {error.strerror}") from error
    restored = load(state, modules_of(controller))
    restored.remake = controller.remake
    return restored


def refuse_strange_plugins(config: SchedulingConfig, trusted: Collection[str] | None, where: str) -> None:
    """InvalidInput if it names a plugin that is neither built in nor trusted: to load one is to run its code."""
    strange = (
        set() if trusted is None else in_use(config) - BUILT_IN - KNOWN_EXTENSIONS[ESTIMATORS].keys() - set(trusted)
    )
    if strange:
        names = ", ".join(repr(name[:80]) for name in sorted(strange)[:5])
        raise InvalidInput(
            f"{where} names {names}, which is neither built in nor in use here",
            hint="only if you trust the authors of the log and of that code: --trust-plugins",
        )


def trusted_in(home: Path, log: Path | None) -> frozenset[str] | None:
    """The plugins that a log may name: any in a log that lies in the home (its server wrote it), else those of the
    configuration there."""
    if log is None or log.resolve().parent == home.resolve():
        return None
    names = frozenset[str]()
    for path in (home / name for name in CONFIG_FILES):
        if path.exists():
            names |= in_use(load_config(path).scheduling)
    return names


def replay(path: Path) -> Result:
    return replay_parts(with_its_beginning(path))


def replay_parts(parts: list[Part], trusted: Collection[str] | None = ()) -> Result:
    """Each file goes on from the one before it if it can, else from the state that was written down. `trusted`: as for
    `beginning`."""
    result, controller, before = Result(), None, None
    for part in parts:
        header = part.header
        follows = before is not None and header.segment == before + 1 and not header.gap
        if not header.continues or controller is None or not follows:
            if header.continues and not part.state.exists():
                result.left_out.append(part.path)
                controller = None
                continue
            controller = beginning(part, trusted)
        before = header.segment
        result.files += 1
        _decide(part, controller, result, trusted)
        if result.difference is not None:
            break
    return result


def _decide(part: Part, controller: Controller, result: Result, trusted: Collection[str] | None) -> None:
    decoder, lines = msgspec.json.Decoder(Line), _lines(part.path)
    next(lines)
    for number, raw in lines:
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{part.path}, line {number}: {error}") from error
        for fact in line.facts:
            if isinstance(fact, Reconfigured):
                refuse_strange_plugins(fact.scheduling, trusted, f"{part.path}, line {number}")
        plan = controller.step(line.now, line.facts).plan
        result.steps += 1
        result.facts += len(line.facts)
        result.binds += len(plan.binds)
        decided, logged = msgspec.json.encode(plan), bytes(line.plan)
        # What is as by default may be written or not, after a state was read: then the values count.
        if decided != logged and plan != msgspec.json.decode(logged, type=Plan):
            result.difference = Difference(part.path, number, line.now, logged, decided)
            return


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the last words of a server that was killed; what they were cannot be known
                yield number, line
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _show(difference: Difference) -> str:
    """The first entry in which the two plans differ."""
    logged, decided = (msgspec.json.decode(side, type=Plan) for side in (difference.logged, difference.decided))
    for kind in ("binds", "refusals", "faults", "evictions"):
        pairs = zip(getattr(logged, kind), getattr(decided, kind), strict=False)
        for place, (before, now) in enumerate(pairs):
            if before != now:
                return f"{kind}[{place}]\n  logged:  {before}\n  decided: {now}"
        if len(getattr(logged, kind)) != len(getattr(decided, kind)):
            return f"{len(getattr(logged, kind))} {kind} logged, {len(getattr(decided, kind))} decided"
    return f"\n  logged:  {difference.logged[:400]!r}\n  decided: {difference.decided[:400]!r}"


def _listed(parts: list[Part]) -> Iterator[str]:
    """One line for each file: from when to when, how large, and from what it can be decided again."""
    for part in parts:
        times = [int(found[1]) for _, raw in _lines(part.path) if (found := re.match(rb'\{"now":(\d+)', raw))]
        span = " to ".join(_moment(at) for at in (times[0], times[-1])) if times else "no steps"
        base = "its state" if part.state.exists() else "the file before it" if part.header.continues else "a start"
        size = part.path.stat().st_size + (part.state.stat().st_size if part.state.exists() else 0)
        yield f"{part.path.name:<24} {span}  {size / 2**20:8.1f} MiB  {len(times):>9} steps  from {base}"


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@click.command("replay", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log", metavar="[LOG]", required=False, type=click.Path(path_type=Path))
@click.option("--home", type=click.Path(path_type=Path), help="Home directory of the server, without LOG.")
@click.option("--all", is_flag=True, help="With LOG: all files of that log, the oldest first.")
@click.option("--list", is_flag=True, help="Only list the files that are kept.")
@click.option("--trust-plugins", is_flag=True, help="Load every plugin that the log names: their code runs as you.")
@click.option("--json", is_flag=True, help="Print the result as JSON.")
def replay_command(**options: Any) -> int:
    """Decide everything in a decision log again, and report whether every plan is the same.

    LOG: one file of a log. Without it: all that is kept of the log of the server in HODEI_HOME (or ~/.hodei).
    A log of another place may name only built-in plugins and those of the configuration in that home: see
    --trust-plugins.

    Exit code 0: identical. 1: the first difference is shown. 2: not a log that can be read.
    """
    given = SimpleNamespace(**options)
    home = given.home or Path(os.environ.get("HODEI_HOME") or "~/.hodei").expanduser()
    whole = given.all or given.list or given.log is None
    parts = parts_of(given.log or home / _NAME) if whole else with_its_beginning(given.log)
    if given.list:
        print("\n".join(_listed(parts)))
        return 0
    trusted = None if given.trust_plugins else trusted_in(home, given.log)
    result = replay_parts(parts, trusted)
    if not result.files:
        raise InvalidInput(
            f"nothing of the log can be decided again: the state at the beginning of {result.left_out[0].name}"
            " is not known, nor that of a later file",
            hint="the server's log says why; a larger server.decision_log_size, or a restart, begins anew",
        )
    same = result.difference is None
    if given.json:
        at = result.difference.line if result.difference else None
        print(msgspec.json.encode({"identical": same, "steps": result.steps, "facts": result.facts,
                                   "binds": result.binds, "line": at, "files": result.files}).decode())  # fmt: skip
    elif result.difference is None:
        files = f" in {result.files} files" if result.files > 1 else ""
        print(f"identical: {result.steps} steps, {result.facts} facts, {result.binds} binds{files}")
    else:
        file = f"{result.difference.path.name}, " if len(parts) > 1 else ""
        print(f"different at {file}line {result.difference.line} (step {result.steps}): {_show(result.difference)}")
    for path in result.left_out:
        print(f"left out: {path.name}, the state at its beginning is not known", file=sys.stderr)
    return 0 if same else 1


def main(args: list[str] | None = None) -> int:
    return exit_code(replay_command.main, args, "hodei replay", invalid_input=2)


if __name__ == "__main__":
    sys.exit(main())
