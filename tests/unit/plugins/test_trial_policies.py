"""A trial policy from a caller or a file runs no untrusted code: nothing is imported, and only plugin classes are called."""

from __future__ import annotations

import sys
import types
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.errors import HodeiError, InvalidInput
from hodei.plugins.queues import Fifo
from hodei.plugins.registry import build_profile, build_profiles
from hodei.wiring import make_controller, trial_controller

NAME = "hodei_test_trap:run"
# The keys that name plugins today. Every other key that takes strings is tried too, see `_profiles`.
NAMING = {"queue", "secondary", "worker_selection", "plugins", "score_plugins", "scores"}


def _profiles():
    """One profile for every key of ProfileConfig that takes strings, with the trap as its value."""
    for field in msgspec.structs.fields(ProfileConfig):
        for value in (NAME, (NAME,), {NAME: 1}, {NAME: {"command": "x"}}):
            try:
                given = {field.name: value, "options": {NAME: {"command": "x"}}}
                profile = msgspec.convert(given, ProfileConfig)
            except msgspec.ValidationError:
                continue
            yield pytest.param(field.name, profile, id=f"{field.name}-{type(value).__name__}")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch):
    """A module that creates a file when it is imported, and another when its function is called."""
    text = f"""
from pathlib import Path
Path({str(tmp_path / "imported")!r}).touch()
def run(**arguments):
    Path({str(tmp_path / "called")!r}).touch()
"""
    (tmp_path / "hodei_test_trap.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("hodei_test_trap", None)


def test_every_key_that_names_a_plugin_is_among_those_tried():
    assert {param.values[0] for param in _profiles()} >= NAMING


@pytest.mark.parametrize(("key", "profile"), list(_profiles()))
def test_no_key_of_a_trial_policy_loads_code(trap, key, profile):
    config = SchedulingConfig(profiles={"default": profile})
    if key in NAMING:
        with pytest.raises(InvalidInput, match="is not in use on this server"):
            trial_controller(config, SchedulingConfig())
        # The loader also refuses by itself, in case an earlier check misses a key.
        with pytest.raises(InvalidInput, match="is not in use on this server"):
            build_profiles(config, trusted=frozenset())
    else:
        with suppress(HodeiError):  # the value may be refused as invalid; nothing is loaded
            make_controller(config, trusted=frozenset())
    assert not (trap / "imported").exists()
    assert "hodei_test_trap" not in sys.modules


@pytest.mark.parametrize(("key", "profile"), [each for each in _profiles() if each.values[0] in NAMING])
def test_a_function_is_never_called_even_if_it_is_trusted(trap, key, profile):
    with pytest.raises(InvalidInput, match="is not a class"):
        build_profiles(SchedulingConfig(profiles={"default": profile}))
    assert (trap / "imported").exists()
    assert not (trap / "called").exists()


@pytest.mark.parametrize(
    "fields",
    [{"queue": "my_traps:Unrelated"}, {"secondary": "my_traps:Unrelated"}, {"plugins": ("my_traps:Unrelated",)}],
)
def test_a_class_that_is_no_plugin_is_not_instantiated(monkeypatch, fields):
    created = []

    class Unrelated:
        name = "unrelated"

        def __init__(self, **arguments):
            created.append(arguments)

    module = types.ModuleType("my_traps")
    module.Unrelated = Unrelated
    monkeypatch.setitem(sys.modules, "my_traps", module)
    with pytest.raises(InvalidInput, match=r"is not a plugin|cannot be a"):
        build_profile("default", **fields)
    assert created == []


def test_plugins_in_use_on_the_server_can_be_tried(monkeypatch):
    module = types.ModuleType("my_queues")
    module.Own = type("Own", (Fifo,), {"name": "own"})
    monkeypatch.setitem(sys.modules, "my_queues", module)
    live = SchedulingConfig(profiles={"night": ProfileConfig(queue="my_queues:Own")})
    tried = SchedulingConfig(profiles={"default": ProfileConfig(queue="my_queues:Own")})
    assert trial_controller(tried, live).engine.profiles["default"].queue.name == "own"
