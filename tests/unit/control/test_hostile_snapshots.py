"""Snapshots from an untrusted source: only the parts of a controller are created, nothing else is called."""

from __future__ import annotations

import pickle
import re
import zlib
from pathlib import Path
from types import FunctionType

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control import snapshot
from hodei.control.clone import clone_controller
from hodei.control.controller import Controller
from hodei.control.queue.base import SchedulingQueue
from hodei.control.snapshot import dump, load
from hodei.model.config import BreakerConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import Job
from hodei.plugins.registry import find_plugin
from hodei.wiring import make_controller

SNAPSHOT = "hodei.control.snapshot"


def _string(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _named(module: str, name: str) -> bytes:
    return _string(module) + _string(name) + b"\x93"


def _global(thing: type | FunctionType) -> bytes:
    """The real thing, not its name: a rename must not make a case pass for the wrong reason."""
    return _named(thing.__module__, thing.__qualname__)


def _state(*operations: bytes) -> bytes:
    return zlib.compress(b"\x80\x05" + b"".join(operations) + b".")


def _allows_all_packages(mark: Path) -> bytes:
    """Sets the allowed packages of the reader through its own module, then starts a process."""
    return _state(
        _global(snapshot._module) + _string(SNAPSHOT) + b"\x85R",
        b"}" + _string("_PACKAGES") + _string("") + b"\x85s" + b"b",
        b"0" + _named("subprocess", "Popen") + b"]" + _string("touch") + b"a" + _string(str(mark)) + b"a" + b"\x85R",
    )


def test_a_state_cannot_allow_more_packages_to_start_a_process(tmp_path: Path) -> None:
    assert snapshot._PACKAGES
    before = dict(vars(snapshot))
    with pytest.raises(InvalidInput, match="_module"):
        load(_allows_all_packages(tmp_path / "ran"))
    assert vars(snapshot) == before
    assert not (tmp_path / "ran").exists()


QUEUE = _global(SchedulingQueue) + b")\x81"
BREAKER = _global(BreakerConfig) + b")R"
# For each: the operations, and what the refusal is about.
HOSTILE = {
    "a class that is no fact, made by names": (
        _global(snapshot._by_names) + _global(BreakerConfig) + b"}\x86R",
        "calls hodei.control.snapshot._by_names",
    ),
    "a plain class, made by names": (
        _global(snapshot._by_names) + _named("builtins", "dict") + b"}\x86R",
        "calls hodei.control.snapshot._by_names",
    ),
    "a function of the reader": (_global(snapshot._module), "names hodei.control.snapshot._module"),
    "a function of a package": (_global(find_plugin), "names hodei.plugins.registry.find_plugin"),
    "a function that is called": (
        _global(clone_controller) + b"N\x85R",
        "names hodei.control.clone.clone_controller",
    ),
    "a method that is called": (
        _global(snapshot._method) + QUEUE + _string("wake") + b"\x86R" + b"N\x85R",
        "calls a method",
    ),
    "a special method": (
        _global(snapshot._method) + QUEUE + _string("__init__") + b"\x86R",
        "names a method __init__",
    ),
    "the reader itself": (_global(snapshot._Reader), "names hodei.control.snapshot._Reader"),
    "attributes of a class": (_global(Controller) + b"}" + _string("step") + b"Nsb", "sets attributes of "),
    "attributes of a helper": (
        _global(snapshot._nothing) + b"}" + _string("__code__") + b"Nsb",
        "sets attributes of hodei.control.snapshot._nothing",
    ),
    "the class of an object": (QUEUE + b"}" + _string("__class__") + b"Nsb", "sets the attribute '__class__'"),
    "a hook of an object": (QUEUE + b"}" + _string("__setstate__") + b"Nsb", "sets the attribute '__setstate__'"),
    "items of an object": (BREAKER + _string("a") + b"Ns", "fills a BreakerConfig"),
    "a global in the old form": (b"cposix\nsystem\n" + _string("true") + b"\x85R", "cannot be read"),
    "an object in the old form": (b"(" + _string("true") + b"iposix\nsystem\n", "cannot be read"),
    "an extension": (b"\x82\x01", "cannot be read"),
    "a buffer from outside": (b"\x97", "cannot be read"),
    "memory by a call": (_named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85R", "calls builtins.bytearray"),
    "memory by a new object": (
        _named("builtins", "bytearray") + b"J\xff\xff\xff\x7f\x85\x81",
        "makes builtins.bytearray",
    ),
    "a string that is called": (_string("x") + b")R", "calls a str"),
}


@pytest.mark.parametrize(("operations", "refusal"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_state_is_refused(operations: bytes, refusal: str) -> None:
    with pytest.raises(InvalidInput, match=f"a saved state {re.escape(refusal)}"):
        load(_state(operations))


def test_a_state_that_decompresses_to_far_more_than_its_file_is_refused() -> None:
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
    """A callback that is not a method."""
