"""An empty installation for each test, not yet started, and removed afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real.installation import Installation


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    made = Installation(tmp_path / "home")
    try:
        yield made
    finally:
        made.close()
