"""Keeps somebody's picture of one kind of object equal to the API's: list, then watch, for ever.

A watch is resumed where it was cut; what cannot be resumed is listed again, and `listed` then brings the whole picture, so
that nothing is lost or repeated in silence. Decoding is straight into the slim structs of `objects`.
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

from hodei.kube.api.client import Api, ApiError, Status, refused
from hodei.kube.api.objects import Meta, decode

_log = logging.getLogger(__name__)
T = TypeVar("T")
_S = TypeVar("_S")
Change = Literal["ADDED", "MODIFIED", "DELETED"]

PAGE = 2000
SLICE = 500
"""How many objects are decoded before other tasks get a turn: the API gives a first list whole, whatever the limit."""
WATCH_S = 290
QUIET_S = 150.0
"""The API sends a bookmark about every minute; a watch that brings nothing for longer than this is dead or as good as."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LASTED_S = 5.0
ABSENT_S, LONGEST_ABSENT_S = 60.0, 600.0
TELL_S = 60.0
_DEEPEST = 12_000


class Sink(Protocol[T]):
    """Who keeps the picture. Called between awaits, never concurrently. It may also have `flushed()`: called after the
    changes of one batch, and after `listed`, so that whoever acts can act once per batch; and `unreadable(kind, meta,
    why)`: told of an object that cannot be decoded, before `listed` if it was in the list."""

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


class _Mark(Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)


class _Event(Struct):
    type: str
    object: Raw


class _Expired(Exception):
    """The version that was asked for is not kept any more: list again."""


class Reflector(Generic[T]):
    """`run` for ever, whatever happens. `synced` is set with the first picture; `problem` says why there is none or why it
    is old.

    A collection that does not exist (404: a CRD that is not installed) has an empty picture and is asked for every minute.
    An `optional` one has an empty picture also while it may not be read or is out of order (`denied` says why): nobody
    waits for it, it is asked for again after growing pauses. `locate` finds the path of one whose version is not known;
    `instead` is read where the whole may not be (`narrowed`).
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
        optional: bool = False,
        locate: Callable[[], Awaitable[str]] | None = None,
        fallback: str = "",
    ) -> None:
        """`selector` holds `fieldSelector` and `labelSelector`; `chance` gives numbers from 0 to 1."""
        self.synced = asyncio.Event()
        self.problem = self.denied = ""
        self.lists = self.watches = self.changes = self.undecodable = self.faults = 0
        # When the API was last heard, and when this last did anything at all (0.0: never).
        self.last_contact = self.last_activity = 0.0
        self._optional, self._locate, self._located = optional, locate, locate is None
        self.requested_path, self._fallback, self.namespace_only = resource.path, fallback, False
        self._absences = 0
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
        self._unreadable: Callable[[Change, Meta, str], None] = getattr(sink, "unreadable", _said_only)
        self._version = ""
        self._listed_once = False
        self._pages_expired = False
        self._told_at: float | None = None

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
                    continue  # a reader that falls behind is cut off by the API: on at once from where it was
            except _Expired:
                self._version = ""
            except ApiError as error:
                if await self._bear(error):
                    failures = 0
                    continue
            except Exception as error:
                # Nothing that comes from the cluster may end a watch: all is listed anew.
                self.faults += 1
                self.problem = f"{type(error).__name__}: {error}"
                _log.exception("The watch of %s has failed; it starts again.", self.path)
                self._version = ""
                self._listed_once = False
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
        if error.status == 403 and self._fallback:
            self._resource, self._fallback = Resource(self._fallback, self._resource.kind), ""
            self.namespace_only = True
            return True
        if error.status == 404 or (self._optional and (error.status == 403 or not self.synced.is_set())):
            await self._go_without(error)
            return True
        self._tell(error)
        if error.status in (401, 403):
            # Often for a moment only: an API server that has just started knows nobody's rights yet.
            self._version = ""
        return False

    async def _go_without(self, error: ApiError) -> None:
        """There is no such collection, or an optional one may not be read."""
        denied = f"{error.message} {error.hint}".strip() if error.status != 404 else ""
        if denied and denied != self.denied:
            _log.warning("%s is done without, and asked for now and then: %s", self.path, denied)
        self.denied = denied
        self._located = self._locate is None
        self._absent()
        pause = min(ABSENT_S * 2.0 ** min(self._absences, 10), LONGEST_ABSENT_S) if denied else ABSENT_S
        self._absences = self._absences + 1 if denied else 0
        await self._sleep(pause * (0.9 + 0.2 * self._chance()))

    @property
    def path(self) -> str:
        return self._resource.path

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
        self.problem = self.denied = ""
        self._absences = 0
        self.last_contact = self.last_activity = self._monotonic()

    # ---------------------------------------------------------------------------------------- list

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
            # From the API server's memory, which is quick; later only the newest will do, else time could run back.
            params["resourceVersion"] = "0"
        objects: list[T] = []
        while True:
            self.last_activity = self._monotonic()
            body = await self._api.request("GET", self._resource.path, params=params, timeout_s=120)
            try:
                page = _skipping(body, _Page)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ApiError(0, "Unreadable", f"The list of {self._resource.path} is not one: {error}") from error
            items = page.items or []
            for start in range(0, len(items), SLICE):
                for raw in items[start : start + SLICE]:
                    found = self._decoded("ADDED", raw)
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

    def _decoded(self, kind: Change, raw: Raw) -> T | None:
        try:
            return self._decoder.decode(raw)
        except Exception:
            pass
        try:
            return decode(bytes(raw), self._resource.kind)
        except Exception as error:  # also what is nested too deeply, or holds a number that is none
            self.undecodable += 1
            self._unreadable(kind, _meta_in(raw), f"it is not what was expected: {error}")
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
            except Exception:
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
            event = _skipping(line, _Event)
        except (msgspec.DecodeError, RecursionError) as error:
            self._broken(f"a line that is no event ({error})")
        if event.type == "ERROR":
            try:
                status = msgspec.json.decode(event.object, type=Status)
            except msgspec.DecodeError:
                status = Status()
            code = status.code or 500
            if code == 410:
                raise _Expired
            self._version = ""
            raise refused(status, code, f"watch of {self._resource.path}")
        if event.type == "BOOKMARK":
            try:
                return _Decoded("BOOKMARK", _skipping(event.object, _Mark))
            except (msgspec.DecodeError, RecursionError):
                return None
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            self._broken(f"an event of the unknown kind {event.type!r}")
        found = self._decoded(cast(Change, event.type), event.object)
        if found is None:
            return None
        return _Decoded(event.type, found)

    def _broken(self, what: str) -> NoReturn:
        _log.warning("The watch of %s brought %s; it is listed again.", self._resource.path, what)
        raise _Expired


class _Decoded(Struct, Generic[T]):
    type: str
    object: T


def _nothing() -> None:
    pass


def _said_only(kind: Change, meta: Meta, why: str) -> None:
    _log.warning("%s/%s is left out: %s", meta.namespace, meta.name, why[:500])


class _Name(Struct):
    name: Raw = Raw(b'""')
    namespace: Raw = Raw(b'""')
    uid: Raw = Raw(b'""')


class _Nameable(Struct):
    metadata: _Name = msgspec.field(default_factory=_Name)


def _meta_in(raw: Raw) -> Meta:
    """The name of an object of which little else can be read."""
    try:
        found = _skipping(raw, _Nameable).metadata
    except (msgspec.DecodeError, RecursionError):
        return Meta()
    return Meta(_text(found.name), _text(found.namespace), _text(found.uid))


def _skipping(data: bytes | Raw, kind: type[_S]) -> _S:
    """Decoded, however deeply what is skipped is nested: an API server takes ten times as much as Python by itself."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(max(usual, _DEEPEST))
        try:
            return msgspec.json.decode(data, type=kind)
        finally:
            sys.setrecursionlimit(usual)


def _text(raw: Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return ""
