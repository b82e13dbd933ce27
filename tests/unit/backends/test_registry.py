"""Backends from their tables, and errors for wrong tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from builders import a_node
from hodei.backends import registry
from hodei.backends.base import BackendContext
from hodei.backends.registry import make_backend, node_defaults, settings_of
from hodei.model.errors import InvalidInput
from hodei.model.node import Location
from unit.runtime.harness import FakeClock

CONTEXT = BackendContext("test", 1, Path("/nowhere"), FakeClock())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        pytest.param({}, "backends.b.kind: the table has no kind", id="no kind"),
        pytest.param({"kind": "locl"}, "no kind 'locl' (did you mean 'local'?)", id="an unknown kind"),
        pytest.param({"kind": 3}, "backends.b.kind", id="a kind of the wrong type"),
        pytest.param({"kind": "instant", "nods": 3}, "no key 'nods' (did you mean 'nodes'?)", id="an unknown key"),
        pytest.param({"kind": "local", "regoin": "eu"}, "(did you mean 'region'?)", id="a common key, misspelt"),
        pytest.param(
            {"kind": "instant", "nodes": "many"},
            "backends.b.nodes: expected a whole number, got a string",
            id="a value of the wrong type",
        ),
        pytest.param({"kind": "local", "cost": -1}, "backends.b.cost", id="a negative cost"),
        pytest.param({"kind": "local", "enabled": "yes"}, "enabled", id="a common key of the wrong type"),
    ],
)
def test_an_invalid_table_is_refused_with_the_path_of_its_key(table, message):
    with pytest.raises(InvalidInput) as error:
        settings_of("b", table)
    assert message in error.value.message
    assert error.value.hint


def test_a_backend_is_created_from_its_table():
    backend = make_backend("fast", {"kind": "instant", "nodes": 3, "region": "eu"}, CONTEXT)
    assert (backend.name, backend.kind) == ("fast", "instant")


def test_a_missing_library_breaks_only_its_own_kind(monkeypatch):
    monkeypatch.setitem(registry.KINDS, "odd", "hodei.no_such_module")
    with pytest.raises(InvalidInput, match="kind odd cannot be used here"):
        settings_of("b", {"kind": "odd"})
    assert settings_of("b", {"kind": "instant"})


def test_kinds_are_imported_on_demand():
    assert "hodei.backends.registry" in sys.modules
    assert all(path.startswith("hodei.backends.") for path in registry.KINDS.values())


def test_keys_of_the_table_are_defaults_for_its_nodes():
    fill_in = node_defaults({"kind": "x", "region": "eu", "zone": "eu-1", "cost": 1.5, "labels": {"a": "1", "b": "2"}})
    filled = fill_in(a_node("n"))
    assert (filled.location, filled.cost_milli) == (Location("eu", "eu-1"), 1500)
    own = fill_in(a_node("n", labels={"a": "own"}, location=Location("us", "us-1"), cost_milli=7))
    assert (own.location, own.cost_milli, own.labels) == (Location("us", "us-1"), 7, {"a": "own", "b": "2"})
    node = a_node("n")
    assert node_defaults({"kind": "x"})(node) is node


def test_code_that_the_configuration_does_not_name_is_not_loaded(tmp_path: Path, monkeypatch):
    (tmp_path / "evil_kind.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"backends\.b\.kind: 'evil_kind:x' is code"):
        make_backend("b", {"kind": "evil_kind:x"}, CONTEXT, known_code=set())


def test_every_mistake_of_a_table_is_reported_at_once():
    table = {"kind": "instant", "nodes": 10**30, "nods": 1, "cost": 10**9, "labels": {"a b": "x"}}
    with pytest.raises(InvalidInput) as refused:
        settings_of("b", table)
    assert {path for path, _ in refused.value.problems} == {
        "backends.b.nodes", "backends.b.nods", "backends.b.cost", "backends.b.labels.'a b'",
    }  # fmt: skip


def test_the_check_of_a_kind_is_part_of_the_check_of_its_table():
    with pytest.raises(InvalidInput, match=r"backends\.b\.starts_at_once: must be from 1 to 64"):
        settings_of("b", {"kind": "docker", "starts_at_once": 65})
