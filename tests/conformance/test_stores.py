"""The built-in stores pass the public suite."""

from __future__ import annotations

from pathlib import Path

from builders import a_job, a_run
from hodei.model.effects import Save, SaveJob, SaveRun
from hodei.ports import NodeRunsQuery, Store
from hodei.store import MemoryStore, SqliteStore
from hodei.testing import StoreConformance


class BuiltInStore(StoreConformance):
    def test_a_page_of_a_node_reads_a_bounded_number_of_runs_and_misses_none(self, store: Store, monkeypatch):
        monkeypatch.setattr("hodei.store.queries.MAX_RUNS_SCANNED", 4)
        saves: list[Save] = []
        for id in range(1, 24):
            saves += [
                SaveJob(a_job(id), new=True),
                SaveRun(a_run(job=id, node="rare" if id % 9 == 1 else "n"), new=True),
            ]
        store.commit(saves)
        jobs, after = [], None
        for _ in range(20):
            page = store.runs_on(NodeRunsQuery("rare", after=after, limit=2))
            jobs += [run.job for run in page.runs]
            after = page.next_after
            if after is None:
                break
        assert jobs == [19, 10, 1]


class TestMemoryStore(BuiltInStore):
    first: MemoryStore | None = None

    def make_store(self, directory: Path) -> Store:
        store = MemoryStore(of=self.first)
        self.first = self.first or store
        return store


class TestSqliteStore(BuiltInStore):
    def make_store(self, directory: Path) -> Store:
        return SqliteStore(directory / "hodei.db")
