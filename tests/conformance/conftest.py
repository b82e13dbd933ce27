"""Every store, new and empty, by turns; and every kind of backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.backends import Kind, Told
from conformance.stores import Place
from hodei.ports import Store


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    place = Place(request.param, tmp_path)
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> Store:
    store = place.store()
    store.open()
    return store


@pytest.fixture
def backend_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Told:
    """One of the kinds in `conformance.backends`: call it with a story, and it is told of a system of that kind."""
    kind: Kind = request.param
    system = request.getfixturevalue(kind.system) if kind.system else None
    return Told(kind, system, tmp_path / "home")
