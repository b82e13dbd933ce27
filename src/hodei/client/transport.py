"""Find the server, send HTTP requests to it, and turn its error responses into exceptions."""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec

from hodei.api.views import JobView, Problem
from hodei.model.effects import Event
from hodei.model.errors import (
    BackendError,
    BackendRefused,
    Conflict,
    HodeiError,
    InvalidInput,
    NotFound,
    QueueFull,
    StaleEpoch,
    Unavailable,
    Unsupported,
)


class ServerUnreachable(HodeiError):
    """No server answered. If the connection was lost on the way, the outcome of the request is unknown."""

    code = "UNREACHABLE"


class Denied(HodeiError):
    """The token is unknown, or its role does not allow the request."""

    code = "DENIED"


class WaitTimedOut(HodeiError, TimeoutError):
    """Not every job ended in time; `jobs` has the current state of each."""

    code = "WAIT_TIMEOUT"

    def __init__(self, message: str, *, hint: str = "", jobs: Sequence[JobView] = ()) -> None:
        super().__init__(message, hint=hint)
        self.jobs = list(jobs)


_BY_CODE: dict[str, type[HodeiError]] = {
    kind.code: kind
    for kind in (
        NotFound, Conflict, QueueFull, Unavailable, StaleEpoch, BackendError, BackendRefused, Unsupported, Denied, InvalidInput,
    )
}  # fmt: skip
_BY_STATUS: dict[int, type[HodeiError]] = {
    400: InvalidInput, 401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 412: Conflict, 413: InvalidInput,
    415: InvalidInput, 422: InvalidInput, 429: QueueFull, 501: Unsupported, 502: Unavailable, 503: Unavailable, 504: Unavailable,
}  # fmt: skip


def error_from(status: int, body: bytes) -> HodeiError:
    """The exception for a response with a status of 400 or more."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A proxy answered, or this is not a Hodei server: its text would not help the reader.
        kind = _BY_STATUS.get(status, HodeiError)
        hint = "" if kind is Denied else "is this the address of a Hodei server? see: hodei doctor"
        return kind(f"the server answered with HTTP status {status}", hint=hint, code=f"HTTP_{status}")
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(status, HodeiError)
    if kind is InvalidInput:
        problems = tuple(problem.problems)
        return InvalidInput(problem.message, hint=problem.hint, code=problem.code, problems=problems)
    return kind(problem.message, hint=problem.hint, code=problem.code)


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServerFile(msgspec.Struct, frozen=True):
    """`server.json`, which a running server writes into its home."""

    address: str
    pid: int = 0


class Target(msgspec.Struct, frozen=True):
    """The address and token of a server. `path` is a prefix of `/api/v1`, empty for a server at the root of its host."""

    scheme: str
    host: str
    port: int
    path: str
    token: str

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def loopback(self) -> bool:
        return self.host in _LOOPBACK


def home_dir(home: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """`home`, else HODEI_HOME, else ~/.hodei."""
    return Path(home or environ.get("HODEI_HOME") or "~/.hodei").expanduser()


def read_server_file(home: Path) -> ServerFile | None:
    """The server file of `home`; None if it is missing or unreadable."""
    try:
        return msgspec.json.decode((home / "server.json").read_bytes(), type=ServerFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def find_server(
    address: str | None = None,
    token: str | None = None,
    home: Path | str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """The server to use: from the arguments, else the environment, else the home. ServerUnreachable if none is set."""
    where = home_dir(home, environ)
    named = address or environ.get("HODEI_SERVER", "")
    if not named:
        found = read_server_file(where)
        if found is None:
            raise ServerUnreachable(
                f"no server is running here ({where}/server.json is missing)",
                hint="start one with: hodei up, or set HODEI_SERVER",
            )
        return split_address(found.address, token or _token_of(environ) or _token_in(where / "token"))
    target = split_address(named, token or _token_of(environ))
    if not target.token and target.loopback:
        # The token in the home is sent to this machine only, never to a host from an argument or the environment.
        return msgspec.structs.replace(target, token=_token_in(where / "token"))
    return target


def split_address(address: str, token: str = "") -> Target:
    text = address.strip()
    hint = "write it as http://127.0.0.1:8443 or https://hodei.example.com"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
    except ValueError:  # half an IPv6 address
        raise InvalidInput(f"{text[:200]!r} is not the address of a server", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidInput(f"{text[:200]!r} is not the address of a server", hint=hint)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise InvalidInput(f"{text[:200]!r} has no valid port", hint=hint) from None
    if not token.isprintable() or not token.isascii() or " " in token:
        raise InvalidInput("the token contains characters that no token has", hint="is the token file the right one?")
    return Target(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), token)


def _token_of(environ: Mapping[str, str]) -> str:
    if token := environ.get("HODEI_TOKEN", "").strip():
        return token
    if file := environ.get("HODEI_TOKEN_FILE", ""):
        try:
            return Path(file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise InvalidInput(f"cannot read the token file {file}: {reason}", hint="see HODEI_TOKEN_FILE") from None
    return ""


def _token_in(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


# Raised by http.client and sockets when the server is down or closes the connection.
CONNECTION_ERRORS = (OSError, http.client.HTTPException)
# A host name that cannot be resolved (a label of more than 63 characters), or a header that is not ASCII.
_ENCODING_ERRORS = (UnicodeError, ValueError)


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Transport:
    """One kept-alive HTTP connection. `find` is called for each new connection: a restarted server may have another port.

    Not thread-safe. `connected` is true once any server has answered.
    """

    def __init__(self, find: Callable[[], Target], timeout_s: float) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._target: Target | None = None
        self.connected = False

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
        idempotent: bool = True,
        timeout_s: float = 0,
    ) -> Reply:
        """The response, or the error of a status from 400. An `idempotent` one is repeated after a stale connection."""
        reused = self._usable()
        try:
            reply = self._exchange(method, path, query, body, headers, timeout_s)
        except ServerUnreachable:
            if not (reused and idempotent):
                raise
            reply = self._exchange(method, path, query, body, headers, timeout_s)
        if reply.status >= 400:
            raise error_from(reply.status, reply.body)
        return reply

    @contextmanager
    def stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """A streaming response on its own connection. Silence longer than the timeout counts as a lost connection."""
        target = self._target = self._find()
        connection = _connect(target, self._timeout_s)
        try:
            try:
                connection.request("GET", _url(target, path, query), headers=_headers(target, headers))
                response = connection.getresponse()
            except CONNECTION_ERRORS as error:
                raise _unreachable(target, error) from error
            except _ENCODING_ERRORS as error:
                raise _not_encodable(target, error) from None
            self.connected = True
            if response.status >= 400:
                raise error_from(response.status, response.read(1_000_000))
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
        except CONNECTION_ERRORS as error:
            self.close()
            raise _unreachable(target, error) from error
        except _ENCODING_ERRORS as error:
            self.close()
            raise _not_encodable(target, error) from None
        except BaseException:
            # Interrupted by Ctrl-C: the rest of this response must not be read as the start of the next one.
            self.close()
            raise
        self.connected = True
        if response.will_close:
            self.close()
        return Reply(response.status, response.headers, data)

    def _usable(self) -> bool:
        """True if there is an idle connection. A connection that the server has closed is dropped."""
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


def _not_encodable(target: Target, error: ValueError) -> InvalidInput:
    return InvalidInput(
        f"the request to {target.address[:200]} cannot be sent: {error}",
        hint="check the address; keys and tokens are one line of ASCII text",
    )


def _unreachable(target: Target, error: BaseException) -> ServerUnreachable:
    hint = "is it running? start one with: hodei up, or run: hodei doctor"
    match error:
        case ConnectionRefusedError():
            what = "connection refused"
        case TimeoutError():
            what = "no answer in time"
        case ssl.SSLCertVerificationError():
            what = f"its certificate is not trusted ({error.verify_message})"
            hint = "set HODEI_CA_FILE to its authority"
        case socket.gaierror():
            what, hint = "no such host", "check HODEI_SERVER"
        case http.client.HTTPException() | ConnectionError():
            what = "the connection was lost"
        case _:
            what = str(error) or type(error).__name__
    return ServerUnreachable(f"cannot reach the server at {target.address}: {what}", hint=hint)


def sse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a stream of server-sent events; comments and other messages are skipped."""
    data: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            with suppress(msgspec.DecodeError):
                yield msgspec.json.decode(b"\n".join(data), type=Event)
            data = []
