"""The progress of a simulated run on a pseudo-terminal, read back through a small screen.

The screen knows only the control sequences of the progress lines.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from hodei.sim.commands.output import Progress

DAY = 86_400_000
_TOKEN = re.compile(r"\x1b\[(\d*)([A-Z])|(.)", re.DOTALL)


class Screen:
    """Rows of characters, and the number of wrapped lines."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column, self.wrapped = width, [""], 0, 0, 0

    def show(self, text: str) -> None:
        for number, command, letter in _TOKEN.findall(text):
            if command == "A":
                self.row -= int(number or 1)
                assert self.row >= 0, "the cursor moved above the first row"
            elif command == "K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif command == "J":
                self.rows[self.row] = self.rows[self.row][: self.column]
                del self.rows[self.row + 1 :]
            elif letter == "\r":
                self.column = 0
            elif letter == "\n":
                self._down()
            else:
                assert not command, f"the sequence {command} is not known here"
                self._put(letter)

    def _put(self, letter: str) -> None:
        if self.column == self.width:
            self.wrapped += 1
            self.column = 0
            self._down()
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")


@contextmanager
def a_terminal(width: int) -> Iterator[tuple[int, int]]:
    """The controlling side and the side of the program."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    try:
        yield controller, terminal
    finally:
        os.close(controller)
        os.close(terminal)


def output_of(controller: int) -> str:
    """All that has been written so far."""
    out = b""
    while select.select([controller], [], [], 0)[0]:
        out += os.read(controller, 65_536)
    return out.decode()


@pytest.fixture(autouse=True)
def a_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def advanced(names: list[str], stream: TextIO) -> Progress:
    """Each run has done 12,345 of 28,481 jobs in ten seconds."""
    progress = Progress(names, stream, shown=True)
    for index in range(len(names)):
        progress.begin(index)
        progress._runs[index].began_s = time.monotonic() - 10
    for index in range(len(names)):
        progress._drawn_s = 0.0
        progress.update(index, 123 * DAY, 12_345, 28_481)
    return progress


@pytest.mark.parametrize("names", [["easy"], ["fcfs", "easy", "conservative"]], ids=["one run", "three runs"])
@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_progress_lines_fit_into_any_width(width: int, names: list[str]):
    with a_terminal(width) as (controller, terminal), os.fdopen(os.dup(terminal), "w") as stream:
        progress = advanced(names, stream)
        screen = Screen(width)
        screen.show(output_of(controller))
        assert screen.wrapped == 0
        assert len(screen.rows) == len(names)
        for row in screen.rows:
            assert "43%" in row
            assert "day 123 00h" in row
            assert re.search(r"1,2\d\d( jobs)?/s", row)
            assert row.endswith("13 s left")
        progress.clear()
        screen.show(output_of(controller))
        assert screen.rows == [""]


@pytest.mark.parametrize("width", [10, 1])
def test_progress_lines_do_not_wrap_on_a_very_narrow_terminal(width: int):
    with a_terminal(width) as (controller, terminal), os.fdopen(os.dup(terminal), "w") as stream:
        advanced(["easy", "conservative"], stream)
        screen = Screen(width)
        screen.show(output_of(controller))
        assert screen.wrapped == 0
        assert len(screen.rows) == 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 40])
def test_a_replay_shows_its_progress_and_clears_it_at_the_end(width: int):
    command = [sys.executable, "-m", "hodei.sim", "replay", "generate:lublin?jobs=4000", "--policy", "easy"]
    with (
        a_terminal(width) as (controller, terminal),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, stdin=subprocess.DEVNULL) as program,
    ):
        screen, seen, wrapped = Screen(width), set(), 0
        while program.poll() is None:
            if select.select([controller], [], [], 0.05)[0]:
                screen.show(os.read(controller, 65_536).decode())
                shown = [row for row in screen.rows if "left" in row]
                seen.update(shown)
                wrapped = screen.wrapped if shown else wrapped  # the notes afterwards may be longer than a row
        screen.show(output_of(controller))
        assert program.stdout is not None
        out = program.stdout.read().decode()
    assert program.returncode == 0
    assert wrapped == 0
    assert seen
    assert all(re.search(r"\d+%.* day \d+ \d\dh .*\d( jobs)?/s.* left$", row) for row in seen), seen
    assert not any("left" in row for row in screen.rows)
    assert "bounded slowdown" in out


@pytest.mark.slow
def test_a_replay_with_redirected_stderr_shows_no_progress():
    command = [sys.executable, "-m", "hodei.sim", "replay", "generate:lublin?jobs=4000", "--policy", "easy"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert b"\x1b" not in done.stderr
    assert b"left" not in done.stderr
