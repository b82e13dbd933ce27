"""Keeps somebody's picture of one kind of object equal to the API's: list, then watch, for ever.

A watch is resumed where it was cut; what cannot be resumed is listed again, and `listed` then brings the whole picture, so
that nothing is lost or repeated in silence. Decoding is straight into the slim structs of `objects`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from hodei.kubeapi.client import Api, ApiError, Status, refused
from hodei.kubeapi.objects import decode

_log = logging.getLogger(__name__)
T = TypeVar("T")
Change = Literal["ADDED", "MODIFIED", "DELETED"]

PAGE = 2000
SLICE = 500
"""How many objects are decoded before other tasks get a turn: the API gives a first list whole, whatever the limit."""
WATCH_S = 290
QUIET_S = 150.0
"""The API sends a bookmark about every minute; a watch that brings nothing for longer than this is dead or as good as."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LASTED_S = 5.0
ABSENT_S = 60.0
TELL_S = 60.0


class Sink(Protocol[T]):
    """Who keeps the picture. Called between awaits, never concurrently. It may also have `flushed()`: called after the
    changes of one batch, and after `listed`, so that whoever acts can act once per batch."""

    def listed(self, objects: list[T], /) -> None:
        """The full picture: whatever is not in it is gone."""

    def changed(self, kind: Change, object: T, /) -> None:
        """One change, in the API's order. An object may be told as ADDED or MODIFIED though it is known as such."""


class Resource(Struct, Generic[T], frozen=True):
    """A collection's path (`/api/v1/pods`) and what its members are decoded to (a struct with `metadata: Meta`)."""

    path: str
    kind: type[T]


class _ListMeta(Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next: str = msgspec.field(default="", name="continue")


class _Page(Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[Raw] | None = None


class _Event(Struct):
    type: str
    object: Raw


class _Expired(Exception):
    """The version that was asked for is not kept any more: list again."""


class Reflector(Generic[T]):
    """`run` for ever. `synced` is set with the first picture; `problem` says why there is none or why it is old.

    A collection that does not exist (404: a CRD that is not installed) has an empty picture and is asked for every minute.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource[T],
        sink: Sink[T],
        *,
        selector: Mapping[str, str] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        """`selector` holds `fieldSelector` and `labelSelector`; `chance` gives numbers from 0 to 1."""
        self.synced = asyncio.Event()
        self.problem = ""
        self.lists = self.watches = self.changes = self.undecodable = 0
        self.heard_at = 0.0
        self._api, self._resource, self._sink = api, resource, sink
        self._selector = dict(selector or {})
        self._monotonic, self._sleep, self._chance = monotonic, sleep, chance
        self._page, self._watch_s, self._quiet_s = page, watch_s, quiet_s
        self._decoder = msgspec.json.Decoder(resource.kind)
        # One pass for nearly all lines; what does not fit goes the long way by `_Event`.
        self._events: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("Event", [("type", str), ("object", resource.kind)])
        )
        self._flushed: Callable[[], None] = getattr(sink, "flushed", _nothing)
        self._version = ""
        self._listed_once = False
        self._pages_expired = False
        self._told_at: float | None = None

    async def run(self) -> None:
        failures = 0
        while True:
            began, changes = self._monotonic(), self.changes
            try:
                if not self._version:
                    await self._list()
                    began = self._monotonic()
                await self._watch()
                if self.changes != changes:
                    failures = 0
                    continue  # a reader that falls behind is cut off by the API: on at once from where it was
            except _Expired:
                self._version = ""
            except ApiError as error:
                if await self._bear(error):
                    failures = 0
                    continue
            # What lasted for a while was no failure; what ends as soon as it begins is not tried at full speed.
            if self._monotonic() - began >= LASTED_S:
                failures = 0
            else:
                failures += 1
                await self._sleep(self._pause(failures))

    def _pause(self, failures: int) -> float:
        most = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
        return most * (0.5 + 0.5 * self._chance())

    async def _bear(self, error: ApiError) -> bool:
        """What to do about an error; True if the wait is over already."""
        if error.status == 410:
            self._version = ""
            self._pages_expired = True
            return False
        if error.status in (400, 404, 405) and self._version:
            self._version = ""  # the collection has gone or changed under the watch: the list will tell
            return False
        if error.status == 404:
            self._absent()
            await self._sleep(ABSENT_S * (0.9 + 0.2 * self._chance()))
            return True
        self._tell(error)
        if error.status in (401, 403):
            # Often for a moment only: an API server that has just started knows nobody's rights yet.
            self._version = ""
        return False

    def _absent(self) -> None:
        self.problem = ""
        self._listed_once = False
        self._sink.listed([])
        self._flushed()
        self.synced.set()

    def _tell(self, error: ApiError) -> None:
        self.problem = f"{error.message} {error.hint}".strip()
        now = self._monotonic()
        if self._told_at is None or now - self._told_at >= TELL_S:
            self._told_at = now
            _log.warning("%s cannot be kept up to date: %s", self._resource.path, self.problem)

    def _heard(self) -> None:
        self.problem = ""
        self.heard_at = self._monotonic()

    # ---------------------------------------------------------------------------------------- list

    async def _list(self) -> None:
        params = dict(self._selector)
        if not self._pages_expired:
            params["limit"] = str(self._page)
        if not self._listed_once:
            # From the API server's memory, which is quick; later only the newest will do, else time could run back.
            params["resourceVersion"] = "0"
        objects: list[T] = []
        while True:
            body = await self._api.request("GET", self._resource.path, params=params, timeout_s=120)
            try:
                page = msgspec.json.decode(body, type=_Page)
            except msgspec.DecodeError as error:
                raise ApiError(0, "Unreadable", f"The list of {self._resource.path} is not one: {error}") from error
            items = page.items or []
            for start in range(0, len(items), SLICE):
                for raw in items[start : start + SLICE]:
                    found = self._decoded(raw)
                    if found is not None:
                        objects.append(found)
                await asyncio.sleep(0)
            if not page.metadata.next:
                break
            params.pop("resourceVersion", None)
            params["continue"] = page.metadata.next
        self._pages_expired = False
        self._listed_once = True
        self.lists += 1
        self._version = page.metadata.resource_version
        self._heard()
        self._sink.listed(objects)
        self._flushed()
        self.synced.set()

    def _decoded(self, raw: Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            pass
        try:
            return decode(bytes(raw), self._resource.kind)
        except msgspec.ValidationError as error:
            self.undecodable += 1
            _log.warning("An object of %s is left out, it is not what was expected: %s", self._resource.path, error)
            return None

    # ---------------------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        """Until the API ends it. Whatever was told is remembered by `_version`, also if this raises."""
        # Not all at one time: the watches of a restarted API server would come back in step for ever.
        bound = self._watch_s + int(self._watch_s * 0.1 * self._chance())
        params = {
            **self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(bound),
        }
        self.watches += 1
        stream = self._api.stream(self._resource.path, params, quiet_s=min(self._quiet_s, 2.0 * bound))
        try:
            async for lines in stream:
                self._heard()
                try:
                    self._take(lines)
                finally:
                    self._flushed()
        finally:
            await stream.aclose()

    def _take(self, lines: list[bytes]) -> None:
        decode_event = self._events.decode
        changed = self._sink.changed
        for line in lines:
            try:
                event = decode_event(line)
            except msgspec.DecodeError:
                event = self._odd(line)
                if event is None:
                    continue
            kind, object = event.type, event.object
            if kind == "BOOKMARK":
                self._version = object.metadata.resource_version or self._version
                continue
            if kind not in ("ADDED", "MODIFIED", "DELETED"):
                self._broken(f"an event of the unknown kind {kind!r}")
            changed(cast(Change, kind), object)
            self.changes += 1
            self._version = object.metadata.resource_version or self._version

    def _odd(self, line: bytes) -> Any:
        """The same for a line that is not of the usual form: an error, an object with nulls, or garbage."""
        if not line.strip():
            return None
        try:
            event = msgspec.json.decode(line, type=_Event)
        except msgspec.DecodeError as error:
            self._broken(f"a line that is no event ({error})")
        if event.type == "ERROR":
            try:
                status = msgspec.json.decode(event.object, type=Status)
            except msgspec.ValidationError:
                status = Status()
            code = status.code or 500
            if code == 410:
                raise _Expired
            self._version = ""
            raise refused(status, code, f"watch of {self._resource.path}")
        found = self._decoded(event.object)
        if found is None:
            return None
        return _Decoded(event.type, found)

    def _broken(self, what: str) -> None:
        _log.warning("The watch of %s brought %s; it is listed again.", self._resource.path, what)
        raise _Expired


class _Decoded(Struct, Generic[T]):
    type: str
    object: T


def _nothing() -> None:
    pass
