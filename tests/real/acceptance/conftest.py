"""The fixture `cluster`: empty, not started, and stopped after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real.acceptance.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "home")
    try:
        yield cluster
    finally:
        cluster.close()
