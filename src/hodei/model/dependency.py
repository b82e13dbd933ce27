"""What a job waits for before it is queued: other jobs, and data that must appear.

Users write job names; admission resolves each name to a job id (`control.admission.dependency_names`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, get_args
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId

On = Literal["completed", "succeeded", "failed", "checkpointed", "exists"]
ONS: tuple[On, ...] = get_args(On)
_OF_A_JOB = {"completed": "to end", "succeeded": "to succeed", "failed": "to fail", "checkpointed": "to save its work"}


class Dependency(Struct, frozen=True, omit_defaults=True):
    """`completed`: the job has ended in any state; `succeeded`, `failed`: in that state; `checkpointed`: it has taken a
    checkpoint or succeeded. `exists`: the file or URL `what` exists. `elements`: elements of an array, in brackets as
    written: `[3]`, `[0-9]`, or `[]` for all."""

    on: On = "succeeded"
    job: JobId = 0
    name: str = ""
    what: str = ""
    elements: str = ""

    @property
    def subject(self) -> str:
        if self.on == "exists":
            return self.what
        if not self.job:
            return f"job {self.name}{self.elements}"
        return f"job {self.job} ({self.name}{self.elements})" if self.name else f"job {self.job}"

    def __str__(self) -> str:
        return f"{self.subject} {'to appear' if self.on == 'exists' else _OF_A_JOB[self.on]}"

    def met_by(self, state: str, *, saved: bool) -> bool | None:
        """True if met by a job in this state, False if it can never be met, None while the job has not ended."""
        if self.on == "checkpointed" and (saved or state == "succeeded"):
            return True
        if state not in ("succeeded", "failed", "cancelled"):
            return None
        return self.on == "completed" or self.on == state


class Dependencies(Struct, frozen=True, omit_defaults=True):
    """All dependencies, or `need` of them (0: all), must be met. `timeout_ms`: how long after submission the job waits."""

    of: tuple[Dependency, ...] = ()
    need: int = 0
    timeout_ms: int = 0

    @property
    def needed(self) -> int:
        return self.need or len(self.of)


class DependencyStatus(Struct, frozen=True, omit_defaults=True):
    """The stored state of a job that another job waits for. `saved`: it has taken a checkpoint."""

    job: JobId
    state: str
    saved: bool = False


# A caller who can test whether a file or URL exists can probe the server's disk and network. Therefore jobs may wait only
# for locations below those that the configuration allows. Locations are compared by path component, never as text: `/data`
# does not allow `/database`, nor `https://a` `https://a.evil`.

MAX_LOCATION_LENGTH = 1024
_PORTS = {"http": 80, "https": 443}
_HINT = "write an absolute path on the server's host or a URL: /data/x.csv, https://host/x.csv"


class DataLocation(Struct, frozen=True):
    """`root`: "" for a file, otherwise scheme, host and port. `query` is part of the request, not of the location."""

    root: str
    path: str
    query: str = ""

    @property
    def is_file(self) -> bool:
        return not self.root

    def within(self, other: DataLocation) -> bool:
        """Whether this is `other` or below it."""
        above = other.path if other.path.endswith("/") else f"{other.path}/"
        return self.root == other.root and (self.path == other.path or self.path.startswith(above))


@lru_cache(maxsize=4096)
def parse_data_location(text: str) -> DataLocation:
    """InvalidInput for anything ambiguous."""
    if not text or len(text) > MAX_LOCATION_LENGTH or not text.isascii() or not text.isprintable():
        raise _bad(text, "it is empty, too long, or has characters that do not belong there")
    if text.startswith("/"):
        _check_parts(text, text.removeprefix("/"))
        return DataLocation("", text)
    if " " in text or "\\" in text or "#" in text:
        raise _bad(text, "an address has no spaces, backslashes or '#'")
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise _bad(text, "it cannot be read") from None
    if url.scheme not in _PORTS or not url.hostname or not text.startswith(f"{url.scheme}://"):
        raise _bad(text, "it is neither")
    if url.username is not None or url.password is not None:
        raise _bad(text[:8], "an address with a user or a password in it")
    _check_parts(text, unquote(url.path).removeprefix("/"))
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname.lower()
    return DataLocation(f"{url.scheme}://{host}:{port or _PORTS[url.scheme]}", url.path or "/", url.query)


def _check_parts(text: str, path: str) -> None:
    parts = path.removesuffix("/").split("/") if path else []
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or "\0" in path:
        raise _bad(text, "its path has empty parts, '.' or '..'")


def _bad(text: str, why: str) -> InvalidInput:
    return InvalidInput(f"a job cannot wait for {text[:80]!r}: {why}", hint=_HINT)


class AllowedData:
    """The locations that the configuration allows. InvalidInput if one cannot be parsed."""

    def __init__(self, locations: Iterable[str]) -> None:
        self._locations = tuple(parse_data_location(text) for text in locations)

    def __bool__(self) -> bool:
        return bool(self._locations)

    def __contains__(self, location: object) -> bool:
        return isinstance(location, DataLocation) and any(location.within(one) for one in self._locations)

    def check(self, what: Iterable[str]) -> None:
        """InvalidInput for the first location that is not allowed."""
        for text in what:
            if parse_data_location(text) not in self:
                raise InvalidInput(
                    f"a job may not wait for {text[:200]!r}: it is not below a location that the server's configuration allows",
                    hint="an administrator can add its directory or URL to `allow` in [scheduling.data]",
                    code="DATA_NOT_ALLOWED",
                )
