"""A cluster for each story, empty and not yet started; it is torn down when the story is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from real.stories.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "home")
    try:
        yield made
    finally:
        made.close()
