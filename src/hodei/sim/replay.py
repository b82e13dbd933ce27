"""`hodei replay [FILE]`: makes every decision of a decision log again and compares the plans."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from hodei.cli.groups import exit_code
from hodei.cli.options import output_option
from hodei.cli.output import Column, emit_list, emit_one
from hodei.cli.times import iso
from hodei.configuration import load_config
from hodei.control.controller import Controller
from hodei.control.snapshot import load, modules_of
from hodei.engine.plan import Plan
from hodei.extensions import BUILT_IN as KNOWN_EXTENSIONS
from hodei.extensions import ESTIMATORS
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import AnyFact, Reconfigured
from hodei.plugins.registry import BUILT_IN, plugins_in_use
from hodei.runtime.decision_log import CONTINUED, FORMAT, closed_segments, state_path
from hodei.server.home import CONFIG_FILES
from hodei.wiring import make_controller

_NAME = "decisions.jsonl"


class Header(msgspec.Struct):
    """The first line of a file. `gap`: steps right before it were not logged."""

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
    """`skipped`: files that cannot be replayed, because their initial state is unknown."""

    steps: int = 0
    facts: int = 0
    binds: int = 0
    files: int = 0
    difference: Difference | None = None
    skipped: list[Path] = []


class Segment(msgspec.Struct):
    """One file of a log. `log`: the path of the log, without the number of the segment."""

    path: Path
    log: Path
    header: Header

    @property
    def state(self) -> Path:
        return state_path(self.log, self.header.segment)


def open_segment(path: Path) -> Segment:
    try:
        _, first = next(_lines(path))
        header = msgspec.json.decode(first, type=Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidInput(f"{path} is not a decision log: {str(error) or 'it is empty'}") from error
    if header.hodei_decision_log not in (FORMAT, CONTINUED):
        raise InvalidInput(f"{path} is of format {header.hodei_decision_log}, which this version does not know")
    return Segment(path, path.with_name(re.sub(r"\.\d+$", "", path.name)), header)


def segments_of(path: Path) -> list[Segment]:
    """All files of the log at `path`, the oldest first."""
    paths = [segment.path for segment in closed_segments(path)] + ([path] if path.exists() else [])
    if not paths:
        raise InvalidInput(f"there is no decision log at {path}", hint="name its file: hodei replay FILE")
    return [open_segment(each) for each in paths]


def segments_to_replay(path: Path) -> list[Segment]:
    """A file and, if its initial state is unknown, the files before it back to one with a known initial state."""
    last = open_segment(path)
    chain = [last]
    earlier = {each.header.segment: each for each in segments_of(last.log)} if last.header.continues else {}
    while (first := chain[0]).header.continues and not first.state.exists():
        before = earlier.get(first.header.segment - 1)
        if before is None or first.header.gap:
            raise InvalidInput(
                f"the initial state of {path} is unknown: there is no {first.state.name} next to it",
                hint="keep the .state files with the log",
            )
        chain.insert(0, before)
    return chain


def restore_controller(segment: Segment, trusted: Collection[str] | None = ()) -> Controller:
    """The controller before the first step of this file. `trusted`: plugins that the log may name; None for any."""
    refuse_untrusted_plugins(segment.header.config, trusted, str(segment.path))
    controller = make_controller(segment.header.config, segment.header.last_event, trusted=trusted)
    if not segment.header.continues:
        return controller
    try:
        state = segment.state.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {segment.state}: {error.strerror}") from error
    restored = load(state, modules_of(controller))
    restored.rebuild = controller.rebuild
    return restored


def refuse_untrusted_plugins(config: SchedulingConfig, trusted: Collection[str] | None, where: str) -> None:
    """InvalidInput if the configuration names a plugin that is neither built in nor trusted: loading one runs its code."""
    untrusted = (
        set()
        if trusted is None
        else plugins_in_use(config) - BUILT_IN - KNOWN_EXTENSIONS[ESTIMATORS].keys() - set(trusted)
    )
    if untrusted:
        names = ", ".join(repr(name[:80]) for name in sorted(untrusted)[:5])
        raise InvalidInput(
            f"{where} names {names}, which is neither built in nor configured here",
            hint="add --trust-plugins if you trust the authors of the log and of that code",
        )


def trusted_plugins(home: Path, log: Path | None) -> frozenset[str] | None:
    """The plugins that a log may name: any in the home directory, else those of the configuration there."""
    if log is None or log.resolve().parent == home.resolve():
        return None
    names = frozenset[str]()
    for path in (home / name for name in CONFIG_FILES):
        if path.exists():
            names |= plugins_in_use(load_config(path).scheduling)
    return names


def replay(path: Path) -> Result:
    return replay_segments(segments_to_replay(path))


def replay_segments(segments: list[Segment], trusted: Collection[str] | None = ()) -> Result:
    """Each file continues from the one before it, else from its saved state. `trusted`: see `restore_controller`."""
    result, controller, before = Result(), None, None
    for segment in segments:
        header = segment.header
        follows = before is not None and header.segment == before + 1 and not header.gap
        if not header.continues or controller is None or not follows:
            if header.continues and not segment.state.exists():
                result.skipped.append(segment.path)
                controller = None
                continue
            controller = restore_controller(segment, trusted)
        before = header.segment
        result.files += 1
        _replay_segment(segment, controller, result, trusted)
        if result.difference is not None:
            break
    return result


def _replay_segment(segment: Segment, controller: Controller, result: Result, trusted: Collection[str] | None) -> None:
    decoder, lines = msgspec.json.Decoder(Line), _lines(segment.path)
    next(lines)
    for number, raw in lines:
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{segment.path}, line {number}: {error}") from error
        for fact in line.facts:
            if isinstance(fact, Reconfigured):
                refuse_untrusted_plugins(fact.scheduling, trusted, f"{segment.path}, line {number}")
        plan = controller.step(line.now, line.facts).plan
        result.steps += 1
        result.facts += len(line.facts)
        result.binds += len(plan.binds)
        decided, logged = msgspec.json.encode(plan), bytes(line.plan)
        # Encoded defaults may differ after a state was restored, so the decoded values decide.
        if decided != logged and plan != msgspec.json.decode(logged, type=Plan):
            result.difference = Difference(segment.path, number, line.now, logged, decided)
            return


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # a line cut off when the server was killed
                yield number, line
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _describe(difference: Difference) -> str:
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


class SegmentView(msgspec.Struct):
    """One file of `--list`. `state`: where its initial state comes from."""

    name: str
    from_at: str
    until_at: str
    bytes: int
    steps: int
    state: str


_SEGMENT_COLUMNS = (
    Column("FILE", lambda s: s.name),
    Column("FROM", lambda s: s.from_at or "-"),
    Column("UNTIL", lambda s: s.until_at or "-"),
    Column("SIZE", lambda s: f"{s.bytes / 2**20:.1f} MiB", right=True),
    Column("STEPS", lambda s: f"{s.steps}", right=True),
    Column("INITIAL STATE", lambda s: s.state),
)


def _describe_segment(segment: Segment) -> SegmentView:
    times = [int(found[1]) for _, raw in _lines(segment.path) if (found := re.match(rb'\{"now":(\d+)', raw))]
    has_state = segment.state.exists()
    state = "state file" if has_state else "previous file" if segment.header.continues else "server start"
    size = segment.path.stat().st_size + (segment.state.stat().st_size if has_state else 0)
    first, last = (iso(times[0]), iso(times[-1])) if times else ("", "")
    return SegmentView(segment.path.name, first, last, size, len(times), state)


@click.command("replay", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--home", metavar="DIR", type=click.Path(path_type=Path), help="Home directory of the server, without FILE."
)
@click.option("--all", is_flag=True, help="With FILE: all files of that log.")
@click.option("--list", is_flag=True, help="Only list the files of the log.")
@click.option("--trust-plugins", is_flag=True, help="Load every plugin that the log names: their code runs as you.")
@output_option
def replay_command(**options: Any) -> int:
    """Make every decision of a decision log again, and report whether all plans are identical.

    FILE: one file of a log. Without it: all files of the server's log in HODEI_HOME (or ~/.hodei). A log outside of
    that home may name only built-in plugins and those of the configuration there; see --trust-plugins.

    Exit code 0: identical. 1: the first difference is shown. 2: the log cannot be read.
    """
    given = SimpleNamespace(**options)
    home = given.home or Path(os.environ.get("HODEI_HOME") or "~/.hodei").expanduser()
    all_files = given.all or given.list or given.log is None
    segments = segments_of(given.log or home / _NAME) if all_files else segments_to_replay(given.log)
    if given.list:
        emit_list([_describe_segment(segment) for segment in segments], given.output, _SEGMENT_COLUMNS)
        return 0
    trusted = None if given.trust_plugins else trusted_plugins(home, given.log)
    result = replay_segments(segments, trusted)
    if not result.files:
        raise InvalidInput(
            f"no file of the log can be replayed: the initial state of {result.skipped[0].name} is unknown, and so are"
            " those of all later files",
            hint="the server's own log says why; a larger server.decision_log_size or a restart saves a new state",
        )
    same = result.difference is None
    numbers = {
        "identical": same, "steps": result.steps, "facts": result.facts, "binds": result.binds,
        "line": result.difference.line if result.difference else None, "files": result.files,
    }  # fmt: skip
    name = "identical" if same else "different"
    emit_one(numbers, given.output, name=lambda _: name, text=lambda _: _describe_result(result, len(segments)))
    for path in result.skipped:
        print(f"skipped: {path.name}, its initial state is unknown", file=sys.stderr)
    return 0 if same else 1


def _describe_result(result: Result, segments: int) -> str:
    if result.difference is None:
        files = f" in {result.files} files" if result.files > 1 else ""
        return f"identical: {result.steps} steps, {result.facts} facts, {result.binds} binds{files}"
    file = f"{result.difference.path.name}, " if segments > 1 else ""
    return f"different at {file}line {result.difference.line} (step {result.steps}): {_describe(result.difference)}"


def main(args: list[str] | None = None) -> int:
    return exit_code(replay_command.main, args, "hodei replay", invalid_input=2)


if __name__ == "__main__":
    sys.exit(main())
