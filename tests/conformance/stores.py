"""Places where a store can live, and small things to put into one. A new store joins by adding its opener to `Place`."""

from __future__ import annotations

from pathlib import Path

from builders import a_job
from hodei.model.effects import Save, SaveJob
from hodei.ports import JobQuery, Store
from hodei.store import MemoryStore, SqliteStore


class Place:
    """Somewhere to remember: every `store()` is one more program that looks at the same things."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.path = directory / "hodei.db"
        self.stores: list[MemoryStore | SqliteStore] = []

    def store(self) -> Store:
        if self.kind == "sqlite":
            self.stores.append(SqliteStore(self.path))
        else:
            self.stores.append(MemoryStore(of=self.stores[0] if self.stores else None))  # type: ignore[arg-type]
        return self.stores[-1]

    def close(self) -> None:
        for store in self.stores:
            store.close()


def new(*ids: int, **fields) -> list[Save]:
    return [SaveJob(a_job(id, **fields), new=True) for id in ids]


def all_pages(store: Store, **query) -> list[int]:
    ids, after = [], 0
    while True:
        page = store.jobs(JobQuery(after=after, **query))
        ids += [job.id for job in page.jobs]
        after = page.next_after
        if not after:
            return ids
