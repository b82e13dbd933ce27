"""Checkpoint hooks, the checkpoint state of a run, and file probes of disks that may not answer."""

from __future__ import annotations

import asyncio
import json
import os
import threading

import pytest

from hodei.agent import probes
from hodei.agent.probes import FileProbes
from hodei.agent.run import BadHook, BadOrder, Hook, Run
from hodei.agent.spawn import SCRIPT
from hodei.supervision import CHECKPOINT_SIGNALS, StopPlan

NOW_MS = 1_700_000_000_000


def a_run(**order) -> Run:
    run = Run("test", "1.0.1", "/home/runs/test/1.0.1")
    run.claimed_ms = NOW_MS
    run.apply_order({"argv": ["true"], **order}, {"HOME": "/root", "PATH": "/bin"})
    return run


def saved_at(ms: int, size: int = 1) -> tuple[int, int, int]:
    return ms * 1_000_000, 7, size


@pytest.mark.parametrize(
    ("order", "hook"),
    [
        pytest.param(None, None, id="none"),
        pytest.param({}, None, id="empty"),
        pytest.param({"signal": "", "command": [], "timeout_ms": 5}, None, id="nothing to do"),
        pytest.param({"signal": "USR1", "timeout_ms": 5}, Hook("USR1", (), 5), id="a signal"),
        pytest.param({"signal": "sigusr2"}, Hook("USR2", (), 30_000), id="a signal with another spelling"),
        pytest.param({"command": ["a", ""], "timeout_ms": 0}, Hook("", ("a", ""), 30_000), id="a command"),
    ],
)
def test_a_hook_is_read_from_its_order(order, hook):
    assert Hook.from_order(order) == hook
    if hook is not None:
        assert Hook.from_order(json.loads(json.dumps(hook.as_order()))) == hook


@pytest.mark.parametrize(
    "order",
    [
        {"signal": "KILL"}, {"signal": "STOP"}, {"signal": "XCPU"}, {"signal": "x" * 1000}, {"signal": 10},
        {"command": "echo"}, {"command": [1]}, {"command": ["a\0b"]}, {"signal": "USR1", "timeout_ms": -1},
        {"signal": "USR1", "timeout_ms": "soon"},
    ],
    ids=str,
)  # fmt: skip
def test_an_unusable_hook_is_refused_with_a_reason(order):
    with pytest.raises(BadHook) as caught:
        Hook.from_order(order)
    assert 10 < len(str(caught.value)) < 200


def test_the_wrapper_survives_every_checkpoint_signal():
    trapped = set(SCRIPT.split("trap : ")[1].split(";")[0].split())
    ignored_by_default = {"CONT", "URG", "WINCH"}
    assert trapped | ignored_by_default == set(CHECKPOINT_SIGNALS)


@pytest.mark.parametrize(
    ("order", "file", "watched"),
    [
        pytest.param({}, "/home/runs/test/1.0.1/checkpoint", False, id="none"),
        pytest.param({"checkpoint_file": ""}, "/home/runs/test/1.0.1/checkpoint", True, id="the default file"),
        pytest.param({"checkpoint_file": "/srv/x"}, "/srv/x", True, id="another file"),
        pytest.param({"checkpoint_file": "x", "workdir": "/srv"}, "/srv/x", True, id="relative to its workdir"),
    ],
)
def test_every_run_gets_its_checkpoint_file_in_the_environment(order, file, watched):
    run = a_run(env={"HODEI_CHECKPOINT_FILE": "/elsewhere"}, **order)
    assert (run.env["HODEI_CHECKPOINT_FILE"], run.checkpoint_file, run.checkpoint_watched) == (file, file, watched)


@pytest.mark.parametrize("file", [7, "a\0b"])
def test_an_invalid_checkpoint_file_is_refused(file):
    with pytest.raises(BadOrder, match="checkpoint"):
        a_run(checkpoint_file=file)


def test_a_checkpoint_counts_once_and_only_if_it_was_written_by_this_run():
    run = a_run(checkpoint_file="")
    assert not run.update_checkpoint(None, NOW_MS)
    assert not run.update_checkpoint(saved_at(NOW_MS - 1000), NOW_MS)
    assert run.update_checkpoint(saved_at(NOW_MS + 5), NOW_MS + 9)
    assert not run.update_checkpoint(saved_at(NOW_MS + 5), NOW_MS + 9)
    assert run.checkpoint_ms == NOW_MS + 5
    assert not run.update_checkpoint(saved_at(NOW_MS + 3), NOW_MS + 9)
    assert run.checkpoint_ms == NOW_MS + 5


def test_a_time_in_the_future_is_now():
    run = a_run(checkpoint_file="")
    assert run.update_checkpoint(saved_at(NOW_MS * 2), NOW_MS + 9)
    assert not run.update_checkpoint(saved_at(NOW_MS * 2), NOW_MS + 12)
    assert run.checkpoint_ms == NOW_MS + 9


def test_the_journal_restores_a_stop_in_the_middle_of_its_hook():
    run = a_run(checkpoint_file="/srv/x")
    run.pid, run.checkpoint_ms = 5, NOW_MS + 1
    run.stop = StopPlan("", "why", 900, 600, 300, True, "note")
    run.hook, run.hook_started, run.hook_before = Hook("", ("save", "it"), 500), True, (1, 2, 3)
    restored = Run("test", "1.0.1", run.directory)
    records = (run.claimed_record(), run.started_record(), run.checkpoint_record(), run.stop_record(run.stop))
    for record in records:
        restored.replay(json.loads(json.dumps(record)))
    not_stored = {"argv", "env", "limits", "timers", "workdir"}
    for name in set(Run.__slots__) - not_stored:
        assert getattr(restored, name) == getattr(run, name), name


def test_a_journal_without_hooks_is_readable():
    run = Run("test", "1.0.1", "/x")
    run.replay({"step": "stopping", "run": "test/1.0.1", "code": "stop", "reason": "why", "kill_at": 9})
    assert (run.stop, run.hook) == (StopPlan("", "why", 9), None)


@pytest.mark.parametrize(
    ("hook", "code", "state", "reason"),
    [
        pytest.param(Hook("USR1"), 0, "succeeded", None, id="succeeded during the hook"),
        pytest.param(Hook("USR1"), 3, "stopped", "why; note", id="failed during the hook"),
        pytest.param(None, 0, "stopped", "why; note", id="ended by the stop"),
        pytest.param(Hook("USR1"), None, "stopped", "why; note", id="end unknown"),
    ],
)
def test_a_success_during_the_hook_is_the_outcome_of_the_run(hook, code, state, reason):
    run = a_run()
    run.stop, run.hook = StopPlan("", "why", 9, saving=hook is not None, note="note"), hook
    run.checkpoint_ms = 8
    end = run.describe_end(code=code, error="", oom=False, at_ms=9)
    assert (end["state"], end.get("reason"), end["checkpoint_ms"]) == (state, reason, 8)


def test_a_probe_sees_every_change(tmp_path):
    file = tmp_path / "saved"
    assert probes.stat_file(str(file)) is None
    file.write_text("1")
    first = probes.stat_file(str(file))
    os.utime(file, ns=(0, first[0]))
    file.with_suffix(".new").write_text("22")
    os.rename(file.with_suffix(".new"), file)
    os.utime(file, ns=(0, first[0]))
    assert probes.stat_file(str(file)) != first
    assert probes.stat_file("a\0b") is None


def test_a_disk_that_does_not_answer_blocks_only_its_own_probes(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.01)

    def stat_file(path: str) -> tuple[int, int, int]:
        if path == "/dead":
            release.wait(20)
        return (1, 2, 3)

    monkeypatch.setattr(probes, "stat_file", stat_file)

    async def scenario() -> None:
        files = FileProbes(asyncio.get_running_loop())
        results: list[object] = []
        try:
            assert files.wait("/alive") == (1, 2, 3)
            files.request("/dead", results.append)
            assert files.wait("/alive") is None
            assert files.wait("/alive") is None
            assert results == []
        finally:
            release.set()
        answered = asyncio.Event()
        files.request("/alive", lambda result: answered.set())
        await asyncio.wait_for(answered.wait(), 20)
        assert results == [(1, 2, 3)]

    asyncio.run(scenario())
