"""A detached process outlives its starter, inherits nothing from it, and may be dropped without a warning."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

import pytest

from hodei.backends.agent_link import AgentSupervisor
from hodei.process import UNKNOWN_EXIT_CODE, DetachedProcess


@pytest.fixture
def sleeper(tmp_path):
    script = tmp_path / "sleeper"
    script.write_text("#!/bin/sh\nexec sleep 300\n")
    script.chmod(0o700)
    return str(script)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_dropped_handle_of_a_running_process_gives_no_warning(tmp_path, sleeper):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        process = DetachedProcess([sleeper], tmp_path / "log")
        pid = process.pid
        assert process.poll() is None
        assert os.getsid(pid) == pid
        del process
        gc.collect()
    _end(pid)
    assert not caught


def test_the_supervisor_may_be_dropped_while_its_agent_runs(tmp_path, sleeper, monkeypatch):
    monkeypatch.setattr(sys, "executable", sleeper)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        supervisor = AgentSupervisor(
            "local", tmp_path, "test", 1, linger_s=1, keep_logs_s=1,
            on_observations=lambda observations: None, on_outage=lambda error: None,
        )  # fmt: skip
        supervisor._start_agent_unless_running()
        pid = supervisor._agent.pid
        del supervisor
        gc.collect()
    _end(pid)
    assert not caught


def test_the_exit_code_and_the_output_are_recorded(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    process = DetachedProcess(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], log)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (process.poll(), process.poll()) == (3, 3)
    assert log.read_text() == "before\nout\nerr\n"


def test_an_exit_status_collected_elsewhere_is_unknown(tmp_path):
    process = DetachedProcess(["/bin/true"], tmp_path / "log")
    os.waitpid(process.pid, 0)
    assert process.poll() == UNKNOWN_EXIT_CODE


def test_inheritable_files_of_the_starter_stay_closed(tmp_path):
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(held, True)
    try:
        process = DetachedProcess(["/bin/sh", "-c", f"[ ! -e /dev/fd/{held} ]"], tmp_path / "log")
    finally:
        os.close(held)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.poll() == 0


def test_a_missing_program_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        DetachedProcess([str(tmp_path / "absent")], tmp_path / "log")
