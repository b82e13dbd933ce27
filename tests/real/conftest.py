"""A house for each test, empty and not yet started; it is torn down when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "home")
    try:
        yield made
    finally:
        made.close()
