"""Moments to come, by job. A moment that was set again or no longer matters is sorted out by whoever asks."""

from __future__ import annotations

import heapq

from hodei.model.ids import JobId


class Timers:
    def __init__(self) -> None:
        self._heap: list[tuple[int, JobId]] = []

    def set(self, at_ms: int, job: JobId) -> None:
        heapq.heappush(self._heap, (at_ms, job))

    def due(self, now_ms: int) -> list[JobId]:
        out = []
        while self._heap and self._heap[0][0] <= now_ms:
            out.append(heapq.heappop(self._heap)[1])
        return out

    def next_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None
