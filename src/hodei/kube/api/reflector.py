"""Keeps a local copy of one collection equal to the API's: list, then watch, forever.

A watch that was cut resumes where it stopped. If that is not possible the collection is listed again and `listed` gets all of
it, so no change is lost silently. Objects are decoded directly to the structs of `objects`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from hodei.kube.api.client import Api, ApiError, Status, error_from_status
from hodei.kube.api.objects import Meta, decode

_log = logging.getLogger(__name__)
T = TypeVar("T")
_S = TypeVar("_S")
Change = Literal["ADDED", "MODIFIED", "DELETED"]

PAGE = 2000
DECODE_BATCH = 500
"""Objects decoded before other tasks run: the API sends a first list in one piece, whatever the limit."""
WATCH_S = 290
IDLE_TIMEOUT_S = 150.0
"""The API sends a bookmark about every minute; a watch without data for longer is dead."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MIN_LIFETIME_S = 5.0
ABSENT_PAUSE_S, LONGEST_ABSENT_PAUSE_S = 60.0, 600.0
LOG_EVERY_S = 60.0
_RECURSION_LIMIT = 12_000


class Sink(Protocol[T]):
    """Receives the objects; never called concurrently.

    It may also have `flushed()`, called after each batch of changes and after `listed`, to act once per batch; and
    `unreadable(kind, meta, why)`, called for objects that cannot be decoded (before `listed` if they are in the list).
    """

    def listed(self, objects: list[T], /) -> None:
        """The full list: objects that are not in it are deleted."""

    def changed(self, kind: Change, object: T, /) -> None:
        """One change, in the API's order. ADDED and MODIFIED may repeat a known state."""


class Resource(Struct, Generic[T], frozen=True):
    """The path of a collection (`/api/v1/pods`) and the type of its objects (a struct with `metadata: Meta`)."""

    path: str
    kind: type[T]


class _ListMeta(Struct):
    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next: str = msgspec.field(default="", name="continue")


class _Page(Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[Raw] | None = None


class _Bookmark(Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)


class _RawEvent(Struct):
    type: str
    object: Raw


class _Expired(Exception):
    """The requested version is not available any more: list again."""


class Reflector(Generic[T]):
    """`run` never ends. `synced` is set after the first list; `problem` says why the copy is missing or outdated.

    A collection that does not exist (404, for example a CRD that is not installed) counts as empty and is tried again every minute. An
    `optional` one also counts as empty while it may not be read or fails (`denied` says why), with growing pauses. `locate`
    finds the path of a collection with an unknown version; `fallback` is read if the whole may not be (`namespace_only`).
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
        random_fraction: Callable[[], float] = random.random,
        page: int = PAGE,
        watch_s: int = WATCH_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        optional: bool = False,
        locate: Callable[[], Awaitable[str]] | None = None,
        fallback: str = "",
    ) -> None:
        """`selector` has `fieldSelector` and `labelSelector`; `random_fraction` returns numbers from 0 to 1."""
        self.synced = asyncio.Event()
        self.problem = self.denied = ""
        self.lists = self.watches = self.changes = self.undecodable = self.faults = 0
        # Time of the last data from the API, and of the last activity (0.0: never).
        self.last_contact = self.last_activity = 0.0
        self._optional, self._locate, self._located = optional, locate, locate is None
        self.requested_path, self._fallback, self.namespace_only = resource.path, fallback, False
        self._denials = 0
        self._api, self._resource, self._sink = api, resource, sink
        self._selector = dict(selector or {})
        self._monotonic, self._sleep, self._random_fraction = monotonic, sleep, random_fraction
        self._page, self._watch_s, self._idle_timeout_s = page, watch_s, idle_timeout_s
        self._decoder = msgspec.json.Decoder(resource.kind)
        # One pass decodes nearly all lines; the others take the slow path with `_RawEvent`.
        self._events: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("Event", [("type", str), ("object", resource.kind)])
        )
        self._flushed: Callable[[], None] = getattr(sink, "flushed", lambda: None)
        self._unreadable: Callable[[Change, Meta, str], None] = getattr(sink, "unreadable", _log_unreadable)
        self._version = ""
        self._listed_once = False
        self._pages_expired = False
        self._logged_at: float | None = None

    async def run(self) -> None:
        failures = 0
        while True:
            began, changes = self._monotonic(), self.changes
            self.last_activity = began
            try:
                if not self._version:
                    await self._list()
                    began = self._monotonic()
                await self._watch()
                if self.changes != changes:
                    failures = 0
                    continue  # the API cuts off slow readers: resume at once
            except _Expired:
                self._version = ""
            except ApiError as error:
                if await self._handle_error(error):
                    failures = 0
                    continue
            except Exception as error:
                # No data of the cluster may end a watch: list again.
                self.faults += 1
                self.problem = f"{type(error).__name__}: {error}"
                _log.exception("The watch of %s has failed; it starts again.", self.path)
                self._version = ""
                self._listed_once = False
            # A watch that lasted is no failure; one that ends at once must not be repeated at full speed.
            if self._monotonic() - began >= MIN_LIFETIME_S:
                failures = 0
            else:
                failures += 1
                await self._sleep(self._pause(failures))

    def _pause(self, failures: int) -> float:
        most = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
        return most * (0.5 + 0.5 * self._random_fraction())

    async def _handle_error(self, error: ApiError) -> bool:
        """True if the pause is already over."""
        if error.status == 410:
            self._version = ""
            self._pages_expired = True
            return False
        if error.status in (400, 404, 405) and self._version:
            self._version = ""  # the collection was removed or changed: the list will show
            return False
        if error.status == 403 and self._fallback:
            self._resource, self._fallback = Resource(self._fallback, self._resource.kind), ""
            self.namespace_only = True
            return True
        if error.status == 404 or (self._optional and (error.status == 403 or not self.synced.is_set())):
            await self._serve_empty(error)
            return True
        self._log_problem(error)
        if error.status in (401, 403):
            # Often temporary: an API server that has just started does not know the roles yet.
            self._version = ""
        return False

    async def _serve_empty(self, error: ApiError) -> None:
        """The collection does not exist, or is optional and may not be read."""
        denied = f"{error.message} {error.hint}".strip() if error.status != 404 else ""
        if denied and denied != self.denied:
            _log.warning("%s is treated as empty and tried again later: %s", self.path, denied)
        self.denied = denied
        self._located = self._locate is None
        self._set_empty()
        pause = (
            min(ABSENT_PAUSE_S * 2.0 ** min(self._denials, 10), LONGEST_ABSENT_PAUSE_S) if denied else ABSENT_PAUSE_S
        )
        self._denials = self._denials + 1 if denied else 0
        await self._sleep(pause * (0.9 + 0.2 * self._random_fraction()))

    @property
    def path(self) -> str:
        return self._resource.path

    def _set_empty(self) -> None:
        self.problem = ""
        self._listed_once = False
        self._sink.listed([])
        self._flushed()
        self.synced.set()

    def _log_problem(self, error: ApiError) -> None:
        self.problem = f"{error.message} {error.hint}".strip()
        now = self._monotonic()
        if self._logged_at is None or now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            _log.warning("%s cannot be kept up to date: %s", self._resource.path, self.problem)

    def _mark_contact(self) -> None:
        self.problem = self.denied = ""
        self._denials = 0
        self.last_contact = self.last_activity = self._monotonic()

    async def _list(self) -> None:
        if not self._located and self._locate is not None:
            path = await self._locate()
            if not path:
                raise ApiError(404, "NotFound", f"{self.path} is not served")
            self._resource, self._located = Resource(path, self._resource.kind), True
        params = dict(self._selector)
        if not self._pages_expired:
            params["limit"] = str(self._page)
        if not self._listed_once:
            # From the API server's cache, which is fast. Later lists must be current, or time would run backwards.
            params["resourceVersion"] = "0"
        objects: list[T] = []
        while True:
            self.last_activity = self._monotonic()
            body = await self._api.request("GET", self._resource.path, params=params, timeout_s=120)
            try:
                page = _decode_deep(body, _Page)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ApiError(
                    0, "Unreadable", f"The list of {self._resource.path} cannot be decoded: {error}"
                ) from error
            items = page.items or []
            for start in range(0, len(items), DECODE_BATCH):
                for raw in items[start : start + DECODE_BATCH]:
                    found = self._decode_object("ADDED", raw)
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
        self._mark_contact()
        self._sink.listed(objects)
        self._flushed()
        self.synced.set()

    def _decode_object(self, kind: Change, raw: Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except Exception:
            pass
        try:
            return decode(bytes(raw), self._resource.kind)
        except Exception as error:  # including deep nesting and invalid numbers
            self.undecodable += 1
            self._unreadable(kind, _read_meta(raw), f"it cannot be decoded: {error}")
            return None

    async def _watch(self) -> None:
        """Until the API ends it. `_version` is current also if this raises."""
        # Random, or the watches of a restarted API server would stay synchronized.
        bound = self._watch_s + int(self._watch_s * 0.1 * self._random_fraction())
        params = {
            **self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(bound),
        }
        self.watches += 1
        stream = self._api.stream(self._resource.path, params, idle_timeout_s=min(self._idle_timeout_s, 2.0 * bound))
        try:
            async for lines in stream:
                self._mark_contact()
                try:
                    self._apply(lines)
                finally:
                    self._flushed()
        finally:
            await stream.aclose()

    def _apply(self, lines: list[bytes]) -> None:
        decode_event = self._events.decode
        changed = self._sink.changed
        for line in lines:
            try:
                event = decode_event(line)
            except Exception:
                event = self._decode_unusual(line)
                if event is None:
                    continue
            kind, object = event.type, event.object
            if kind == "BOOKMARK":
                self._version = object.metadata.resource_version or self._version
                continue
            if kind not in ("ADDED", "MODIFIED", "DELETED"):
                self._relist(f"an event of unknown type {kind!r}")
            changed(cast(Change, kind), object)
            self.changes += 1
            self._version = object.metadata.resource_version or self._version

    def _decode_unusual(self, line: bytes) -> Any:
        """Decode an unusual line: an error, an object with nulls, or garbage."""
        if not line.strip():
            return None
        try:
            event = _decode_deep(line, _RawEvent)
        except (msgspec.DecodeError, RecursionError) as error:
            self._relist(f"an invalid event ({error})")
        if event.type == "ERROR":
            try:
                status = msgspec.json.decode(event.object, type=Status)
            except msgspec.DecodeError:
                status = Status()
            code = status.code or 500
            if code == 410:
                raise _Expired
            self._version = ""
            raise error_from_status(status, code, f"watch of {self._resource.path}")
        if event.type == "BOOKMARK":
            try:
                return _WatchEvent("BOOKMARK", _decode_deep(event.object, _Bookmark))
            except (msgspec.DecodeError, RecursionError):
                return None
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            self._relist(f"an event of unknown type {event.type!r}")
        found = self._decode_object(cast(Change, event.type), event.object)
        if found is None:
            return None
        return _WatchEvent(event.type, found)

    def _relist(self, what: str) -> NoReturn:
        _log.warning("The watch of %s sent %s; it is listed again.", self._resource.path, what)
        raise _Expired


class _WatchEvent(Struct, Generic[T]):
    type: str
    object: T


def _log_unreadable(kind: Change, meta: Meta, why: str) -> None:
    _log.warning("%s/%s is ignored: %s", meta.namespace, meta.name, why[:500])


class _RawMeta(Struct):
    name: Raw = Raw(b'""')
    namespace: Raw = Raw(b'""')
    uid: Raw = Raw(b'""')


class _MetadataOnly(Struct):
    metadata: _RawMeta = msgspec.field(default_factory=_RawMeta)


def _read_meta(raw: Raw) -> Meta:
    """The name of an object that cannot be decoded."""
    try:
        found = _decode_deep(raw, _MetadataOnly).metadata
    except (msgspec.DecodeError, RecursionError):
        return Meta()
    return Meta(_read_text(found.name), _read_text(found.namespace), _read_text(found.uid))


def _decode_deep(data: bytes | Raw, kind: type[_S]) -> _S:
    """Decode, however deeply the skipped parts are nested: an API server accepts ten times Python's limit."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
        try:
            return msgspec.json.decode(data, type=kind)
        finally:
            sys.setrecursionlimit(limit)


def _read_text(raw: Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return ""
