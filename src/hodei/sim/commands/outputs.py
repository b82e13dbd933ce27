"""Files and folders that appear whole or not at all. They are tried before the work, so that a wrong name is told at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hodei.model.errors import InvalidInput
from hodei.sim.metrics import Outcome, Result


@contextmanager
def folder_for(out: Path | None) -> Iterator[Path | None]:
    """A folder to write into, which becomes `out` at the end (in one that is there already: file by file, those of the
    same names replaced). After any exception nothing is left of it. None for None."""
    if out is None:
        yield None
        return
    target = out.resolve()
    made: list[Path] = []
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"cannot write to {out}: it is not a folder", hint="name another with --out")
    try:
        if not target.is_dir():
            made = _make_parents(target.parent)
        staging = (target if target.is_dir() else target.parent) / f".{target.name}.{os.getpid()}.tmp"
        staging.mkdir()
    except OSError as error:
        _remove_empty(made)
        raise _unwritable(out, error, "--out") from error
    done = False
    try:
        yield staging
        _move(staging, target)
        done = True
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not done:
            _remove_empty(made)


@contextmanager
def file_for(path: Path | None) -> Iterator[Path | None]:
    """The same for one file. What is no regular file (a pipe, /dev/stdout) is written to as it is."""
    if path is None:
        yield None
        return
    if path.is_dir():
        raise InvalidInput(f"cannot write to {path}: it is a folder", hint="name a file with --waits")
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        staging.touch()
    except OSError as error:
        raise _unwritable(path, error, "--waits") from error
    try:
        yield staging
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def write_waits(path: Path, results: Sequence[Result]) -> None:
    """`id,wait_s` of one result; of several `id` and a column for each policy. Empty for a job that never started."""
    names = ["wait_s"] if len(results) == 1 else [result.policy for result in results]
    columns = [{outcome.id: _wait_s(outcome) for outcome in result.outcomes} for result in results]
    with path.open("w", encoding="utf-8") as file:
        file.write(f"id,{','.join(names)}\n")
        for id in sorted({id for column in columns for id in column}):
            file.write(f"{id},{','.join(column.get(id, '') for column in columns)}\n")


def _wait_s(outcome: Outcome) -> str:
    if outcome.started_ms < 0:
        return ""
    seconds, rest = divmod(outcome.wait_ms, 1000)
    return f"{seconds}.{rest:03}" if rest else str(seconds)


def _move(staging: Path, target: Path) -> None:
    if not target.is_dir():
        staging.rename(target)
        return
    # The page last: whoever finds it finds its pictures too.
    for file in sorted(staging.iterdir(), key=lambda file: (file.suffix == ".html", file.name)):
        file.replace(target / file.name)


def _make_parents(folder: Path) -> list[Path]:
    """Those that were missing, the deepest first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return  # someone else has put something there


def _unwritable(path: Path, error: OSError, option: str) -> InvalidInput:
    return InvalidInput(f"cannot write to {path}: {error.strerror}", hint=f"name another place with {option}")
