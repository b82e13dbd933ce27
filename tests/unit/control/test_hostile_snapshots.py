"""A snapshot from an untrusted source: nothing is called but what a controller consists of."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control import snapshot
from hodei.control.snapshot import dump, load
from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import Job
from hodei.wiring import make_controller

SNAPSHOT = "hodei.control.snapshot"


def _word(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _named(module: str, name: str) -> bytes:
    return _word(module) + _word(name) + b"\x93"


def _state(*operations: bytes) -> bytes:
    return zlib.compress(b"\x80\x05" + b"".join(operations) + b".")


def _rooms_opened(mark: Path) -> bytes:
    """The rooms are opened through the module itself, then a process is started."""
    return _state(
        _named(SNAPSHOT, "_function") + _word(SNAPSHOT) + _word("_module") + b"\x86R",
        _word(SNAPSHOT) + b"\x85R",
        b"}" + _word("_ROOMS") + _word("") + b"\x85s" + b"b",
        b"0" + _named("subprocess", "Popen") + b"]" + _word("touch") + b"a" + _word(str(mark)) + b"a" + b"\x85R",
    )


def test_a_state_can_not_open_the_rooms_to_start_a_process(tmp_path: Path) -> None:
    before = dict(vars(snapshot))
    with pytest.raises(InvalidInput):
        load(_rooms_opened(tmp_path / "ran"))
    assert vars(snapshot) == before
    assert not (tmp_path / "ran").exists()


MADE = _named("hodei.model.config", "BreakerConfig") + b")R"
HOSTILE = {
    "a class that is no fact, made by names": _named(SNAPSHOT, "_by_names")
    + _named("hodei.model.config", "BreakerConfig")
    + b"}\x86R",
    "a plain class, made by names": _named(SNAPSHOT, "_by_names") + _named("builtins", "dict") + b"}\x86R",
    "a helper of the reader as a function": _named(SNAPSHOT, "_function")
    + _word(SNAPSHOT)
    + _word("_array")
    + b"\x86R",
    "a function of a room": _named(SNAPSHOT, "_function") + _word("hodei.plugins.registry") + _word("find") + b"\x86R",
    "a listed function that is called": _named(SNAPSHOT, "_function")
    + _word("hodei.control.lifecycle.jobs")
    + _word("_nothing")
    + b"\x86R"
    + b"N\x85R",
    "a method that is called": _named(SNAPSHOT, "_method")
    + _named("hodei.control.queue.base", "Backlog")
    + b")\x81"
    + _word("wake")
    + b"\x86R"
    + b"N\x85R",
    "a special method": _named(SNAPSHOT, "_method")
    + _named("hodei.control.queue.base", "Backlog")
    + b")\x81"
    + _word("__init__")
    + b"\x86R",
    "the reader itself": _named(SNAPSHOT, "_Reader"),
    "attributes of a class": _named("hodei.control.controller", "Controller") + b"}" + _word("step") + b"Nsb",
    "attributes of a helper": _named(SNAPSHOT, "_nothing") + b"}" + _word("__code__") + b"Nsb",
    "the class of an object": _named("hodei.control.queue.base", "Backlog") + b")\x81}" + _word("__class__") + b"Nsb",
    "a hook of an object": _named("hodei.control.queue.base", "Backlog") + b")\x81}" + _word("__setstate__") + b"Nsb",
    "items of an object": MADE + _word("a") + b"Ns",
    "a global in the old form": b"cposix\nsystem\n" + _word("true") + b"\x85R",
    "an object in the old form": b"(" + _word("true") + b"iposix\nsystem\n",
    "an extension": b"\x82\x01",
    "a buffer from outside": b"\x97",
    "memory by a call": _named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R",
    "memory by a new object": _named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85\x81",
    "a word that is called": _word("x") + b")R",
}


@pytest.mark.parametrize("operations", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_state_is_refused(operations: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"a saved state (?!is not that)"):
        load(_state(operations))


def test_a_state_that_unpacks_to_far_more_than_its_file_is_refused() -> None:
    bomb = zlib.compress(bytes(80 << 20), 9)
    assert len(bomb) < 100_000
    with pytest.raises(InvalidInput, match="too large for its file"):
        load(bomb)


def test_a_state_that_is_cut_off_is_refused() -> None:
    whole = dump(make_controller(SchedulingConfig()))
    with pytest.raises(InvalidInput, match="cut off"):
        load(whole[:-20])


def test_a_large_state_of_equal_jobs_is_within_the_bound() -> None:
    controller = make_controller(SchedulingConfig())
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 4))])
    controller.step(NOW_MS, [JobSubmitted(a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS)) for id in range(1, 501)])
    state = dump(controller)
    assert len(zlib.decompress(state)) < snapshot._MAX_RATIO * len(state) / 4
    assert load(state).cluster.jobs == controller.cluster.jobs


def test_a_function_that_is_not_a_method_is_refused_by_the_writer() -> None:
    controller = make_controller(SchedulingConfig())
    controller.cluster.signals.job_ended.append(_unlisted)
    with pytest.raises(pickle.PicklingError, match="_unlisted"):
        dump(controller)


def _unlisted(job: Job) -> None:
    """Stands for a callback that a later part of the controller might hold."""
