"""Status files: lines of a wrapper are read; damaged lines are ignored."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.agent.spawn import Status, parse_wrapper, read_status

COMPLETE = b"7.0.1 pid 4711 4711\n7.0.1 exit 13 13\n"


def read(path, data: bytes, name: str = "7.0.1") -> Status:
    (path / "status").write_bytes(data)
    return read_status(name, str(path))


def facts(status: Status) -> tuple[int, int | None, str]:
    return status.pid, status.code, status.error


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(COMPLETE, (4711, 13, ""), id="ended"),
        pytest.param(b"7.0.1 pid 5 5\n", (5, None, ""), id="running"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 error workdir\n", (5, None, "workdir"), id="not started"),
        pytest.param(b"6.0.1 pid 4 4\n6.0.1 exit 0 0\n7.0.1 pid 5 5\n", (5, None, ""), id="a reused directory"),
        pytest.param(b"7.0.1 pid 5\n7.0.1 exit 3\n", (5, 3, ""), id="a wrapper of an older agent"),
    ],
)
def test_lines_of_a_wrapper_are_read(tmp_path, data, found):
    status = read(tmp_path, data)
    assert (*facts(status), status.sound, status.exists) == (*found, True, True)
    assert abs(status.written_ms - (tmp_path / "status").stat().st_mtime_ns // 1_000_000) == 0


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13 1", (4711, None, ""), id="half written"),
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13\n", (4711, None, ""), id="half a line with an end"),
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13 14\n", (4711, None, ""), id="two numbers"),
        pytest.param(b"7.0.1 exit 13\n", (0, None, ""), id="an exit without a pid"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 exit 1 1\n7.0.1 exit 2 2\n", (0, None, ""), id="two ends"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 exit 999 999\n", (5, None, ""), id="an invalid exit code"),
        pytest.param("7.0.1 pid \u00b2 \u00b2\n".encode(), (0, None, ""), id="digits outside of ASCII"),
        pytest.param(b"7.0.1 pid " + b"9" * 5000 + b"\n", (0, None, ""), id="a very long number"),
        pytest.param(b"7.0.1 error nonsense\n", (0, None, ""), id="an unknown error"),
        pytest.param(b"\0" * 300, (0, None, ""), id="zeros"),
        pytest.param(b"\xff\xfe\n\n", (0, None, ""), id="binary"),
        pytest.param(b"8.0.1 pid 5 5\n", (0, None, ""), id="a damaged name in the first line"),
    ],
)
def test_damaged_lines_are_ignored_and_reported_as_unsound(tmp_path, data, found):
    status = read(tmp_path, data)
    assert (*facts(status), status.sound) == (*found, False)


def test_a_missing_or_special_file_causes_no_error_and_no_hang(tmp_path):
    assert read_status("7.0.1", str(tmp_path / "absent")) == Status()
    os.mkfifo(tmp_path / "status")
    assert not read_status("7.0.1", str(tmp_path)).sound
    os.unlink(tmp_path / "status")
    (tmp_path / "status").mkdir()
    assert not read_status("7.0.1", str(tmp_path)).sound
    (tmp_path / "status").rmdir()
    (tmp_path / "status").symlink_to("/etc/passwd")
    assert not read_status("7.0.1", str(tmp_path)).sound


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(COMPLETE) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_changes_the_exit_code(tmp_path_factory, index, flip):
    data = bytearray(COMPLETE)
    data[index] ^= flip
    status = read(tmp_path_factory.mktemp("status"), bytes(data))
    assert status.code in (13, None)
    # It must not look like a run that did not start, which would be started again.
    assert status.pid or status.code is not None or not status.sound


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_proves_neither_a_start_nor_an_end(tmp_path_factory, data):
    status = read(tmp_path_factory.mktemp("status"), data)
    assert facts(status) == (0, None, "")
    assert not status.sound or not data


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (
            ["hodei", "-c", "S", "hodei", "1.0.1", "/w", "0", "{}", "/g/cgroup.procs", "--", "x"],
            ("1.0.1", ("/g",), "{}"),
        ),
        (["hodei", "-c", "S", "hodei", "1.0.1", "/w", "0", "", "--", "x"], ("1.0.1", (), "")),
        (["hodei", "-c", "S", "hodei", "1.0.1", "/w", "0", "/g/cgroup.procs", "--", "x"], ("1.0.1", ("/g",), "")),
        (["sh", "-c", "S", "hodei", "1.0.1", "/w", "0", "--", "x"], None),
        ([], None),
    ],
)
def test_a_wrapper_is_recognised_by_its_command_line(argv, found):
    wrapper = parse_wrapper(argv)
    assert (None if wrapper is None else (wrapper.run, wrapper.groups, wrapper.claim)) == found
