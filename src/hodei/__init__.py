"""Hodei: one job scheduler for every place a team can run work.

`from hodei import Client` is the public Python interface; it is imported on first use so that
`import hodei` stays cheap for the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]

if TYPE_CHECKING:
    from hodei.client import Client


def __getattr__(name: str) -> Any:
    if name == "Client":
        from hodei.client import Client

        return Client
    raise AttributeError(f"module 'hodei' has no attribute {name!r}")
