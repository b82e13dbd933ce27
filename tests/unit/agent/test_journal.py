"""The journal: synced records are read back; torn and damaged lines are skipped."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.agent.journal import Journal, read_copy, write_copy


def steps(path) -> list[str]:
    journal = Journal(str(path))
    try:
        return [step["run"] for step in journal.replay()]
    finally:
        journal.close()


def test_synced_records_are_read_back_in_order(tmp_path):
    journal = Journal(str(tmp_path / "j"))
    for run in ("a", "b", "c"):
        journal.add({"step": "claimed", "run": run})
    assert steps(tmp_path / "j") == []
    journal.sync()
    assert steps(tmp_path / "j") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("torn", "unreadable"),
    [
        (b'{"step":"done","ru', 0), (b"\x00\xff\n", 1), (b"[1]\n", 1), (b"\n\n", 0), (b'{"no":"step"}\n', 1),
        (b'{"step":"done","run":"x"} 00000000\n', 1), (b'{"step":7,"run":"x"}\n', 1), (b"[" * 100_000 + b"\n", 1),
    ],
)  # fmt: skip
def test_a_torn_or_foreign_line_is_skipped_without_the_next_record(tmp_path, torn, unreadable):
    path = tmp_path / "j"
    path.write_bytes(b'{"step":"claimed","run":"a"}\n' + torn)
    journal = Journal(str(path))
    assert [step["run"] for step in journal.replay()] == ["a"]
    assert journal.unreadable == unreadable
    journal.add({"step": "claimed", "run": "b"})
    journal.sync()
    assert steps(path) == ["a", "b"]


def test_a_full_disk_loses_no_buffered_record(tmp_path, monkeypatch):
    journal = Journal(str(tmp_path / "j"))
    journal.add({"step": "claimed", "run": "a"})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    with pytest.raises(OSError, match="full"):
        journal.sync()
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
    with pytest.raises(OSError, match="no space"):
        journal.sync()
    monkeypatch.setattr(os, "write", real)
    journal.sync()
    assert steps(tmp_path / "j") == ["a"]
    reopened = Journal(str(tmp_path / "j"))
    assert len(list(reopened.replay())) == 1
    assert reopened.unreadable == 0  # a torn line does not count as damage


def test_compaction_replaces_everything(tmp_path):
    journal = Journal(str(tmp_path / "j"))
    for run in range(100):
        journal.add({"step": "claimed", "run": str(run)})
    journal.sync()
    journal.compact([{"step": "claimed", "run": "99"}])
    journal.add({"step": "claimed", "run": "100"})
    journal.sync()
    assert steps(tmp_path / "j") == ["99", "100"]


def test_a_journal_without_checksums_is_read_and_gets_them(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"step":"claimed","run":"a"}\n{"step":"done","run":"a"}\n')
    journal = Journal(str(path))
    journal.compact(list(journal.replay()))
    assert all(not line.endswith(b"}") for line in path.read_bytes().splitlines())
    assert steps(path) == ["a", "a"]


RUNS = [f"i/{number}.0.1" for number in range(5)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_byte_loses_at_most_two_records_and_changes_none(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = Journal(str(path))
    written = [{"step": "done", "run": run, "end": {"exit_code": 13}} for run in RUNS]
    for step in written:
        journal.add(step)
    journal.sync()
    journal.close()
    bytes_ = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(bytes_) - 1))
    bytes_[index] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(bytes_))
    journal = Journal(str(path))
    read = list(journal.replay())
    journal.close()
    assert len(read) >= len(RUNS) - 2
    assert all(step in written for step in read)
    # A lost record is counted, unless it looks like a torn last line.
    assert journal.unreadable or len(read) == len(RUNS) or index >= len(bytes_) - len(bytes_) // len(RUNS)


def test_the_readable_records_of_a_copy_are_read(tmp_path):
    path = tmp_path / "epochs"
    assert read_copy(str(path)) == []
    written = [{"step": "epoch", "installation": name, "epoch": 7} for name in ("a", "b")]
    write_copy(str(path), written)
    assert read_copy(str(path)) == written
    path.write_bytes(b"\xff\0" + path.read_bytes())
    assert read_copy(str(path)) == written[1:]
