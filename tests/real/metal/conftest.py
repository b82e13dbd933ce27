"""The fixture `rack`: no machines yet, all closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from real.installation import Installation
from real.metal.rack import Rack, require_metal


@pytest.fixture
def rack(installation: Installation) -> Iterator[Rack]:
    rack = Rack(installation, require_metal())
    try:
        yield rack
    finally:
        rack.close()
