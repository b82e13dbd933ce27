"""Stores for jobs, runs, events, node overrides and keys, behind the port `Store`. `MemoryStore` is lost with its process,
`SqliteStore` survives power loss; both pass `hodei.testing.StoreConformance`.

All SQL is here. A store decides nothing and changes nothing on its own. Start with `batch` (the effect of a commit), then
`memory` (the semantics), then `sqlite` (the same, durable).
"""

from hodei.store.memory import MemoryStore
from hodei.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore"]
