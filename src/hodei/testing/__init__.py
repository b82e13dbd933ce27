"""Conformance suites for extensions, for use in their own tests: subclass a suite and define how the extension is made.

    from hodei.testing import BackendConformance, backend_context

    class TestMine(BackendConformance):
        def make_backend(self, home):
            return make("mine", Settings(), backend_context(home))

A server imports nothing of this. pytest is imported with the first suite, so `hodei.testing.builders` works without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hodei.testing.backend import BackendConformance, Bench, RunRecorder, backend_context
    from hodei.testing.plugin import PluginConformance, QueueConformance, SinkConformance, run_sink
    from hodei.testing.store import StoreConformance

_MODULES = {
    "BackendConformance": "backend",
    "Bench": "backend",
    "RunRecorder": "backend",
    "backend_context": "backend",
    "PluginConformance": "plugin",
    "QueueConformance": "plugin",
    "SinkConformance": "plugin",
    "run_sink": "plugin",
    "StoreConformance": "store",
}
__all__ = [
    "BackendConformance",
    "Bench",
    "PluginConformance",
    "QueueConformance",
    "RunRecorder",
    "SinkConformance",
    "StoreConformance",
    "backend_context",
    "run_sink",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
