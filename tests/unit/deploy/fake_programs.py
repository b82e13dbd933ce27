"""Fake programs that only record their calls. They prove what a script calls and in which order, not what the real
programs would do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def record_calls(folder: Path, **programs: str) -> Callable[[], list[str]]:
    """`programs`: the body of each in sh. Returns a function with all calls so far, each as name and arguments."""
    folder.mkdir(parents=True)
    calls = folder / "calls"
    for name, body in programs.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n{body}\n')
        file.chmod(0o755)
    return lambda: calls.read_text().splitlines() if calls.exists() else []
