"""A job or an array that was handed in, and what one does with it next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hodei.api.views import JobView
from hodei.client.job_refs import ArrayId
from hodei.model.explanation import Explanation

if TYPE_CHECKING:
    from hodei.client.api import Client


class JobHandle:
    """Made by `Client.submit`; every method is one or more requests. What was submitted as an array is meant as a whole:
    `id` is an `ArrayId` then, and the views are those of the array."""

    def __init__(self, client: Client, id: int, name: str = "") -> None:
        self._client = client
        self.id = id
        self.name = name

    def __repr__(self) -> str:
        what = f"array {self.id}[]" if isinstance(self.id, ArrayId) else f"job {self.id}"
        return f"<{what}{f' ({self.name})' if self.name else ''} on {self._client.address}>"

    def wait(self, timeout_s: float | None = None) -> JobView:
        return self._client.wait(self.id, timeout_s)[0]

    def logs(self, follow: bool = False, stream: str = "stdout", member: int = 0) -> Iterator[bytes]:
        return self._client.logs(self.id, follow, stream, member)

    def cancel(self, reason: str = "") -> JobView:
        return self._client.cancel(self.id, reason)

    def why(self, node: str = "") -> Explanation:
        return self._client.why(self.id, node)

    def refresh(self) -> JobView:
        return self._client.job(self.id).job
