"""A connection to one Kubernetes API: raw bytes of JSON in and out. What the bytes mean is the caller's business.

`access` says who we are, `http` carries. Here: 401 once more with credentials read anew, a bounded patience with a server
that asks to come later, and errors that say what, why and what next.
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
from hodei.kube.api.access import Access, Credentials, Source
from hodei.model.errors import HodeiError, InvalidInput

__all__ = ["Access", "Api", "ApiError"]

RENEW_S = 30.0
"""How often the files of the credentials are looked at."""
ATTEMPTS = 5
LONGEST_PAUSE_S = 10.0
_SAFE_PATH = re.compile(r"[A-Za-z0-9/._~:@!$&'()*+,;=%-]+")
_BUDGET = "DisruptionBudget"


class ApiError(HodeiError):
    """The API said no, or was not reached at all (status 0).

    `reason` is the API's word (`NotFound`, `Conflict`, `AlreadyExists`, `Expired`, ...; `Unreached` if status is 0);
    `causes` are its details as `Reason: text`; `retry_after_s` is 0 if it did not ask to come later. `sent`: the API may have
    got the request.
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
        """Whether asking again later can help."""
        return self.status == 0 or self.status == 429 or self.status >= 500


class Api:
    """Open by `connect`, closed by `close`. Safe for many tasks of one event loop at a time."""

    def __init__(
        self,
        source: Source,
        credentials: Credentials,
        *,
        connections: int = 64,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self._monotonic = monotonic
        self._sleep = sleep
        self._renewing = asyncio.Lock()
        self._generation = 0
        self._renew_at = monotonic() + RENEW_S
        self._pool = Pool(credentials.origin, connections)
        self._use(credentials)

    @classmethod
    async def connect(cls, access: Access, *, connections: int = 64, probe: bool = True) -> Api:
        """Reads the credentials and, with `probe`, asks the API for its version.

        Raises InvalidInput if the configuration can never work, ApiError if the API is not there or knows us not.
        """
        source = Source(access)
        api = cls(source, await source.read(), connections=connections)
        if probe:
            try:
                await api.request("GET", "/version", timeout_s=10, attempts=2)
            except ApiError as error:
                if error.status != 403:  # forbidden is an answer: it is there, and knows us
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
        attempts: int = ATTEMPTS,
    ) -> bytes:
        """The body of the answer. Raises ApiError for any status but 2xx, and if there was no answer.

        `timeout_s` bounds one of at most `attempts`. It is tried again: once after 401 with credentials read anew; after 429 if the API
        says when (not if a disruption budget says no); a GET also after 5xx and when it was not reached. POST and PATCH that were
        sent but not answered are not repeated: status 0 then means that it is not known whether they were done.
        """
        if self._monotonic() >= self._renew_at:
            await self._renew()
        target = self._target(path, params)
        read_anew = False
        for attempt in range(1, attempts + 1):
            generation = self._generation
            try:
                reply = await self._pool.exchange(method, self._message(method, target, body, content_type), timeout_s)
                if 200 <= reply.status < 300:
                    return reply.body
                error = _refusal(reply, method, path)
            except Unreached as failure:
                error = self._unreached(failure, method, path)
            if attempt == attempts:
                break
            if error.status == 401 and not read_anew:
                read_anew = True
                await self._renew(generation)
            elif _worth_another(error, method):
                await self._sleep(min(error.retry_after_s or 0.1 * 2**attempt, LONGEST_PAUSE_S))
            else:
                break
        raise error

    async def stream(
        self, path: str, params: Mapping[str, str] | None = None, *, lines: bool = True, quiet_s: float = 330.0
    ) -> AsyncGenerator[list[bytes], None]:
        """The answer as it comes: batches of whole lines (of a watch), or with `lines=False` of raw pieces (of a log).

        Ends when the answer ends. Raises ApiError: refused, cut in the middle, or nothing heard for `quiet_s`.
        """
        if self._monotonic() >= self._renew_at:
            await self._renew()
        target = self._target(path, params)
        connection = await self._opened(target, path)
        try:
            rest = b""
            async for chunks in connection.chunks(quiet_s):
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
            raise self._unreached(failure, "GET", path) from failure
        finally:
            self._pool.drop(connection)

    async def websocket(
        self, path: str, params: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> websocket.WebSocket:
        """A WebSocket that speaks one of `protocols`; the caller closes it. Raises ApiError: refused, or not reached."""
        if self._monotonic() >= self._renew_at:
            await self._renew()
        target = self._target(path, params)
        error = ApiError(0, "Unreached", "")
        for _ in range(2):
            generation = self._generation
            try:
                return await websocket.connect(self._pool.origin, target, self._head, protocols)
            except Unreached as failure:
                raise self._unreached(failure, "CONNECT", path) from failure
            except websocket.Refused as refusal:
                error = _refusal(refusal.reply, "CONNECT", path)
            if error.status != 401:
                break
            await self._renew(generation)
        raise error

    async def close(self) -> None:
        self._pool.close()

    # ---------------------------------------------------------------------------------------- credentials

    def _use(self, credentials: Credentials) -> None:
        origin = credentials.origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        self.server = credentials.server
        self.namespace = credentials.namespace
        self._prefix = credentials.prefix
        head = f"Host: {host}:{origin.port}\r\nAccept: application/json\r\nUser-Agent: hodei\r\n"
        if credentials.authorization:
            if not credentials.authorization.isprintable():
                raise InvalidInput(f"The token for {credentials.server} holds characters that a token cannot have.")
            head += f"Authorization: {credentials.authorization}\r\n"
        self._head = head.encode()
        self._generation += 1

    async def _renew(self, refused: int = 0) -> None:
        """Looks whether the credentials have changed; `refused` is the generation that the API does not accept."""
        async with self._renewing:
            if refused and refused != self._generation:
                return  # another task has read them meanwhile
            if not refused and self._monotonic() < self._renew_at:
                return
            self._renew_at = self._monotonic() + RENEW_S
            try:
                found = await (self._source.read() if refused else self._source.renewed())
            except InvalidInput:
                # Half-written files, a plugin out of order: the old ones may hold on, and the API has the last word.
                return
            if found is not None:
                self._use(found)
                self._pool.retire(found.origin)

    # ---------------------------------------------------------------------------------------- messages

    def _target(self, path: str, params: Mapping[str, str] | Sequence[tuple[str, str]] | None) -> str:
        if _SAFE_PATH.fullmatch(path) is None:
            path = quote(path, safe="/._~:@!$&'()*+,;=%-")
        path = self._prefix + path
        return f"{path}?{urlencode(params, quote_via=quote)}" if params else path

    def _message(self, method: str, target: str, body: bytes | None, content_type: str) -> bytes:
        if body is None:
            return b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target.encode(), self._head)
        return b"%b %b HTTP/1.1\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
            method.encode(), target.encode(), self._head, content_type.encode(), len(body), body,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------- trouble

    async def _opened(self, target: str, path: str) -> Connection:
        """A connection whose answer of 200 has begun."""
        error = ApiError(0, "Unreached", "")
        for _ in range(2):
            generation = self._generation
            try:
                connection, reply = await self._pool.stream(self._message("GET", target, None, ""), 30.0)
            except Unreached as failure:
                raise self._unreached(failure, "GET", path) from failure
            if reply.status == 200:
                return connection
            try:
                async for chunks in connection.chunks(10.0):
                    reply.body += b"".join(chunks)
            except Unreached:
                pass  # the status says enough
            finally:
                self._pool.drop(connection)
            error = _refusal(reply, "GET", path)
            if reply.status != 401:
                break
            await self._renew(generation)
        raise error

    def _unreached(self, failure: Unreached, method: str, path: str) -> ApiError:
        unknown = failure.sent and method not in ("GET", "HEAD")
        return ApiError(
            0,
            "Unreached",
            f"{method} {path}: no answer from the Kubernetes API at {self.server}: {failure.why}."
            + (" Whether it was done is not known." if unknown else ""),
            hint="Check that the address is right and the API server runs: kubectl get --raw /readyz",
            sent=failure.sent,
        )


def _worth_another(error: ApiError, method: str) -> bool:
    if error.status == 429:
        return error.retry_after_s > 0 and not any(cause.startswith(_BUDGET) for cause in error.causes)
    return method == "GET" and error.retriable


# -------------------------------------------------------------------------------------------- the API's own words


class _Cause(Struct):
    reason: str | None = None
    message: str | None = None
    field: str | None = None


class _Details(Struct):
    causes: tuple[_Cause, ...] | None = None
    retry_after_s: float | None = msgspec.field(default=None, name="retryAfterSeconds")


class Status(Struct):
    """What the API says about itself: the body of a refusal, and of a watch's ERROR."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: _Details | None = None


def refused(status: Status, code: int, what: str, *, retry_after_s: float = 0.0) -> ApiError:
    details = status.details or _Details()
    causes = tuple(
        ": ".join(part for part in (cause.reason, cause.field, cause.message) if part) for cause in details.causes or ()
    )
    reason = status.reason or _REASONS.get(code, "")
    return ApiError(
        code,
        reason,
        f"{what}: the Kubernetes API answered {code}{f' {reason}' if reason else ''}: {status.message or 'no more was said'}",
        causes=causes,
        retry_after_s=retry_after_s or float(details.retry_after_s or 0),
        hint=_HINTS.get(code, ""),
    )


def _refusal(reply: Reply, method: str, path: str) -> ApiError:
    try:
        status = msgspec.json.decode(reply.body, type=Status)
    except msgspec.DecodeError:
        text = reply.body[:300].decode("utf-8", "replace").strip()
        status = Status(message=" ".join(text.split()) or None)
    asked = reply.headers.get(b"retry-after", b"").strip()
    # The other form, a date, would compare the clocks of two machines.
    return refused(status, reply.status, f"{method} {path}", retry_after_s=float(asked) if asked.isdigit() else 0.0)


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Gone",
    429: "TooManyRequests",
}
_HINTS = {
    401: "The credentials are not accepted. Renew them, and check with: kubectl auth whoami",
    403: "The account lacks this right. Grant it by a role binding, and check with: kubectl auth can-i",
}


# ------------------------------------------------------------------------------------------- discovery
# What an API serves: the versions of a group, for groups whose version changes from release to release.


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
    """The versions of a group such as `scheduling.k8s.io`, the API's preferred one first; none if it has no such group."""
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
    """What one version holds, as `podgroups` to `PodGroup` (also `podgroups/status`); empty if it is not served."""
    path = f"/apis/{group}/{version}" if group else f"/api/{version}"
    try:
        found = msgspec.json.decode(await api.request("GET", path), type=_Kinds)
    except ApiError as error:
        if error.status == 404:
            return {}
        raise
    return {one.name: one.kind for one in found.resources}


async def served_path(api: Api, group: str, resource: str) -> str:
    """The path of a group's collection in the first version that holds it, or "" if none does."""
    for version in await served_versions(api, group):
        if resource in await served_resources(api, group, version):
            return f"/apis/{group}/{version}/{resource}"
    return ""


class _Release(Struct):
    minor: str = ""


async def served_minor(api: Api) -> int:
    """The 36 of Kubernetes 1.36; 0 if the API does not say."""
    try:
        said = msgspec.json.decode(await api.request("GET", "/version"), type=_Release).minor
    except (ApiError, msgspec.DecodeError):
        return 0
    digits = said.rstrip("+")  # as some vendors write it
    return int(digits) if digits.isdigit() else 0
