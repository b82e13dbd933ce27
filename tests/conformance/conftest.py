"""Every store, new and empty, by turns."""

from __future__ import annotations

from pathlib import Path

import pytest

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
