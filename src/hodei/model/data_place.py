"""Files and addresses that jobs may wait for: how they are written, and which of them an operator has allowed.

Whoever may ask whether something exists can look around where he has no business: on the server's disk, and with the
server's hands in its network. So nothing may be asked for that is not below a place that the configuration names, and
places are compared part by part, never as mere text: `/data` does not allow `/database`, nor `https://a` `https://a.evil`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from hodei.model.errors import InvalidInput

MAX_PLACE = 1024
_PORTS = {"http": 80, "https": 443}
_HINT = "an absolute path of the server's host, or an address: /data/x.csv, https://host/x.csv"


class Place(Struct, frozen=True):
    """`root`: "" for a file, else scheme, host and port. `query` belongs to what is asked for, not to where it is."""

    root: str
    path: str
    query: str = ""

    @property
    def is_file(self) -> bool:
        return not self.root

    def within(self, other: Place) -> bool:
        """Whether it is this other place, or below it."""
        above = other.path if other.path.endswith("/") else f"{other.path}/"
        return self.root == other.root and (self.path == other.path or self.path.startswith(above))


@lru_cache(maxsize=4096)
def parse_place(text: str) -> Place:
    """InvalidInput for anything that could be read in more than one way."""
    if not text or len(text) > MAX_PLACE or not text.isascii() or not text.isprintable():
        raise _bad(text, "it is empty, too long, or has characters that do not belong there")
    if text.startswith("/"):
        _check_parts(text, text.removeprefix("/"))
        return Place("", text)
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
    return Place(f"{url.scheme}://{host}:{port or _PORTS[url.scheme]}", url.path or "/", url.query)


def _check_parts(text: str, path: str) -> None:
    parts = path.removesuffix("/").split("/") if path else []
    if any(part in ("", ".", "..") for part in parts) or "\\" in path or "\0" in path:
        raise _bad(text, "its path has empty parts, '.' or '..'")


def _bad(text: str, why: str) -> InvalidInput:
    return InvalidInput(f"{text[:80]!r} cannot be waited for: {why}", hint=_HINT)


class Allowed:
    """The places that a configuration names. InvalidInput if one of them is not a place."""

    def __init__(self, places: Iterable[str]) -> None:
        self._places = tuple(parse_place(text) for text in places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, place: object) -> bool:
        return isinstance(place, Place) and any(place.within(one) for one in self._places)

    def check(self, what: Iterable[str]) -> None:
        """InvalidInput for the first that may not be asked for."""
        for text in what:
            if parse_place(text) not in self:
                raise InvalidInput(
                    f"{text[:200]!r} may not be waited for: it is not below a place that this server's configuration allows",
                    hint="an administrator can add its directory or address to allow in [scheduling.data]",
                    code="DATA_NOT_ALLOWED",
                )
