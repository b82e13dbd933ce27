from __future__ import annotations

import os

import pytest

from hodei.agent import logs
from hodei.agent.logs import LogTimes, read_times


def _append(directory, text: bytes, stream: str = "stdout") -> None:
    with open(directory / stream, "ab") as log:
        log.write(text)


def test_a_mark_is_added_only_when_a_log_has_grown(tmp_path):
    times = LogTimes()
    _append(tmp_path, b"")
    times.update([str(tmp_path)], 1000)
    assert read_times(str(tmp_path), "stdout") == []
    assert sorted(os.listdir(tmp_path)) == ["stdout"]  # the directory of a run without output is reused
    _append(tmp_path, b"one\n")
    times.update([str(tmp_path)], 2000)
    times.update([str(tmp_path)], 3000)
    _append(tmp_path, b"two\n")
    _append(tmp_path, b"bad\n", "stderr")
    times.update([str(tmp_path)], 4000)
    assert read_times(str(tmp_path), "stdout") == [(4, 2000), (8, 4000)]
    assert read_times(str(tmp_path), "stderr") == [(4, 4000)]


def test_the_last_output_of_a_run_is_marked_when_it_ends(tmp_path):
    times = LogTimes()
    _append(tmp_path, b"one\n")
    _append(tmp_path, b"", "stderr")
    times.update([str(tmp_path)], 2000)
    _append(tmp_path, b"two\n")
    _append(tmp_path, b"bad\n", "stderr")
    times.end(str(tmp_path), 2700)
    assert read_times(str(tmp_path), "stdout") == [(4, 2000), (8, 2700)]
    assert read_times(str(tmp_path), "stderr") == [(4, 2700)]
    times.end(str(tmp_path), 2800)
    assert read_times(str(tmp_path), "stdout") == [(4, 2000), (8, 2700)]


def test_a_run_that_ended_before_the_first_update_has_no_marks(tmp_path):
    _append(tmp_path, b"one\n")
    LogTimes().end(str(tmp_path), 2000)
    assert sorted(os.listdir(tmp_path)) == ["stdout"]


def test_a_restarted_agent_continues_the_marks(tmp_path):
    _append(tmp_path, b"one\n")
    LogTimes().update([str(tmp_path)], 2000)
    restarted = LogTimes()
    restarted.update([str(tmp_path)], 5000)
    _append(tmp_path, b"two\n")
    restarted.update([str(tmp_path)], 6000)
    assert read_times(str(tmp_path), "stdout") == [(4, 2000), (8, 6000)]


def test_a_long_log_has_a_bounded_number_of_marks_over_its_whole_length(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_MARKS", 10)
    times = LogTimes()
    for second in range(1, 101):
        _append(tmp_path, b"line\n")
        times.update([str(tmp_path)], second * 1000)
    found = read_times(str(tmp_path), "stdout")
    assert 5 <= len(found) <= 10
    assert found[0] == (5, 1000)
    assert found[-1] == (500, 100_000)


def test_dropped_bytes_count_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_punch", lambda *_: False)  # like a file system without holes
    _append(tmp_path, b"x" * 10_000)
    logs.trim(str(tmp_path), "stdout", 4096)
    _append(tmp_path, b"more\n")
    assert logs.written(str(tmp_path), "stdout") == 10_005


@pytest.mark.parametrize("found", [b"", b"\0\xff", b"12", b"-5 3\n", b"9 3\n8 4\n", b"9" * 5000, None, "fifo"])
def test_damaged_times_are_skipped(tmp_path, found):
    if found is None:
        (tmp_path / "stdout.times").mkdir()
    elif found == "fifo":
        os.mkfifo(tmp_path / "stdout.times")
    else:
        (tmp_path / "stdout.times").write_bytes(found)
    assert read_times(str(tmp_path), "stdout") in ([], [(9, 3)])
    assert read_times(str(tmp_path), "../secret") == []
    _append(tmp_path, b"one\n")
    LogTimes().update([str(tmp_path), str(tmp_path / "absent")], 1000)  # neither stops the update
