"""Run directories: reused only without output and without open files."""

from __future__ import annotations

import os

import pytest

from hodei.agent.spawn import CHECKPOINT, HOOK, RunDirs, read_status


@pytest.fixture
def dirs(tmp_path):
    (tmp_path / "i").mkdir()
    return RunDirs(str(tmp_path))


def make_run_dir(dirs: RunDirs, name: str, output: bytes = b"") -> str:
    path = dirs.path("i", name)
    dirs.make(path)
    for file in ("stdout", "stderr", "status"):
        with open(f"{path}/{file}", "ab") as handle:
            handle.write({"stdout": output, "status": b"1 pid 7\n1 exit 0\n"}.get(file, b""))
    return path


def test_the_directory_of_a_silent_run_is_reused_without_its_status(dirs):
    first = make_run_dir(dirs, "1")
    inode = os.stat(first).st_ino
    dirs.release(first)
    dirs.make(dirs.path("i", "2"))
    assert os.stat(dirs.path("i", "2")).st_ino == inode
    status = read_status("2", dirs.path("i", "2"))
    assert (status.pid, status.code, status.error) == (0, None, "")
    assert not os.path.exists(first)


def test_output_is_kept(dirs):
    first = make_run_dir(dirs, "1", b"text")
    dirs.release(first)
    dirs.make(dirs.path("i", "2"))
    assert sorted(os.listdir(first)) == ["stderr", "stdout"]


@pytest.mark.parametrize("output", [b"", b"text"])
def test_other_files_are_removed_when_the_run_is_forgotten(dirs, output):
    first = make_run_dir(dirs, "1", output)
    for name in (CHECKPOINT, f"{CHECKPOINT}.new", HOOK):
        with open(f"{first}/{name}", "w") as file:
            file.write("7")
    os.makedirs(f"{first}/parts/deep")
    dirs.release(first)
    second = dirs.path("i", "2")
    dirs.make(second)
    files = {*os.listdir(second), *(os.listdir(first) if output else ())}
    assert files <= {"status", "stdout", "stderr"}


def test_a_directory_with_an_open_log_is_not_reused(dirs):
    first = make_run_dir(dirs, "1")
    inode = os.stat(first).st_ino
    with open(f"{first}/stdout", "ab"):
        dirs.release(first)
    dirs.make(dirs.path("i", "2"))
    assert os.stat(dirs.path("i", "2")).st_ino != inode


@pytest.mark.parametrize("spare", [False, True])
def test_a_run_never_gets_a_directory_that_exists(dirs, spare):
    make_run_dir(dirs, "1")
    if spare:
        dirs.release(make_run_dir(dirs, "2"))
    with pytest.raises(FileExistsError):
        dirs.make(dirs.path("i", "1"))


def test_prune_removes_old_directories_of_forgotten_runs(dirs):
    for name in ("old", "needed", "young"):
        make_run_dir(dirs, name, b"text")
    for name in ("old", "needed"):
        for file in ("stdout", "stderr"):
            os.utime(f"{dirs.path('i', name)}/{file}", (1000, 1000))
    dirs.prune(2000, {"i/needed"})
    assert [os.path.exists(dirs.path("i", name)) for name in ("old", "needed", "young")] == [False, True, True]
