"""The fixture `installation`: empty, not started, and stopped after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real.installation import Installation


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    installation = Installation(tmp_path / "home")
    try:
        yield installation
    finally:
        installation.close()
