"""Requests about pods of runs, and what the API's refusals mean to a backend: never, not now, or nobody knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from hodei.backends.kubernetes.manifest import END, FINALIZER, pod_name
from hodei.backends.kubernetes.states import Ending, RunPod
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import Meta, Quantity, Slim, decode
from hodei.kube.api.quantities import readable
from hodei.model.backend import NodeUsage
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, Unsupported
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY

T = TypeVar("T")
ANSWER_S = 15.0
_ATTEMPTS = 3
_AT_ONCE = 32
# Refusals of a pod that come to an end when somebody else does something: rights, room in a quota, a new namespace.
_PASSING = ("exceeded quota", "cannot create resource", "being terminated", "status unknown for quota")
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class Gone(Exception):
    """There is no such pod."""


class Unsure(Exception):
    """Nobody knows whether it was done."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(error.message)
        self.error = error


class Pods:
    """Our pods in their namespace, by run. Gone if there is none, BackendError if it was not done."""

    def __init__(self, api: Api, namespace: str, installation: str) -> None:
        self.api = api
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self._installation = installation

    def path_of(self, run: RunId) -> str:
        return f"{self.path}/{pod_name(self._installation, run)}"

    async def create(self, body: dict[str, Any]) -> None:
        """Unsure, BackendError or BackendRefused; one that is there already is as good as created."""
        try:
            await self.api.request("POST", self.path, msgspec.json.encode(body), timeout_s=ANSWER_S, attempts=_ATTEMPTS)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return  # ordered before: what became of it is told by the watch
            raise meaning(error) from error

    async def exists(self, run: RunId) -> bool:
        try:
            await self.api.request("GET", self.path_of(run), timeout_s=ANSWER_S, attempts=1)
        except ApiError as error:
            if error.status == 404:
                return False
            raise BackendError(error.message[:1000], hint=error.hint) from error
        return True

    async def mark(self, run: RunId, ending: Ending) -> RunPod:
        """Write on it why we end it; the pod as it stands then."""
        notes = {END: msgspec.json.encode(ending).decode()}
        return decode(await self._ask("PATCH", run, {"metadata": {"annotations": notes}}, MERGE), RunPod)

    async def delete(self, run: RunId, grace_s: int) -> None:
        await self._ask("DELETE", run, {"gracePeriodSeconds": grace_s})

    async def set_deadline(self, run: RunId, seconds: int) -> None:
        await self._ask("PATCH", run, {"spec": {"activeDeadlineSeconds": seconds}}, MERGE)

    async def let_go(self, run: RunId) -> None:
        """Nothing of ours keeps it any more."""
        await self._ask("PATCH", run, {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}, STRATEGIC)

    async def _ask(self, method: str, run: RunId, body: Any, content_type: str = "application/json") -> bytes:
        try:
            return await self.api.request(
                method, self.path_of(run), msgspec.json.encode(body),
                content_type=content_type, timeout_s=ANSWER_S, attempts=_ATTEMPTS,
            )  # fmt: skip
        except ApiError as error:
            if error.status == 404:
                raise Gone from error
            raise BackendError(error.message[:1000], hint=error.hint) from error


def meaning(error: ApiError) -> Unsure | BackendError | BackendRefused:
    """Of a refusal to create a pod."""
    text, hint = error.message[:1000], error.hint
    if error.status in (0, 500, 502, 503, 504) and "too large" not in text:
        return Unsure(BackendError(text, hint=hint, code="" if error.sent else NOT_REACHED))
    if error.status in (401, 404, 409, 429) or any(words in text for words in _PASSING):
        return BackendError(text, hint=hint)
    return BackendRefused(text, hint=hint if error.status != 403 else "the cluster's rules forbid such a pod")


async def each(things: Sequence[T], work: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    """Some at a time. The first that raises is the last that is begun: whoever does not answer one does not answer
    a thousand, and the caller does not wait for that."""
    gate = asyncio.Semaphore(_AT_ONCE)
    failures: list[Exception] = []

    async def one(thing: T) -> None:
        async with gate:
            if failures:
                return
            try:
                await work(thing)
            except Exception as error:
                failures.append(error)

    await asyncio.gather(*(one(thing) for thing in things))
    if failures:
        raise failures[0]


# ----------------------------------------------------------------------------------------------- usage
# What is used on the nodes as the cluster measures it, where it does: the API `metrics.k8s.io` of a metrics-server.


PATH = "/apis/metrics.k8s.io/v1beta1/nodes"
_MEASURED = (CPU, MEMORY)


class _NodeMetrics(Slim, frozen=True):
    metadata: Meta = field(default_factory=Meta)
    usage: Mapping[str, Quantity] = {}


class _List(Struct):
    items: tuple[_NodeMetrics, ...] = ()


async def node_usage(api: Api, backend: str, prefix: str, nodes: Iterable[Node]) -> dict[NodeName, NodeUsage]:
    """Of the nodes that are ours to use. Unsupported if nobody measures in this cluster."""
    try:
        answer = await api.request("GET", PATH, timeout_s=15, attempts=2)
    except ApiError as error:
        if error.status == 404:
            raise Unsupported(
                f"the cluster of backend {backend} does not measure what is used on its nodes",
                hint="install metrics-server there; see what is promised with `hodei nodes`",
            ) from None
        hint = "the backend's account needs list on nodes of metrics.k8s.io: see deploy/backend-rbac.yaml"
        raise BackendError(error.message[:1000], hint=hint if error.status == 403 else error.hint) from error
    ours = {node.name for node in nodes}
    out = {}
    for measured in msgspec.json.decode(answer, type=_List).items:
        name = prefix + measured.metadata.name
        if name in ours:
            found, _ = readable({what: amount for what, amount in measured.usage.items() if what in _MEASURED})
            out[name] = NodeUsage(found)
    return out
