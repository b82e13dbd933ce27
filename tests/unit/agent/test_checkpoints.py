"""Hooks as they are ordered, what a run remembers of its checkpoints, and looks at disks that may not answer."""

from __future__ import annotations

import asyncio
import json
import os
import threading

import pytest

from hodei.agent import probes
from hodei.agent.probes import ProbeThread
from hodei.agent.run import BadOrder, Run
from hodei.agent.spawn import SCRIPT, SIGNALS, BadHook, Hook

NOW_MS = 1_700_000_000_000


def a_run(**order) -> Run:
    run = Run("test", "1.0.1", "/home/runs/test/1.0.1")
    run.claimed_ms = NOW_MS
    run.take_orders({"argv": ["true"], **order}, {"HOME": "/root", "PATH": "/bin"})
    return run


def saved_at(ms: int, size: int = 1) -> tuple[int, int, int]:
    return ms * 1_000_000, 7, size


# ------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize(
    ("order", "hook"),
    [
        pytest.param(None, None, id="none"),
        pytest.param({}, None, id="empty"),
        pytest.param({"signal": "", "command": [], "timeout_ms": 5}, None, id="nothing to do"),
        pytest.param({"signal": "USR1", "timeout_ms": 5}, Hook("USR1", (), 5), id="a signal"),
        pytest.param({"signal": "sigusr2"}, Hook("USR2", (), 30_000), id="a signal in other words"),
        pytest.param({"command": ["a", ""], "timeout_ms": 0}, Hook("", ("a", ""), 30_000), id="a command"),
    ],
)
def test_a_hook_is_what_was_ordered(order, hook):
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
def test_a_hook_that_can_not_be_used_says_why(order):
    with pytest.raises(BadHook) as caught:
        Hook.from_order(order)
    assert 10 < len(str(caught.value)) < 200


def test_the_wrapper_outlives_every_signal_of_a_hook():
    trapped = set(SCRIPT.split("trap : ")[1].split(";")[0].split())
    ignored_unless_asked_for = {"CONT", "URG", "WINCH"}
    assert trapped | ignored_unless_asked_for == set(SIGNALS)


# ------------------------------------------------------------------------------------------- remembering


@pytest.mark.parametrize(
    ("order", "file", "watched"),
    [
        pytest.param({}, "/home/runs/test/1.0.1/checkpoint", False, id="nothing is said"),
        pytest.param({"checkpoint_file": ""}, "/home/runs/test/1.0.1/checkpoint", True, id="the given one"),
        pytest.param({"checkpoint_file": "/srv/x"}, "/srv/x", True, id="a file of its own"),
        pytest.param({"checkpoint_file": "x", "workdir": "/srv"}, "/srv/x", True, id="seen from its workdir"),
    ],
)
def test_every_run_is_told_its_checkpoint_file(order, file, watched):
    run = a_run(env={"HODEI_CHECKPOINT_FILE": "/elsewhere"}, **order)
    assert (run.env["HODEI_CHECKPOINT_FILE"], run.checkpoint_file, run.watched) == (file, file, watched)


@pytest.mark.parametrize("file", [7, "a\0b"])
def test_a_checkpoint_file_that_can_not_be_one_is_refused(file):
    with pytest.raises(BadOrder, match="checkpoint"):
        a_run(checkpoint_file=file)


def test_a_checkpoint_counts_once_and_only_if_it_is_of_this_run():
    run = a_run(checkpoint_file="")
    assert not run.saved(None, NOW_MS)
    assert not run.saved(saved_at(NOW_MS - 1000), NOW_MS)
    assert run.saved(saved_at(NOW_MS + 5), NOW_MS + 9)
    assert not run.saved(saved_at(NOW_MS + 5), NOW_MS + 9)
    assert run.checkpoint_ms == NOW_MS + 5
    assert not run.saved(saved_at(NOW_MS + 3), NOW_MS + 9)
    assert run.checkpoint_ms == NOW_MS + 5


def test_a_time_in_the_future_is_now():
    run = a_run(checkpoint_file="")
    assert run.saved(saved_at(NOW_MS * 2), NOW_MS + 9)
    assert not run.saved(saved_at(NOW_MS * 2), NOW_MS + 12)
    assert run.checkpoint_ms == NOW_MS + 9


def test_the_journal_brings_back_a_stop_in_the_middle_of_its_hook():
    run = a_run(checkpoint_file="/srv/x")
    run.pid, run.checkpoint_ms = 5, NOW_MS + 1
    run.stop_code, run.stop_reason, run.kill_at_boot_ms, run.stop_grace_ms = "stop", "why", 900, 300
    run.hook, run.hook_begun, run.hook_until_boot_ms = Hook("", ("save", "it"), 500), True, 600
    run.hook_before, run.hook_note = (1, 2, 3), "note"
    again = Run("test", "1.0.1", run.directory)
    for step in (run.claimed_step(), run.started_step(), run.saved_step(), run.stopping_step()):
        again.recall(json.loads(json.dumps(step)))
    forgotten = {"argv", "env", "limits", "timers", "workdir"}
    for name in set(Run.__slots__) - forgotten:
        assert getattr(again, name) == getattr(run, name), name


def test_a_journal_from_before_there_were_hooks_is_understood():
    run = Run("test", "1.0.1", "/x")
    run.recall({"step": "stopping", "run": "test/1.0.1", "code": "stop", "reason": "why", "kill_at": 9})
    assert (run.stop_code, run.hook, run.kill_at_boot_ms) == ("stop", None, 9)


@pytest.mark.parametrize(
    ("hook", "code", "state", "reason"),
    [
        pytest.param(Hook("USR1"), 0, "succeeded", None, id="made it while asked to save"),
        pytest.param(Hook("USR1"), 3, "stopped", "why; note", id="gave up while asked to save"),
        pytest.param(None, 0, "stopped", "why; note", id="ended when told to"),
        pytest.param(Hook("USR1"), None, "stopped", "why; note", id="was never seen again"),
    ],
)
def test_an_end_during_the_hook_is_the_runs_own(hook, code, state, reason):
    run = a_run()
    run.stop_code, run.stop_reason, run.hook, run.hook_note, run.checkpoint_ms = "stop", "why", hook, "note", 8
    end = run.ended(code=code, error="", oom=False, at_ms=9)
    assert (end["state"], end.get("reason"), end["checkpoint_ms"]) == (state, reason, 8)


# --------------------------------------------------------------------------------------------- looking


def test_a_look_sees_every_change(tmp_path):
    file = tmp_path / "saved"
    assert probes.look(str(file)) is None
    file.write_text("1")
    first = probes.look(str(file))
    os.utime(file, ns=(0, first[0]))
    file.with_suffix(".new").write_text("22")
    os.rename(file.with_suffix(".new"), file)
    os.utime(file, ns=(0, first[0]))
    assert probes.look(str(file)) != first
    assert probes.look("a\0b") is None


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(probes, "PATIENCE_S", 0.01)

    def look(path: str) -> tuple[int, int, int]:
        if path == "/dead":
            answers.wait(20)
        return (1, 2, 3)

    monkeypatch.setattr(probes, "look", look)

    async def story() -> None:
        eye = ProbeThread(asyncio.get_running_loop())
        told: list[object] = []
        try:
            assert eye.now("/alive") == (1, 2, 3)
            eye.ask("/dead", told.append)
            assert eye.now("/alive") is None  # its turn does not come
            assert eye.now("/alive") is None
            assert told == []
        finally:
            answers.set()
        heard = asyncio.Event()
        eye.ask("/alive", lambda seen: heard.set())
        await asyncio.wait_for(heard.wait(), 20)
        assert told == [(1, 2, 3)]

    asyncio.run(story())
