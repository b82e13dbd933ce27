"""A client of one Kubernetes API: JSON bytes in and out, which the caller decodes.

It renews credentials after a 401, retries a bounded number of times when the server asks for it, and raises errors that say
what failed, why, and what to do.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from hodei.http_client import Connection, Pool, Reply, Unreached
from hodei.kube.api import websocket
from hodei.kube.api.access import Access, Credentials, CredentialSource
from hodei.model.errors import HodeiError, InvalidInput

__all__ = ["Access", "Api", "ApiError"]

RENEW_S = 30.0
"""How often credential files are checked."""
MAX_ATTEMPTS = 5
LONGEST_PAUSE_S = 10.0
_SAFE_PATH = re.compile(r"[A-Za-z0-9/._~:@!$&'()*+,;=%-]+")
_DISRUPTION_BUDGET = "DisruptionBudget"


class ApiError(HodeiError):
    """The API refused a request, or could not be reached (status 0).

    `reason` is the API's own (`NotFound`, `Conflict`, `AlreadyExists`, `Expired`, ...; `Unreached` for status 0); `causes` are
    its details as `Reason: text`; `retry_after_s` is 0 if it named no time. `sent`: the API may have received the request.
    """

    code = "KUBERNETES_API"

    def __init__(
        self, status: int, reason: str, message: str, *, causes: tuple[str, ...] = (), retry_after_s: float = 0.0, hint: str = "",
        sent: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint)
        self.status, self.reason, self.causes, self.retry_after_s = status, reason, causes, retry_after_s
        self.sent = sent

    @property
    def retriable(self) -> bool:
        """Whether a later retry can succeed."""
        return self.status == 0 or self.status == 429 or self.status >= 500


class Api:
    """Created by `connect`, closed by `close`. Safe for concurrent tasks of one event loop."""

    def __init__(
        self,
        source: CredentialSource,
        credentials: Credentials,
        *,
        connections: int = 64,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._monotonic = monotonic
        self._sleep = sleep
        self._renew_lock = asyncio.Lock()
        self._generation = 0
        self._renew_at = monotonic() + RENEW_S
        self._pool = Pool(credentials.origin, connections)
        self._set_credentials(credentials)

    @classmethod
    async def connect(cls, access: Access, *, connections: int = 64, probe: bool = True) -> Api:
        """Read the credentials and, with `probe`, request the API's version.

        Raises InvalidInput for a configuration that cannot work, ApiError if the API is unreachable or rejects the credentials.
        """
        source = CredentialSource(access)
        api = cls(source, await source.read(), connections=connections)
        if probe:
            try:
                await api.request("GET", "/version", timeout_s=10, attempts=2)
            except ApiError as error:
                if error.status != 403:  # 403 shows that the API is reachable and accepts the credentials
                    await api.close()
                    raise
        return api

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout_s: float = 30,
        attempts: int = MAX_ATTEMPTS,
    ) -> bytes:
        """The body of the response. Raises ApiError for any status but 2xx, and without a response.

        `timeout_s` applies to each of at most `attempts`. Retries: once after 401 with new credentials; after 429 if the API names a
        time (not if a disruption budget refuses); GET also after 5xx and if the API was not reached. POST and PATCH that were sent
        but not answered are not repeated: status 0 then means that the outcome is unknown.
        """
        target = await self._prepare(path, params)
        credentials_renewed = False
        for attempt in range(1, attempts + 1):
            generation = self._generation
            try:
                reply = await self._pool.exchange(method, self._message(method, target, body, content_type), timeout_s)
                if 200 <= reply.status < 300:
                    return reply.body
                error = _error_of(reply, method, path)
            except Unreached as failure:
                error = self._unreachable(failure, method, path)
            if attempt == attempts:
                break
            if error.status == 401 and not credentials_renewed:
                credentials_renewed = True
                await self._renew(generation)
            elif _should_retry(error, method):
                await self._sleep(min(error.retry_after_s or 0.1 * 2**attempt, LONGEST_PAUSE_S))
            else:
                break
        raise error

    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, lines: bool = True, idle_timeout_s: float = 330.0
    ) -> AsyncGenerator[list[bytes], None]:
        """The response as it arrives: batches of whole lines (of a watch), or raw chunks with `lines=False` (of a log).

        Ends with the response. Raises ApiError: refused, cut off, or no data for `idle_timeout_s`.
        """
        target = await self._prepare(path, params)
        connection = await self._open_stream(target, path)
        try:
            rest = b""
            async for chunks in connection.chunks(idle_timeout_s):
                if not lines:
                    yield chunks
                    continue
                found = b"".join((rest, *chunks)).split(b"\n")
                rest = found.pop()
                if found:
                    yield found
            if rest.strip():
                yield [rest]
        except Unreached as failure:
            raise self._unreachable(failure, "GET", path) from failure
        finally:
            self._pool.drop(connection)

    async def websocket(
        self, path: str, params: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> websocket.WebSocket:
        """A WebSocket with one of `protocols`; the caller closes it. Raises ApiError."""
        target = await self._prepare(path, params)
        error = ApiError(0, "Unreached", "")
        for _ in range(2):
            generation = self._generation
            try:
                return await websocket.connect(self._pool.origin, target, self._head, protocols)
            except Unreached as failure:
                raise self._unreachable(failure, "CONNECT", path) from failure
            except websocket.HandshakeRefused as refusal:
                error = _error_of(refusal.reply, "CONNECT", path)
            if error.status != 401:
                break
            await self._renew(generation)
        raise error

    async def _prepare(self, path: str, params: Mapping[str, str] | Sequence[tuple[str, str]] | None) -> str:
        """The target of a request, with credentials that are still valid."""
        if self._monotonic() >= self._renew_at:
            await self._renew()
        if _SAFE_PATH.fullmatch(path) is None:
            path = quote(path, safe="/._~:@!$&'()*+,;=%-")
        path = self._prefix + path
        return f"{path}?{urlencode(params, quote_via=quote)}" if params else path

    async def close(self) -> None:
        self._pool.close()

    def _set_credentials(self, credentials: Credentials) -> None:
        origin = credentials.origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        self.server = credentials.server
        self.namespace = credentials.namespace
        self._prefix = credentials.prefix
        head = f"Host: {host}:{origin.port}\r\nAccept: application/json\r\nUser-Agent: hodei\r\n"
        if credentials.authorization:
            if not credentials.authorization.isprintable():
                raise InvalidInput(
                    f"The token for {credentials.server} contains invalid characters; check the token file."
                )
            head += f"Authorization: {credentials.authorization}\r\n"
        self._head = head.encode()
        self._generation += 1

    async def _renew(self, rejected: int = 0) -> None:
        """Renew the credentials if they have changed; `rejected` is the generation that the API does not accept."""
        async with self._renew_lock:
            if rejected and rejected != self._generation:
                return  # another task has renewed them
            if not rejected and self._monotonic() < self._renew_at:
                return
            self._renew_at = self._monotonic() + RENEW_S
            try:
                found = await (self._source.read() if rejected else self._source.renew())
            except InvalidInput:
                # Half-written files or a failing plugin: the old credentials may still work.
                return
            if found is not None:
                self._set_credentials(found)
                self._pool.retire(found.origin)

    def _message(self, method: str, target: str, body: bytes | None, content_type: str) -> bytes:
        if body is None:
            return b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target.encode(), self._head)
        return b"%b %b HTTP/1.1\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            method.encode(), target.encode(), self._head, content_type.encode(), len(body), body,
        )  # fmt: skip

    async def _open_stream(self, target: str, path: str) -> Connection:
        """A connection with a response of status 200."""
        error = ApiError(0, "Unreached", "")
        for _ in range(2):
            generation = self._generation
            try:
                connection, reply = await self._pool.stream(self._message("GET", target, None, ""), 30.0)
            except Unreached as failure:
                raise self._unreachable(failure, "GET", path) from failure
            if reply.status == 200:
                return connection
            try:
                async for chunks in connection.chunks(10.0):
                    reply.body += b"".join(chunks)
            except Unreached:
                pass  # the status is enough
            finally:
                self._pool.drop(connection)
            error = _error_of(reply, "GET", path)
            if reply.status != 401:
                break
            await self._renew(generation)
        raise error

    def _unreachable(self, failure: Unreached, method: str, path: str) -> ApiError:
        outcome_unknown = failure.sent and method not in ("GET", "HEAD")
        return ApiError(
            0,
            "Unreached",
            f"{method} {path}: no answer from the Kubernetes API at {self.server}: {failure.why}."
            + (" It may or may not have been carried out." if outcome_unknown else ""),
            hint="Check that the address is right and the API server runs: kubectl get --raw /readyz",
            sent=failure.sent,
        )


def _should_retry(error: ApiError, method: str) -> bool:
    if error.status == 429:
        return error.retry_after_s > 0 and not any(cause.startswith(_DISRUPTION_BUDGET) for cause in error.causes)
    return method == "GET" and error.retriable


class _Cause(Struct):
    reason: str | None = None
    message: str | None = None
    field: str | None = None


class _Details(Struct):
    causes: tuple[_Cause, ...] | None = None
    retry_after_s: float | None = msgspec.field(default=None, name="retryAfterSeconds")


class Status(Struct):
    """The API's Status object: the body of an error, and of a watch's ERROR event."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None


def error_from_status(status: Status, code: int, what: str, *, retry_after_s: float = 0.0) -> ApiError:
    details = status.details or _Details()
    causes = tuple(
        ": ".join(part for part in (cause.reason, cause.field, cause.message) if part) for cause in details.causes or ()
    )
    reason = status.reason or _REASONS.get(code, "")
    return ApiError(
        code,
        reason,
        f"{what}: the Kubernetes API answered {code}{f' {reason}' if reason else ''}: {status.message or 'without a message'}",
        causes=causes,
        retry_after_s=retry_after_s or float(details.retry_after_s or 0),
        hint=_HINTS.get(code, ""),
    )


def _error_of(reply: Reply, method: str, path: str) -> ApiError:
    try:
        status = msgspec.json.decode(reply.body, type=Status)
    except msgspec.DecodeError:
        text = reply.body[:300].decode("utf-8", "replace").strip()
        status = Status(message=" ".join(text.split()) or None)
    retry_after = reply.headers.get(b"retry-after", b"").strip()
    # A date, the other form, would depend on two clocks.
    return error_from_status(
        status, reply.status, f"{method} {path}", retry_after_s=float(retry_after) if retry_after.isdigit() else 0.0
    )


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Gone",
    429: "TooManyRequests",
}
_HINTS = {
    401: "The API rejects the credentials. Renew them, and check with: kubectl auth whoami",
    403: "The account lacks this permission. Grant it with a role binding, and check with: kubectl auth can-i",
}


class _Version(Struct):
    version: str = ""


class _Group(Struct):
    versions: tuple[_Version, ...] = ()
    preferred: _Version = msgspec.field(default_factory=_Version, name="preferredVersion")


class _Kind(Struct):
    name: str = ""
    kind: str = ""


class _Kinds(Struct):
    resources: tuple[_Kind, ...] = ()


async def served_versions(api: Api, group: str) -> list[str]:
    """The versions of a group such as `scheduling.k8s.io`, the preferred one first; empty if it is not served."""
    try:
        found = msgspec.json.decode(await api.request("GET", f"/apis/{group}"), type=_Group)
    except ApiError as error:
        if error.status == 404:
            return []
        raise
    names = [one.version for one in found.versions]
    first = found.preferred.version
    return [first, *(name for name in names if name != first)] if first else names


async def served_resources(api: Api, group: str, version: str) -> dict[str, str]:
    """The resources of a version, as `podgroups` to `PodGroup` (also `podgroups/status`); empty if it is not served."""
    path = f"/apis/{group}/{version}" if group else f"/api/{version}"
    try:
        found = msgspec.json.decode(await api.request("GET", path), type=_Kinds)
    except ApiError as error:
        if error.status == 404:
            return {}
        raise
    return {one.name: one.kind for one in found.resources}


async def served_path(api: Api, group: str, resource: str) -> str:
    """The path of a group's collection in the first version that serves it, or ""."""
    for version in await served_versions(api, group):
        if resource in await served_resources(api, group, version):
            return f"/apis/{group}/{version}/{resource}"
    return ""


class _Release(Struct):
    minor: str = ""


async def served_minor(api: Api) -> int:
    """The 36 of Kubernetes 1.36; 0 if unknown."""
    try:
        minor = msgspec.json.decode(await api.request("GET", "/version"), type=_Release).minor
    except (ApiError, msgspec.DecodeError):
        return 0
    digits = minor.rstrip("+")  # a vendor suffix
    return int(digits) if digits.isdigit() else 0
