"""The journal: what was synced is read back, and nothing that is torn can hurt."""

from __future__ import annotations

import errno
import os

import pytest

from hodei.agent.journal import Journal


def steps(path) -> list[str]:
    journal = Journal(str(path))
    try:
        return [step["run"] for step in journal.replay()]
    finally:
        journal.close()


def test_what_was_synced_is_read_back_in_order(tmp_path):
    journal = Journal(str(tmp_path / "j"))
    for run in ("a", "b", "c"):
        journal.add({"step": "claimed", "run": run})
    assert steps(tmp_path / "j") == []
    journal.sync()
    assert steps(tmp_path / "j") == ["a", "b", "c"]


@pytest.mark.parametrize("torn", [b'{"step":"done","ru', b"\x00\xff\n", b"[1]\n", b"\n\n", b'{"no":"step"}\n'])
def test_a_torn_or_foreign_line_is_skipped_and_the_next_step_is_not_swallowed(tmp_path, torn):
    path = tmp_path / "j"
    path.write_bytes(b'{"step":"claimed","run":"a"}\n' + torn)
    journal = Journal(str(path))
    assert [step["run"] for step in journal.replay()] == ["a"]
    journal.add({"step": "claimed", "run": "b"})
    journal.sync()
    assert steps(path) == ["a", "b"]


def test_a_full_disk_loses_nothing_that_was_gathered(tmp_path, monkeypatch):
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


def test_compacting_replaces_everything(tmp_path):
    journal = Journal(str(tmp_path / "j"))
    for run in range(100):
        journal.add({"step": "claimed", "run": str(run)})
    journal.sync()
    journal.compact([{"step": "claimed", "run": "99"}])
    journal.add({"step": "claimed", "run": "100"})
    journal.sync()
    assert steps(tmp_path / "j") == ["99", "100"]
