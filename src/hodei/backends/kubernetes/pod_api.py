"""The API of our pods: create, mark, delete, exec and logs; and what its refusals mean: never, not now, or in doubt.

`exec` uses one WebSocket (`v5.channel.k8s.io`, or v4 for API servers before 1.29): the first byte of a message is its channel.
Channel 3 ends it with a Status that has the exit code. The API cannot kill a command: after its timeout it continues in its
container.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from hodei.backends.base import READ_LIMIT, LogArchive
from hodei.backends.kubernetes.manifest import END, FINALIZER, MAIN, pod_name
from hodei.backends.kubernetes.runs import RunPod, StopCause
from hodei.http_client import Unreached
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import ApiStruct, Meta, Quantity, decode
from hodei.kube.api.quantities import readable
from hodei.kube.api.websocket import WebSocket
from hodei.model.backend import ExecResult, NodeUsage
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused, NotFound, Unsupported
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.supervision import start_error_code

T = TypeVar("T")
REQUEST_TIMEOUT_S = 15.0
_ATTEMPTS = 3
_AT_ONCE = 32
# Refusals that may pass: missing rights, a full quota, a namespace that is being replaced.
_TEMPORARY = ("exceeded quota", "cannot create resource", "being terminated", "status unknown for quota")
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class PodMissing(Exception):
    """There is no such pod."""


class InDoubt(Exception):
    """The outcome of a request is unknown."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(error.message)
        self.error = error


class Pods:
    """Our pods in their namespace, by run. Raises PodMissing, or BackendError if the request failed."""

    def __init__(self, api: Api, namespace: str, installation: str) -> None:
        self.api = api
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self._installation = installation

    def path_of(self, run: RunId) -> str:
        return f"{self.path}/{pod_name(self._installation, run)}"

    async def create(self, body: dict[str, Any]) -> None:
        """Raises InDoubt, BackendError or BackendRefused. A pod that exists counts as created."""
        try:
            await self.api.request(
                "POST", self.path, msgspec.json.encode(body), timeout_s=REQUEST_TIMEOUT_S, attempts=_ATTEMPTS
            )
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return  # ordered before: the watch reports its state
            raise classify_refusal(error) from error

    async def exists(self, run: RunId) -> bool:
        try:
            await self.api.request("GET", self.path_of(run), timeout_s=REQUEST_TIMEOUT_S, attempts=1)
        except ApiError as error:
            if error.status == 404:
                return False
            raise BackendError(error.message[:1000], hint=error.hint) from error
        return True

    async def record_stop(self, run: RunId, cause: StopCause) -> RunPod:
        """Annotate the pod with why we stop it; returns the pod."""
        annotations = {END: msgspec.json.encode(cause).decode()}
        return decode(await self._request("PATCH", run, {"metadata": {"annotations": annotations}}, MERGE), RunPod)

    async def delete(self, run: RunId, grace_s: int) -> None:
        await self._request("DELETE", run, {"gracePeriodSeconds": grace_s})

    async def set_deadline(self, run: RunId, seconds: int) -> None:
        await self._request("PATCH", run, {"spec": {"activeDeadlineSeconds": seconds}}, MERGE)

    async def remove_finalizer(self, run: RunId) -> None:
        await self._request("PATCH", run, {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}, STRATEGIC)

    async def _request(self, method: str, run: RunId, body: Any, content_type: str = "application/json") -> bytes:
        try:
            return await self.api.request(
                method, self.path_of(run), msgspec.json.encode(body),
                content_type=content_type, timeout_s=REQUEST_TIMEOUT_S, attempts=_ATTEMPTS,
            )  # fmt: skip
        except ApiError as error:
            if error.status == 404:
                raise PodMissing from error
            raise BackendError(error.message[:1000], hint=error.hint) from error


def classify_refusal(error: ApiError) -> InDoubt | BackendError | BackendRefused:
    """What a refusal to create a pod means."""
    text, hint = error.message[:1000], error.hint
    if error.status in (0, 500, 502, 503, 504) and "too large" not in text:
        return InDoubt(BackendError(text, hint=hint, code="" if error.sent else NOT_REACHED))
    if error.status in (401, 404, 409, 429) or any(words in text for words in _TEMPORARY):
        return BackendError(text, hint=hint)
    return BackendRefused(text, hint=hint if error.status != 403 else "the cluster's rules forbid such a pod")


async def run_limited(things: Sequence[T], work: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    """Run `work` for each, some at a time. After the first failure no more are begun: the API is probably down."""
    slots = asyncio.Semaphore(_AT_ONCE)
    failures: list[Exception] = []

    async def one(thing: T) -> None:
        async with slots:
            if failures:
                return
            try:
                await work(thing)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(one(thing) for thing in things))
    if failures:
        raise failures[0]


METRICS_PATH = "/apis/metrics.k8s.io/v1beta1/nodes"
_MEASURED = (CPU, MEMORY)


class _NodeMetrics(ApiStruct, frozen=True):
    metadata: Meta = field(default_factory=Meta)
    usage: Mapping[str, Quantity] = {}


class _List(Struct):
    items: tuple[_NodeMetrics, ...] = ()


async def node_usage(api: Api, backend: str, prefix: str, nodes: Iterable[Node]) -> dict[NodeName, NodeUsage]:
    """Usage of our nodes, from metrics-server. Unsupported without one."""
    try:
        answer = await api.request("GET", METRICS_PATH, timeout_s=15, attempts=2)
    except ApiError as error:
        if error.status == 404:
            raise Unsupported(
                f"the cluster of backend {backend} does not measure the usage of its nodes",
                hint="install metrics-server there; see their allocation with `hodei nodes`",
            ) from None
        hint = "the backend's account needs list on nodes of metrics.k8s.io: see deploy/backend-rbac.yaml"
        raise BackendError(error.message[:1000], hint=hint if error.status == 403 else error.hint) from error
    our_nodes = {node.name for node in nodes}
    out = {}
    for measured in msgspec.json.decode(answer, type=_List).items:
        name = prefix + measured.metadata.name
        if name in our_nodes:
            found, _ = readable({what: amount for what, amount in measured.usage.items() if what in _MEASURED})
            out[name] = NodeUsage(found)
    return out


PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
OUTPUT_LIMIT = 1 << 20
_STDOUT, _STDERR, _END = 1, 2, 3
_RIGHTS_HINT = "the backend's account needs get and create on pods/exec: see deploy/backend-rbac.yaml"


class _Cause(Struct):
    reason: str = ""
    message: str = ""


class _Details(Struct):
    causes: tuple[_Cause, ...] = ()


class _Status(Struct):
    status: str = ""
    reason: str = ""
    message: str = ""
    details: _Details | None = None


class _Output:
    """The output so far, up to OUTPUT_LIMIT for each stream."""

    def __init__(self) -> None:
        self.streams = {_STDOUT: bytearray(), _STDERR: bytearray()}
        self.cut = False

    def add(self, channel: int, part: bytes) -> None:
        stream = self.streams[channel]
        self.cut = self.cut or len(stream) + len(part) > OUTPUT_LIMIT
        stream += part[: OUTPUT_LIMIT - len(stream)]

    def result(self, code: int | None, otherwise: str = "") -> ExecResult:
        """`otherwise` replaces an empty stderr."""
        stdout, stderr = (bytes(self.streams[channel]) for channel in (_STDOUT, _STDERR))
        return ExecResult(code, stdout, stderr or otherwise.encode(), self.cut)


async def execute(api: Api, pod_path: str, command: Sequence[str], timeout_ms: int) -> ExecResult:
    """NotFound if the container does not run; BackendError if the API cannot do it now or how it ended is not known."""
    if not command or any("\0" in word for word in command):
        raise BackendRefused("the command is empty, or holds a NUL character")
    params = [("container", MAIN), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    try:
        socket = await api.websocket(f"{pod_path}/exec", params, PROTOCOLS)
    except ApiError as error:
        raise _exec_refusal(error) from error
    output = _Output()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            status = await _listen(socket, output)
    except TimeoutError:
        return output.result(None)
    except Unreached as failure:
        raise BackendError(f"the exit code of the command is unknown: {failure.why}", code=IN_DOUBT) from failure
    finally:
        await socket.close()
    return _exec_result(status, output)


async def _listen(socket: WebSocket, output: _Output) -> _Status:
    """Read until the Status at the end."""
    while (message := await socket.message()) is not None:
        channel, part = message[0] if message else 0, message[1:]
        if channel in output.streams:
            output.add(channel, part)
        elif channel == _END:
            try:
                return msgspec.json.decode(part, type=_Status)
            except msgspec.DecodeError:
                return _Status(message=part[:300].decode(errors="replace"))
    raise Unreached("the connection was closed before the command's exit code came")


def _exec_result(status: _Status, output: _Output) -> ExecResult:
    if status.status == "Success":
        return output.result(0)
    causes = status.details.causes if status.details is not None else ()
    code = next((one.message for one in causes if one.reason == "ExitCode"), "")
    if code.isdigit():
        return output.result(int(code))
    text = status.message
    # The command itself cannot be started: there is a message instead of an exit code.
    if (start_code := start_error_code(text)) is not None:
        return output.result(start_code, text)
    if "container not found" in text or "not running" in text:
        raise NotFound(f"it does not run: {text[:500]}")
    raise BackendError(f"the exit code of the command is unknown: {text[:500] or status.reason}", code=IN_DOUBT)


def _exec_refusal(error: ApiError) -> BackendError | BackendRefused | NotFound:
    text = error.message[:1000]
    if error.status == 404 or "container not found" in text or "not running" in text:
        return NotFound(f"it does not run: {text}")
    if error.status == 403:
        return BackendRefused(text, hint=_RIGHTS_HINT)
    return BackendError(text, hint=error.hint)


READ_TIMEOUT_S = 20.0
ARCHIVE_TIMEOUT_S = 25.0
DEFAULT_CAP = 16 << 20
_ARCHIVES_AT_ONCE = 8


class Logs(LogArchive):
    """Archives at most `cap` bytes of each log."""

    def __init__(self, home: Path, cap: int | None, keep_s: float) -> None:
        super().__init__(home, keep_s)
        self._cap = cap or DEFAULT_CAP
        self._slots = asyncio.Semaphore(_ARCHIVES_AT_ONCE)

    async def read(self, api: Api, pod_path: str, run: RunId, offset: int, limit: int) -> tuple[bytes, int]:
        """From the cluster; NotFound without such a pod. The API knows no offsets: everything before is read and dropped."""
        limit, skip = max(0, min(limit, READ_LIMIT)), offset
        out = bytearray()
        try:
            async with (
                asyncio.timeout(READ_TIMEOUT_S),
                contextlib.aclosing(_chunks(api, pod_path, offset + limit)) as chunks,
            ):
                async for chunk in chunks:
                    out += chunk[skip:] if skip else chunk
                    skip = max(0, skip - len(chunk))
        except TimeoutError:
            raise BackendError(f"the log of run {run} did not come within {READ_TIMEOUT_S:g} s") from None
        except ApiError as error:
            if error.status == 400:  # its container has not started
                return b"", offset
            if error.status == 404:
                raise NotFound(f"no log is kept of run {run}") from None
            raise BackendError(error.message[:1000], hint=error.hint) from error
        return bytes(out[:limit]), offset + min(len(out), limit)

    async def archive(self, api: Api, pod_path: str, run: RunId) -> None:
        """Copy it to a file, so that the pod can be removed. Atomic and idempotent. ApiError, TimeoutError or OSError."""
        if self.has(run):
            return
        async with self._slots, asyncio.timeout(ARCHIVE_TIMEOUT_S):
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self.home / f".{run}"
            with draft.open("wb") as file:
                async with contextlib.aclosing(_chunks(api, pod_path, self._cap)) as chunks:
                    async for chunk in chunks:
                        file.write(chunk)
            os.replace(draft, self.home / run)


async def _chunks(api: Api, pod_path: str, limit: int) -> AsyncGenerator[bytes, None]:
    params = {"container": MAIN, "limitBytes": str(max(limit, 1))}
    stream = api.stream(f"{pod_path}/log", params, lines=False, idle_timeout_s=READ_TIMEOUT_S)
    try:
        async for chunks in stream:
            for chunk in chunks:
                yield chunk
    finally:
        await stream.aclose()
