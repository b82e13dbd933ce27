"""Clients that submit jobs concurrently while a server fails."""

from __future__ import annotations

import threading
import time
from typing import Any

from hodei.client import ServerUnreachable
from hodei.model.errors import Unavailable
from real.installation import DEADLINE_S, Installation, until


class Submitters:
    """Starts `clients` threads. Each job has its own key, and is submitted with it until it is acknowledged."""

    def __init__(
        self, installation: Installation, jobs: list[dict[str, Any]], clients: int = 3, **client_fields: Any
    ) -> None:
        self.refused = 0
        self._installation, self._jobs, self._client_fields = installation, jobs, client_fields
        self._remaining = iter(list(enumerate(jobs)))
        self._lock = threading.Lock()
        self._acknowledged: dict[int, int] = {}
        self._threads = [threading.Thread(target=self._submit, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _submit(self) -> None:
        with self._installation.client(**self._client_fields) as client:
            while True:
                with self._lock:
                    number, job = next(self._remaining, (-1, {}))
                if not job:
                    return
                while number not in self._acknowledged:
                    try:
                        self._acknowledged[number] = client.submit(job, key=f"submitter-{number}").id
                    except (ServerUnreachable, Unavailable):
                        self.refused += 1
                        time.sleep(0.02)

    @property
    def acknowledged(self) -> int:
        return len(self._acknowledged)

    def until_acknowledged(self, count: int) -> None:
        until(lambda: self.acknowledged >= count, f"{count} jobs are acknowledged")

    def ids(self) -> list[int]:
        """Wait until all jobs are acknowledged, and return their ids in the order of the jobs."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
        ids = [self._acknowledged[number] for number in range(len(self._jobs))]
        assert len(set(ids)) == len(ids)
        return ids
