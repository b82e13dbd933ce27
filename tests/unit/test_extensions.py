"""Extensions by name: the built-in tables, installed packages, and clear errors for broken ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from hodei import extensions
from hodei.backends.base import BackendContext, UnusableBackend
from hodei.backends.registry import make_or_explain
from hodei.configuration import make_estimator
from hodei.extensions import BACKENDS, BUILT_IN, ESTIMATORS, SINKS, load
from hodei.model.config import Config, EstimatesConfig, ServerConfig
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import find_plugin, find_queue
from hodei.wiring import add_observers, make_service, make_store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def announce(monkeypatch):
    def announce(group: str, name: str, value: str) -> None:
        def entry_points(**selected):
            return (
                [EntryPoint(name, value, group)]
                if selected["group"] == group and selected.get("name", name) == name
                else []
            )

        monkeypatch.setattr(extensions, "entry_points", entry_points)

    return announce


def test_the_package_announces_exactly_the_built_in_extensions():
    announced = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {group: table for group, table in announced.items() if group.startswith("hodei.")} == BUILT_IN


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


def test_a_broken_extension_names_its_package_and_has_a_hint(announce):
    announce(SINKS, "tail", "no_such_package.sinks:Tail")
    with pytest.raises(InvalidInput, match=r"of the package no_such_package.sinks cannot be loaded") as refusal:
        load(SINKS, "tail", "sink")
    assert "pip install --upgrade" in refusal.value.hint


def test_two_packages_with_one_name_are_refused(monkeypatch):
    both = [EntryPoint("x", value, SINKS) for value in ("a:X", "b:X")]
    monkeypatch.setattr(extensions, "entry_points", lambda **_: both)
    with pytest.raises(InvalidInput, match="provided by several packages"):
        load(SINKS, "x", "sink")


PACKAGE = """
from hodei.backends.instant import InstantBackend, Settings
from hodei.control.estimates import UserEstimates
from hodei.plugins.fit import Fit
from hodei.plugins.queues import Fifo
from hodei.store.memory import MemoryStore

class Filter(Fit):
    name = "external"

class Queue(Fifo):
    name = "external"

class Backend(InstantBackend):
    pass

class Store(MemoryStore):
    pass

class Authenticator:
    pass

class Estimator(UserEstimates):
    pass

class Collector:
    def collect(self):
        return []

class Sink:
    def on_event(self, event):
        pass

def make(name, settings, context):
    return Backend(name, [])

def open_store(url, home):
    return Store()

def open_authenticator(home):
    return Authenticator(), False
"""
ENTRIES = {
    "hodei.plugins": "Filter", "hodei.queues": "Queue", "hodei.backends": "", "hodei.stores": "open_store",
    "hodei.authenticators": "open_authenticator", "hodei.estimators": "Estimator", "hodei.collectors": "Collector",
    "hodei.sinks": "Sink",
}  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that announces an extension called `external` in every group."""
    info = tmp_path / "site" / "external_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: external-package\nVersion: 1\n")
    targets = {group: f"external_package:{name}" if name else "external_package" for group, name in ENTRIES.items()}
    (info / "entry_points.txt").write_text("".join(f"[{g}]\nexternal = {value}\n" for g, value in targets.items()))
    (tmp_path / "site" / "external_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    sys.modules.pop("external_package", None)


USES = {
    "hodei.plugins": lambda home: find_plugin("external"),
    "hodei.queues": lambda home: find_queue("external"),
    "hodei.backends": lambda home: make_or_explain("far", {"kind": "external"}, BackendContext("test", 1, home, None)),
    "hodei.stores": lambda home: make_store("external:x", home),
    "hodei.authenticators": lambda home: extensions.make("hodei.authenticators", "external", "authenticator", home)[0],
    "hodei.estimators": lambda home: make_estimator(EstimatesConfig(source="external")),
    "hodei.collectors": lambda home: _observer(home, "collectors"),
    "hodei.sinks": lambda home: _observer(home, "sinks"),
}


def _observer(home, section):
    added = []
    service = SimpleNamespace(observers=SimpleNamespace(
        add_sink=lambda name, extension: added.append(extension), add_collector=lambda name, extension: added.append(extension)
    ))  # fmt: skip
    add_observers(service, Config(**{section: {"custom": {"kind": "external"}}}))
    return added[0]


@pytest.mark.parametrize("group", ENTRIES)
def test_an_installed_package_adds_an_extension_of_every_kind(group, package, tmp_path):
    assert type(USES[group](tmp_path)).__module__ == "external_package"


def test_every_group_of_entry_points_is_tested():
    assert {*ENTRIES} == {*BUILT_IN}


async def _health(backend):
    return await backend.health()


def test_a_broken_backend_is_unhealthy_with_a_reason(announce, tmp_path):
    import asyncio

    announce(BACKENDS, "echo", "no_such_package")
    backend = make_or_explain("far", {"kind": "echo"}, BackendContext("test", 1, tmp_path, None))
    assert isinstance(backend, UnusableBackend)
    health = asyncio.run(_health(backend))
    assert not health.ok
    assert "no_such_package" in health.text


def test_an_estimator_that_is_not_trusted_is_not_loaded(announce):
    announce(ESTIMATORS, "custom", "no_such_package:Custom")
    with pytest.raises(InvalidInput, match="is not in use on this server"):
        make_estimator(EstimatesConfig(source="custom"), frozenset())


def test_a_broken_sink_is_left_out_and_the_store_is_chosen_by_its_scheme(tmp_path, caplog):
    config = Config(server=ServerConfig(store="memory:"), sinks={"bad": {"kind": "nowhere:Sink"}})
    service = make_service(tmp_path, config, instant=True)
    assert "sinks.bad is not used" in caplog.text
    assert type(service.store).__name__ == "MemoryStore"
    asyncio.run(service.stop())


def test_the_compatibility_promise_names_every_group():
    promised = (Path(__file__).parents[2] / "docs/reference/versioning.md").read_text()
    assert [group for group in BUILT_IN if f"`{group}`" not in promised] == []
