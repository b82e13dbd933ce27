"""Status files: what a wrapper wrote is believed, and what has been damaged since is never taken for something else."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.agent.spawn import Status, read_status, wrapper_of

WHOLE = b"7.0.1 pid 4711 4711\n7.0.1 exit 13 13\n"


def read(path, data: bytes, name: str = "7.0.1") -> Status:
    (path / "status").write_bytes(data)
    return read_status(name, str(path))


def facts(status: Status) -> tuple[int, int | None, str]:
    return status.pid, status.code, status.error


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(WHOLE, (4711, 13, ""), id="ended"),
        pytest.param(b"7.0.1 pid 5 5\n", (5, None, ""), id="running"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 error workdir\n", (5, None, "workdir"), id="not tried"),
        pytest.param(b"6.0.1 pid 4 4\n6.0.1 exit 0 0\n7.0.1 pid 5 5\n", (5, None, ""), id="a directory handed on"),
        pytest.param(b"7.0.1 pid 5\n7.0.1 exit 3\n", (5, 3, ""), id="a wrapper of an older agent"),
    ],
)
def test_what_a_wrapper_wrote_is_read(tmp_path, data, found):
    status = read(tmp_path, data)
    assert (*facts(status), status.sound, status.exists) == (*found, True, True)
    assert abs(status.written_ms - (tmp_path / "status").stat().st_mtime_ns // 1_000_000) == 0


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13 1", (4711, None, ""), id="half written"),
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13\n", (4711, None, ""), id="half a line with an end"),
        pytest.param(b"7.0.1 pid 4711 4711\n7.0.1 exit 13 14\n", (4711, None, ""), id="two numbers"),
        pytest.param(b"7.0.1 exit 13\n", (0, None, ""), id="an end without a beginning"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 exit 1 1\n7.0.1 exit 2 2\n", (0, None, ""), id="two ends"),
        pytest.param(b"7.0.1 pid 5 5\n7.0.1 exit 999 999\n", (5, None, ""), id="no exit code"),
        pytest.param("7.0.1 pid \u00b2 \u00b2\n".encode(), (0, None, ""), id="digits of another kind"),
        pytest.param(b"7.0.1 pid " + b"9" * 5000 + b"\n", (0, None, ""), id="a number without end"),
        pytest.param(b"7.0.1 error nonsense\n", (0, None, ""), id="no such error"),
        pytest.param(b"\0" * 300, (0, None, ""), id="zeros"),
        pytest.param(b"\xff\xfe\n\n", (0, None, ""), id="binary"),
        pytest.param(b"8.0.1 pid 5 5\n", (0, None, ""), id="our first line with a damaged name"),
    ],
)
def test_what_is_damaged_is_not_believed_and_said_to_be_so(tmp_path, data, found):
    status = read(tmp_path, data)
    assert (*facts(status), status.sound) == (*found, False)


def test_what_is_no_file_neither_fails_nor_hangs(tmp_path):
    assert read_status("7.0.1", str(tmp_path / "gone")) == Status()
    os.mkfifo(tmp_path / "status")
    assert not read_status("7.0.1", str(tmp_path)).sound
    os.unlink(tmp_path / "status")
    (tmp_path / "status").mkdir()
    assert not read_status("7.0.1", str(tmp_path)).sound
    (tmp_path / "status").rmdir()
    (tmp_path / "status").symlink_to("/etc/passwd")
    assert not read_status("7.0.1", str(tmp_path)).sound


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_no_flipped_byte_makes_another_exit_code_of_it(tmp_path_factory, at, flip):
    data = bytearray(WHOLE)
    data[at] ^= flip
    status = read(tmp_path_factory.mktemp("status"), bytes(data))
    assert status.code in (13, None)
    # And never a run that was not born: that would be started a second time.
    assert status.pid or status.code is not None or not status.sound


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_neither_an_end_nor_a_proof(tmp_path_factory, data):
    status = read(tmp_path_factory.mktemp("status"), data)
    assert facts(status) == (0, None, "")
    assert not status.sound or not data


@pytest.mark.parametrize(
    ("words", "found"),
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
def test_a_wrapper_is_known_by_its_words(words, found):
    wrapper = wrapper_of(words)
    assert (None if wrapper is None else (wrapper.run, wrapper.groups, wrapper.claim)) == found
