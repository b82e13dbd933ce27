"""Small batches and reads that the store suites share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodei.model.effects import Save, SaveJob
from hodei.ports import JobQuery, Store
from hodei.testing.builders import a_job

Connect = Callable[[], Store]


def new(*ids: int, **fields: Any) -> list[Save]:
    return [SaveJob(a_job(id, **fields), new=True) for id in ids]


def all_pages(store: Store, **query: Any) -> list[int]:
    ids: list[int] = []
    after = 0
    while True:
        page = store.jobs(JobQuery(after=after, **query))
        ids += [job.id for job in page.jobs]
        after = page.next_after
        if not after:
            return ids
