"""One kept-alive HTTP connection: requests that may be sent again are, once, after a connection that had gone stale."""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec

from hodei.client.address import Target
from hodei.client.errors import ServerUnreachable, error_of
from hodei.model.effects import Event
from hodei.model.errors import InvalidInput

# What http.client and sockets raise when the other side is not there or goes away (ConnectionError and TimeoutError too).
LOST = (OSError, http.client.HTTPException)
# A host name that no resolver takes (a label of more than 63 letters), or a header that is not of plain text.
_UNSENDABLE = (UnicodeError, ValueError)


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Transport:
    """Talks to whatever `find` names at the moment of connecting: a restarted server may have another port.

    Not for use by several threads at once. `met` is true once any server has answered.
    """

    def __init__(self, find: Callable[[], Target], timeout_s: float) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._target: Target | None = None
        self.met = False

    @property
    def target(self) -> Target:
        if self._target is None:
            self._target = self._find()
        return self._target

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = True,
        timeout_s: float = 0,
    ) -> Reply:
        """The answer, if it is below 400; else the error it stands for. `again`: sending it twice does no harm."""
        reused = self._usable()
        try:
            reply = self._exchange(method, path, query, body, headers, timeout_s)
        except ServerUnreachable:
            if not (reused and again):
                raise
            reply = self._exchange(method, path, query, body, headers, timeout_s)
        if reply.status >= 400:
            raise error_of(reply.status, reply.body)
        return reply

    @contextmanager
    def stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that goes on, on a connection of its own. Silence longer than the timeout counts as a lost connection."""
        target = self._target = self._find()
        connection = _connect(target, self._timeout_s)
        try:
            try:
                connection.request("GET", _url(target, path, query), headers=_headers(target, headers))
                response = connection.getresponse()
            except LOST as error:
                raise _unreachable(target, error) from error
            except _UNSENDABLE as error:
                raise _unsendable(target, error) from None
            self.met = True
            if response.status >= 400:
                raise error_of(response.status, response.read(1_000_000))
            yield response
        finally:
            connection.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> Reply:
        if self._connection is None:
            self._target = self._find()
            self._connection = _connect(self._target, self._timeout_s)
        target, connection = self.target, self._connection
        connection.timeout = timeout_s or self._timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            connection.request(method, _url(target, path, query or {}), body, _headers(target, headers or {}))
            response = connection.getresponse()
            data = response.read()
        except LOST as error:
            self.close()
            raise _unreachable(target, error) from error
        except _UNSENDABLE as error:
            self.close()
            raise _unsendable(target, error) from None
        except BaseException:
            # Interrupted half-way (Ctrl-C): the rest of this answer must not become the start of the next one.
            self.close()
            raise
        self.met = True
        if response.will_close:
            self.close()
        return Reply(response.status, response.headers, data)

    def _usable(self) -> bool:
        """True if there is an idle connection; one that the server has closed meanwhile is dropped here, unused."""
        if self._connection is None or self._connection.sock is None:
            return False
        with suppress(OSError, ValueError):
            if not select.select([self._connection.sock], [], [], 0)[0]:
                return True
        self.close()
        return False


def _connect(target: Target, timeout_s: float) -> http.client.HTTPConnection:
    if any(not letter.isprintable() or letter.isspace() for letter in target.host):
        raise InvalidInput(f"{target.host[:200]!r} is not the name of a host", hint="check HODEI_SERVER")
    if target.scheme == "http":
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    try:
        context = ssl.create_default_context(cafile=os.environ.get("HODEI_CA_FILE") or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"cannot use the certificates in HODEI_CA_FILE: {error}") from None
    return http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=context)


def _url(target: Target, path: str, query: Mapping[str, str]) -> str:
    given = {key: value for key, value in query.items() if value != ""}
    return target.path + path + (f"?{urlencode(given)}" if given else "")


def _headers(target: Target, more: Mapping[str, str]) -> dict[str, str]:
    out = {"Accept": "application/json", **more}
    if target.token:
        out["Authorization"] = f"Bearer {target.token}"
    return out


def _unsendable(target: Target, error: ValueError) -> InvalidInput:
    return InvalidInput(
        f"the request to {target.address[:200]} cannot be sent: {error}",
        hint="is the address right? keys and tokens are plain ASCII text in one line",
    )


def _unreachable(target: Target, error: BaseException) -> ServerUnreachable:
    hint = "is it running? start one with: hodei up, or look with: hodei doctor"
    match error:
        case ConnectionRefusedError():
            what = "nothing listens there"
        case TimeoutError():
            what = "no answer in time"
        case ssl.SSLCertVerificationError():
            what, hint = (
                f"its certificate is not trusted ({error.verify_message})",
                "set HODEI_CA_FILE to its authority",
            )
        case socket.gaierror():
            what, hint = "no such host", "check HODEI_SERVER"
        case http.client.HTTPException() | ConnectionError():
            what = "the connection was lost"
        case _:
            what = str(error) or type(error).__name__
    return ServerUnreachable(f"cannot reach the server at {target.address}: {what}", hint=hint)


# ------------------------------------------------------------------------------------------------- sse
# Server-sent events, read line by line.


def sse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in a stream of server-sent events; comments and messages of other kinds are passed over."""
    data: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            try:
                yield msgspec.json.decode(b"\n".join(data), type=Event)
            except msgspec.DecodeError:
                pass
            data = []
