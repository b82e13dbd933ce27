"""The folder of real traces, which are not part of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[5] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the real traces are missing")
