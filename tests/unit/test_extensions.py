"""Extensions by name: the built-in tables, installed packages, and clear errors for broken ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hodei import extensions
from hodei.backends.base import BackendContext, UnusableBackend
from hodei.backends.registry import make_or_explain
from hodei.extensions import BACKENDS, BUILT_IN, ESTIMATORS, SINKS, load
from hodei.model.config import Config, EstimatesConfig, ServerConfig
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import PLUGINS, QUEUES
from hodei.wiring import make_estimator, make_service

ROOT = Path(__file__).parents[2]


@pytest.fixture
def announce(monkeypatch):
    def announce(group: str, name: str, value: str) -> None:
        def entry_points(**wanted):
            return (
                [EntryPoint(name, value, group)]
                if wanted["group"] == group and wanted.get("name", name) == name
                else []
            )

        monkeypatch.setattr(extensions, "entry_points", entry_points)

    return announce


def test_the_package_announces_exactly_the_built_in_extensions():
    announced = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    classes = {"hodei.plugins": PLUGINS, "hodei.queues": QUEUES}
    ours = {g: {n: f"{c.__module__}:{c.__name__}" for n, c in table.items()} for g, table in classes.items()}
    assert {group: table for group, table in announced.items() if group.startswith("hodei.")} == ours | BUILT_IN


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, table in BUILT_IN.items() for name in table])
def test_every_built_in_extension_loads_without_metadata(group, name, monkeypatch):
    monkeypatch.setattr(extensions, "entry_points", None)
    assert load(group, name, "extension") is not None


def test_the_cli_reads_no_package_metadata():
    code = "import sys, hodei.cli.main; sys.exit('hodei.extensions' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_announced_extension_is_found_by_its_name(announce):
    announce(SINKS, "tail", "collections:deque")
    assert load(SINKS, "tail", "sink").__name__ == "deque"
    with pytest.raises(InvalidInput, match=r"there is no sink 'tial'") as refusal:
        load(SINKS, "tial", "sink")
    assert "jsonl, tail" in refusal.value.hint


def test_a_broken_extension_names_its_package_and_what_next(announce):
    announce(SINKS, "tail", "no_such_package.sinks:Tail")
    with pytest.raises(InvalidInput, match=r"of the package no_such_package.sinks cannot be loaded") as refusal:
        load(SINKS, "tail", "sink")
    assert "pip install --upgrade" in refusal.value.hint


def test_two_packages_with_one_name_are_refused(monkeypatch):
    both = [EntryPoint("x", value, SINKS) for value in ("a:X", "b:X")]
    monkeypatch.setattr(extensions, "entry_points", lambda **_: both)
    with pytest.raises(InvalidInput, match="announced by several packages"):
        load(SINKS, "x", "sink")


async def _health(backend):
    return await backend.health()


def test_a_broken_backend_is_out_of_reach_and_says_why(announce, tmp_path):
    import asyncio

    announce(BACKENDS, "echo", "no_such_package")
    backend = make_or_explain("far", {"kind": "echo"}, BackendContext("test", 1, tmp_path, None))
    assert isinstance(backend, UnusableBackend)
    health = asyncio.run(_health(backend))
    assert not health.ok
    assert "no_such_package" in health.text


def test_an_estimator_that_is_not_trusted_is_not_loaded(announce):
    announce(ESTIMATORS, "mine", "no_such_package:Mine")
    with pytest.raises(InvalidInput, match="is not in use on this server"):
        make_estimator(EstimatesConfig(source="mine"), frozenset())


def test_a_broken_sink_is_left_out_and_the_store_is_chosen_by_its_scheme(tmp_path, caplog):
    config = Config(server=ServerConfig(store="memory:"), sinks={"bad": {"kind": "nowhere:Sink"}})
    service = make_service(tmp_path, config, instant=True)
    assert "sinks.bad is left out" in caplog.text
    assert type(service.store).__name__ == "MemoryStore"
    asyncio.run(service.stop())
