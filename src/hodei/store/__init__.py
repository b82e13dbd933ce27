"""REMEMBERS: jobs, runs, events, marks and keys behind the `Store` port. `MemoryStore` forgets with its process,
`SqliteStore` survives power loss; both pass the same suite, `hodei.testing.StoreConformance`.

The only room with SQL in it. It decides nothing and changes no state of its own accord: it keeps what it is given.
Start at `batch` (what one commit comes to), then `memory` (the meaning, plainly), then `sqlite` (the same, durable).
"""

from hodei.store.memory import MemoryStore
from hodei.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore"]
