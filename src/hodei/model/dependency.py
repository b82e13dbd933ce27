"""What a job waits for before it may stand in line: other jobs, and data that is to appear.

Names are how people write it; before a job is let in each name has become the number of a job (`control.admission.dependency_names`).
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
    """One thing to wait for. `completed`: the job has ended, in whatever way; `succeeded` and `failed`: in that one;
    `checkpointed`: it has saved its work once, or has succeeded. `exists`: a file or an address, which is `what`.
    `elements`: which elements of an array, in brackets as written: `[3]`, `[0-9]`, or `[]` for all of them."""

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
        """What the job's end in this state comes to: met, never to be met, or (None) it has not ended."""
        if self.on == "checkpointed" and (saved or state == "succeeded"):
            return True
        if state not in ("succeeded", "failed", "cancelled"):
            return None
        return self.on == "completed" or self.on == state


class Dependencies(Struct, frozen=True, omit_defaults=True):
    """All of them, or `need` of them (0: all). `timeout_ms`: so long after it was submitted a job still waits."""

    of: tuple[Dependency, ...] = ()
    need: int = 0
    timeout_ms: int = 0

    @property
    def needed(self) -> int:
        return self.need or len(self.of)


class DependencyStatus(Struct, frozen=True, omit_defaults=True):
    """How a job stands that someone waits for, as the store knows it. `saved`: it has saved its work at least once."""

    job: JobId
    state: str
    saved: bool = False


MAX_LOCATION_LENGTH = 1024
_PORTS = {"http": 80, "https": 443}
_HINT = "an absolute path of the server's host, or an address: /data/x.csv, https://host/x.csv"


class DataLocation(Struct, frozen=True):
    """`root`: "" for a file, else scheme, host and port. `query` belongs to what is asked for, not to where it is."""

    root: str
    path: str
    query: str = ""

    @property
    def is_file(self) -> bool:
        return not self.root

    def within(self, other: DataLocation) -> bool:
        """Whether it is this other place, or below it."""
        above = other.path if other.path.endswith("/") else f"{other.path}/"
        return self.root == other.root and (self.path == other.path or self.path.startswith(above))


@lru_cache(maxsize=4096)
def parse_data_location(text: str) -> DataLocation:
    """InvalidInput for anything that could be read in more than one way."""
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
    return InvalidInput(f"{text[:80]!r} cannot be waited for: {why}", hint=_HINT)


class AllowedData:
    """The places that a configuration names. InvalidInput if one of them is not a place."""

    def __init__(self, places: Iterable[str]) -> None:
        self._places = tuple(parse_data_location(text) for text in places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, place: object) -> bool:
        return isinstance(place, DataLocation) and any(place.within(one) for one in self._places)

    def check(self, what: Iterable[str]) -> None:
        """InvalidInput for the first that may not be asked for."""
        for text in what:
            if parse_data_location(text) not in self:
                raise InvalidInput(
                    f"{text[:200]!r} may not be waited for: it is not below a place that this server's configuration allows",
                    hint="an administrator can add its directory or address to allow in [scheduling.data]",
                    code="DATA_NOT_ALLOWED",
                )
