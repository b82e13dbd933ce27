"""Looks for the files and addresses that jobs wait for, again and again, less and less often.

Only what the configuration allows is looked for, whatever is asked: a file also where its links lead, an address without
following where it points to. A place that does not answer holds up nobody who waits for another.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPMethod

from hodei.model.data_place import Allowed, Place, parse_place
from hodei.model.errors import InvalidInput
from hodei.model.facts import DataAppeared, Fact

log = logging.getLogger("hodei.data")
FIRST_S, LONGEST_S, GROWTH = 1.0, 30.0, 1.5
_ANSWER_S = 10.0
_AT_ONCE = 8


def is_there(what: str, allowed: Allowed) -> bool:
    """Whether it exists now. Blocks. What may not be asked for is never there."""
    place = parse_place(what)
    if place not in allowed:
        return False
    return _file_is_there(place.path, allowed) if place.is_file else _answers(place)


def _file_is_there(path: str, allowed: Allowed) -> bool:
    try:
        os.stat(path)
        # A link inside an allowed directory must not become a window to the rest of the disk.
        return parse_place(os.path.realpath(path)) in allowed
    except (OSError, ValueError, InvalidInput):
        return False


def _answers(place: Place) -> bool:
    scheme, _, host = place.root.partition("://")
    name, _, port = host.rpartition(":")
    name = name.strip("[]")
    connection = (
        http.client.HTTPSConnection(name, int(port), timeout=_ANSWER_S, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(name, int(port), timeout=_ANSWER_S)
    )
    try:
        connection.request(HTTPMethod.HEAD, place.path + (f"?{place.query}" if place.query else ""))
        # A redirect leads elsewhere, perhaps where nobody may look: it is not the thing itself.
        return 200 <= connection.getresponse().status < 300
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


class DataWatch:
    """`awaited` says what is waited for now; `tell` hears of what has appeared."""

    def __init__(
        self,
        awaited: Callable[[], Iterable[str]],
        tell: Callable[[Sequence[Fact]], None],
        allowed: Allowed,
        look: Callable[[str, Allowed], bool] = is_there,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        self._awaited, self._tell, self._allowed, self._look = awaited, tell, allowed, look
        self._first_s = first_s
        self._due: dict[str, tuple[float, float]] = {}
        self._looking: dict[str, asyncio.Future[bool]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="data")

    async def run(self) -> None:
        try:
            while True:
                self.turn(asyncio.get_running_loop().time())
                await asyncio.sleep(self._first_s)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def turn(self, now_s: float) -> None:
        """Begin to look for what is due; who has found something tells it."""
        wanted = dict.fromkeys(self._awaited())
        self._due = {what: self._due.get(what, (now_s, self._first_s)) for what in wanted}
        for what, (at_s, pause_s) in self._due.items():
            if at_s > now_s or what in self._looking or len(self._looking) >= _AT_ONCE:
                continue
            self._due[what] = (now_s + pause_s, min(pause_s * GROWTH, LONGEST_S))
            looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look, what, self._allowed)
            self._looking[what] = looking
            looking.add_done_callback(lambda done, what=what: self._looked(what, done))  # type: ignore[misc]

    def _looked(self, what: str, done: asyncio.Future[bool]) -> None:
        self._looking.pop(what, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("cannot look for %s: %s", what, error)
        elif done.result():
            self._tell([DataAppeared(what)])
