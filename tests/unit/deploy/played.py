"""Programs that do nothing but write down how they were called, in the place of real ones. They prove what a script asks for
and in which order, and nothing of what the real programs would make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def played(folder: Path, **programs: str) -> Callable[[], list[str]]:
    """`programs`: what each does besides, in sh. The answer tells all calls so far, a line each: the name and the words."""
    folder.mkdir(parents=True)
    calls = folder / "calls"
    for name, does in programs.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n{does}\n')
        file.chmod(0o755)
    return lambda: calls.read_text().splitlines() if calls.exists() else []
