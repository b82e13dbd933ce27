"""Where the real traces lie, for tests that step against them; a clone of the project alone does not have them."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[5] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are not here")
