"""Run directories: used again only when nothing was said and nobody holds them."""

from __future__ import annotations

import os

import pytest

from hodei.agent.journal import HOOK, MARK, RunDirs
from hodei.agent.spawn import read_status


@pytest.fixture
def places(tmp_path):
    (tmp_path / "i").mkdir()
    return RunDirs(str(tmp_path))


def born(places: RunDirs, name: str, said: bytes = b"") -> str:
    path = places.path("i", name)
    places.make(path)
    for file in ("stdout", "stderr", "status"):
        with open(f"{path}/{file}", "ab") as handle:
            handle.write({"stdout": said, "status": b"1 pid 7\n1 exit 0\n"}.get(file, b""))
    return path


def test_a_silent_run_hands_its_directory_on_and_none_of_its_words(places):
    first = born(places, "1")
    inode = os.stat(first).st_ino
    places.leave(first)
    places.make(places.path("i", "2"))
    assert os.stat(places.path("i", "2")).st_ino == inode
    status = read_status("2", places.path("i", "2"))
    assert (status.pid, status.code, status.error) == (0, None, "")
    assert not os.path.exists(first)


def test_what_was_said_stays(places):
    first = born(places, "1", b"words")
    places.leave(first)
    places.make(places.path("i", "2"))
    assert sorted(os.listdir(first)) == ["stderr", "stdout"]


@pytest.mark.parametrize("said", [b"", b"words"])
def test_whatever_else_a_run_put_there_goes_when_it_is_forgotten(places, said):
    first = born(places, "1", said)
    for name in (MARK, f"{MARK}.new", HOOK):
        with open(f"{first}/{name}", "w") as file:
            file.write("7")
    os.makedirs(f"{first}/parts/deep")
    places.leave(first)
    second = places.path("i", "2")
    places.make(second)
    left = {*os.listdir(second), *(os.listdir(first) if said else ())}
    assert left <= {"status", "stdout", "stderr"}


def test_a_directory_whose_log_someone_still_holds_is_not_used_again(places):
    first = born(places, "1")
    inode = os.stat(first).st_ino
    with open(f"{first}/stdout", "ab"):
        places.leave(first)
    places.make(places.path("i", "2"))
    assert os.stat(places.path("i", "2")).st_ino != inode


@pytest.mark.parametrize("spare", [False, True])
def test_a_run_is_never_put_where_one_has_been(places, spare):
    born(places, "1")
    if spare:
        places.leave(born(places, "2"))
    with pytest.raises(FileExistsError):
        places.make(places.path("i", "1"))


def test_pruning_removes_what_is_old_and_not_needed(places):
    for name in ("old", "needed", "young"):
        born(places, name, b"words")
    for name in ("old", "needed"):
        for file in ("stdout", "stderr"):
            os.utime(f"{places.path('i', name)}/{file}", (1000, 1000))
    places.prune(2000, {"i/needed"})
    assert [os.path.exists(places.path("i", name)) for name in ("old", "needed", "young")] == [False, True, True]
