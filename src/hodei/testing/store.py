"""What every store promises (`ports.Store`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hodei.ports import Store
from hodei.testing.store_commits import Commits
from hodei.testing.store_reading import Reading
from hodei.testing.store_records import Records
from hodei.testing.store_values import Connect


class StoreConformance(Commits, Reading, Records):
    """Subclass it, name the subclass `Test...`, and define `make_store`."""

    def make_store(self, directory: Path) -> Store:
        """A new store, not open, over the same data at each call in one test: one more program that uses it.
        `directory` is empty at the first call."""
        raise TypeError(f"{type(self).__name__} does not define make_store")

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Iterator[Connect]:
        stores: list[Store] = []

        def connect() -> Store:
            stores.append(self.make_store(tmp_path))
            return stores[-1]

        yield connect
        for store in stores:
            store.close()

    @pytest.fixture
    def store(self, connect: Connect) -> Store:
        store = connect()
        store.open()
        return store
