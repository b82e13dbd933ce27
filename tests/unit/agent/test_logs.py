"""Logs: offsets count every byte ever written, whether or not it was kept."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.agent import logs

CAP = 16_384


def read_all(directory: str, limit: int = 1000) -> bytes:
    out, offset = b"", 0
    while True:
        data, offset = logs.read(directory, "stdout", offset, limit)
        if not data:
            return out
        out += data


@pytest.fixture(params=["punched", "cut"])
def method(request, monkeypatch):
    if request.param == "cut":
        monkeypatch.setattr(logs, "_punch", lambda fd, start, length: False)
    return request.param


def test_a_log_within_its_cap_is_not_changed(tmp_path, method):
    (tmp_path / "stdout").write_bytes(b"x" * CAP)
    logs.trim(str(tmp_path), "stdout", CAP)
    assert read_all(str(tmp_path)) == b"x" * CAP


def test_past_the_cap_one_line_replaces_the_dropped_bytes(tmp_path, method):
    whole = b"".join(b"%08d" % n for n in range(10_000))
    (tmp_path / "stdout").write_bytes(whole)
    logs.trim(str(tmp_path), "stdout", CAP)
    output = read_all(str(tmp_path))
    dropped = len(whole) - (CAP if method == "punched" else CAP // 2)
    assert output.startswith(whole[: CAP // 2] + f"\n[... {dropped} bytes dropped ...]\n".encode())
    if method == "punched":
        assert output.endswith(whole[-CAP // 2 :])


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 40_000), max_size=8), cut=st.booleans())
def test_a_follower_reads_every_byte_or_a_line_that_replaces_them(tmp_path_factory, sizes, cut):
    directory = tmp_path_factory.mktemp("log")
    punch = logs._punch
    logs._punch = (lambda fd, start, length: False) if cut else punch
    try:
        whole = b""
        for size in sizes:
            part = bytes((len(whole) + n) % 251 for n in range(size))
            whole += part
            with open(directory / "stdout", "ab") as file:
                file.write(part)
            logs.trim(str(directory), "stdout", CAP)
    finally:
        logs._punch = punch
    offset, seen = 0, 0
    while True:
        data, after = logs.read(str(directory), "stdout", offset, 5000)
        if not data:
            break
        if data.startswith(b"\n[... ") and whole[offset:after] != data:
            assert data == f"\n[... {after - offset} bytes dropped ...]\n".encode()
        else:
            assert whole[offset:after] == data
        offset, seen = after, seen + len(data)
    assert offset == len(whole)
    assert seen <= 2 * CAP + 100


@pytest.mark.parametrize(
    ("stream", "offset", "limit"), [("status", 0, 1), ("../x", 0, 1), ("", 0, 1), ("stdout", -1, 1), ("stdout", 0, -1)]
)
def test_only_the_two_streams_can_be_read(tmp_path, stream, offset, limit):
    with pytest.raises(logs.LogError):
        logs.read(str(tmp_path), stream, offset, limit)


@pytest.mark.parametrize(
    "gap", [b"", b"\0\xff\xfe", b"12", b"-5 -1 0", b"9 3 0", b"1 99999999999 0", b"1 2 x", b"9" * 5000, None, "fifo"]
)
def test_a_damaged_gap_file_hides_no_output(tmp_path, gap):
    (tmp_path / "stdout").write_bytes(b"x" * 3 * CAP)
    if gap is None:
        (tmp_path / "stdout.gap").mkdir()
    elif gap == "fifo":
        os.mkfifo(tmp_path / "stdout.gap")
    else:
        (tmp_path / "stdout.gap").write_bytes(gap)
    assert logs.read(str(tmp_path), "stdout", 0, 10) == (b"x" * 10, 10)
    assert logs.read(str(tmp_path), "stdout", 3 * CAP - 10, 100) == (b"x" * 10, 3 * CAP)
    with contextlib.suppress(OSError):
        logs.trim(str(tmp_path), "stdout", CAP)
