"""What namespaces have used, kept in a ConfigMap, so that fair share and budgets outlive a restart and a handover.

It is written at most once a minute and when the scheduler ends, over the version that was read; only the one who leads
writes. What runs is not in it: whoever takes over sees it in the cluster, with the time at which it began.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from msgspec import field

from hodei.control.controller import Controller, Step
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import Meta, Pod, PodSpec, PodStatus, Slim
from hodei.kube.api.quantities import bounded
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background import NoBackground
from hodei.kube.scheduler.cache import Refusals, said
from hodei.kube.scheduler.pod_reader import PODS_PATH, Reader, at_ms
from hodei.model.accounting import UsageRow
from hodei.model.effects import SaveUsage
from hodei.model.estimate import RuntimeSample, name_pattern, request_shape
from hodei.model.facts import UsageRestored
from hodei.model.job import JobSpec
from hodei.model.resources import MAX_DURATION_MS

_log = logging.getLogger(__name__)
KEY = "usage.json.gz"
EVERY_S = 60.0
# A ConfigMap takes 1 MiB. This is what it may be before base64 makes a third more of it.
MOST_BYTES = 700_000
# Nobody's file is unpacked beyond this.
_MOST_UNPACKED = 64 << 20
_LOOK_S = 1.0
_RIGHTS = "Its role is the Role hodei-lease of deploy/kubernetes/rbac.yaml."
_FORM = 1
_Key = tuple[tuple[str, ...], str, int]


class UsageStore(NoBackground):
    """`only`: the resources that are worth keeping; None for all."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        controller: Controller,
        now_ms: Callable[[], int],
        *,
        only: frozenset[str] | None = None,
        monotonic: Callable[[], float],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._api, self._controller, self._now_ms, self._monotonic = api, controller, now_ms, monotonic
        self._namespace, self._name, self._only, self._most_bytes = namespace, name, only, most_bytes
        self._collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._rows: dict[_Key, UsageRow] = {}
        self._changed = False
        self._written_at = -EVERY_S
        self._version = ""  # of the ConfigMap that was read or written last; "" if there is none
        self._metadata: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------ in the loop

    async def begin(self) -> None:
        """What was used before is known before anything is decided."""
        try:
            rows = self._decoded(await self._read())
        except ApiError as error:
            if error.status != 403:
                raise
            _log.error(
                "nothing is known of what namespaces have used, and nothing is kept: %s %s", error.message, _RIGHTS
            )
            return
        self._rows = {_key(row): row for row in rows}
        if rows:
            self.stepped(self._controller.step(self._now_ms(), [UsageRestored(rows=tuple(rows))]))
            _log.info("knows what %d accounts have used", len({row.path for row in rows}))

    def stepped(self, step: Step) -> None:
        for save in step.saves:
            if isinstance(save, SaveUsage):
                self._take(save.rows)

    def _take(self, rows: Iterable[UsageRow]) -> None:
        for row in rows:
            if self._only is not None and row.resource not in self._only:
                continue
            if row.amount:
                self._rows[_key(row)] = row
            else:
                self._rows.pop(_key(row), None)
            self._changed = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._changed and self._monotonic() - self._written_at >= EVERY_S:
                await self._write(takes_over=True)

    async def end(self) -> None:
        """Not over what another wrote: should we have lost the lead, the other's word counts."""
        if self._changed:
            await self._write(takes_over=False)

    # ------------------------------------------------------------------------------------------ the ConfigMap

    async def _read(self) -> bytes:
        try:
            found = json.loads(await self._api.request("GET", f"{self._collection}/{self._name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            self._version = ""
            return b""
        self._metadata = {key: found["metadata"].get(key) or {} for key in ("labels", "annotations")}
        self._version = found["metadata"]["resourceVersion"]
        try:
            return base64.b64decode((found.get("binaryData") or {}).get(KEY, ""), validate=True)
        except ValueError:
            return b"?"

    async def _write(self, *, takes_over: bool) -> None:
        self._written_at = self._monotonic()
        self._changed = False
        rows = list(self._rows.values())
        packed, oldest_ms = await asyncio.get_running_loop().run_in_executor(None, _bounded, rows, self._most_bytes)
        if oldest_ms:
            _log.warning("what was used longest ago is forgotten: there is more of it than a ConfigMap takes")
            self._rows = {key: row for key, row in self._rows.items() if row.start_ms >= oldest_ms}
        try:
            await self._put(packed)
        except ApiError as error:
            if error.status == 409 and takes_over:
                await self._over_another(packed)
                return
            self._changed = True
            hint = f" {error.hint}" if error.hint else ""
            _log.warning("what namespaces have used could not be kept: %s%s", error.message, hint)

    async def _over_another(self, packed: bytes) -> None:
        """Someone wrote in between, one who led before us at most: what we know is newer."""
        try:
            await self._read()
            await self._put(packed)
        except ApiError as error:
            self._changed = True
            _log.warning("what namespaces have used could not be kept: %s", error.message)

    async def _put(self, packed: bytes) -> None:
        metadata: dict[str, Any] = {**self._metadata, "name": self._name, "namespace": self._namespace}
        if self._version:
            metadata["resourceVersion"] = self._version
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "binaryData": {KEY: base64.b64encode(packed).decode()},
        }
        method, path = ("PUT", f"{self._collection}/{self._name}") if self._version else ("POST", self._collection)
        answer = json.loads(await self._api.request(method, path, json.dumps(body).encode()))
        self._version = answer["metadata"]["resourceVersion"]

    def _decoded(self, packed: bytes) -> list[UsageRow]:
        if not packed:
            return []
        try:
            return [row for row in _unpacked(packed) if row.amount]
        except (ValueError, TypeError, KeyError, EOFError, OSError, zlib.error) as error:
            _log.error(
                "ConfigMap %s/%s does not hold what was kept there (%s); fair share begins anew",
                self._namespace, self._name, error,
            )  # fmt: skip
            return []


def _key(row: UsageRow) -> _Key:
    return row.path, row.resource, row.start_ms


def _bounded(rows: list[UsageRow], most_bytes: int) -> tuple[bytes, int]:
    """As much of the newest as fits, and since when that is (0: all of it). Buckets of time go for all accounts at once,
    so that none is favoured."""
    packed, oldest_ms = _packed(rows), 0
    while len(packed) > most_bytes:
        starts = sorted(row.start_ms for row in rows)
        wanted = starts[len(starts) - len(starts) * most_bytes // len(packed) * 9 // 10 - 1]
        oldest_ms = min((start for start in starts if start > wanted), default=starts[-1] + 1)
        rows = [row for row in rows if row.start_ms >= oldest_ms]
        packed = _packed(rows)
    return packed, oldest_ms


def _packed(rows: list[UsageRow]) -> bytes:
    """By account and resource, so that names are there once."""
    accounts: dict[tuple[tuple[str, ...], str], list[tuple[int, int, int]]] = {}
    for row in sorted(rows, key=_key):
        accounts.setdefault((row.path, row.resource), []).append((row.start_ms, row.width_ms, row.amount))
    found = {"form": _FORM, "accounts": [[list(path), name, used] for (path, name), used in accounts.items()]}
    # The same rows are the same bytes: no time of writing in it.
    return gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 6, mtime=0)


def _unpacked(packed: bytes) -> Iterator[UsageRow]:
    text = zlib.decompressobj(wbits=31)
    found = json.loads(text.decompress(packed, _MOST_UNPACKED))
    if found["form"] != _FORM:
        raise ValueError(f"it is of the form {found['form']!r}")
    for path, resource, used in found["accounts"]:
        for start_ms, width_ms, amount in used:
            yield UsageRow(tuple(map(str, path)), str(resource), int(start_ms), int(width_ms), int(amount))


_SUCCEEDED = {"fieldSelector": "status.phase=Succeeded"}
_PATIENCE_S = 20.0
# Of what is there at the beginning so many of the newest tell enough.
_HISTORY = 10_000


class _Terminated(Slim, frozen=True):
    finished_at: str | None = None


class _State(Slim, frozen=True):
    terminated: _Terminated | None = None


class _Container(Slim, frozen=True):
    state: _State = _State()


class _Status(Slim, frozen=True):
    phase: str = ""
    start_time: str | None = None
    container_statuses: tuple[_Container, ...] = ()


class FinishedPod(Slim, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = field(default_factory=PodSpec)
    status: _Status = _Status()

    @property
    def ended_ms(self) -> int:
        """When its last container ended; 0 if that is not told."""
        ends = [one.state.terminated.finished_at for one in self.status.container_statuses if one.state.terminated]
        return max((at_ms(stamp) for stamp in ends), default=0)

    @property
    def ran_ms(self) -> int:
        began = at_ms(self.status.start_time)
        return bounded(self.ended_ms - began, 1, MAX_DURATION_MS) if began and self.ended_ms else 0

    @property
    def pod(self) -> Pod:
        return Pod(self.metadata, self.spec, PodStatus(self.status.phase, start_time=self.status.start_time))


# What a pod was, how long it took, and when it was over.
Learn = Callable[[JobSpec, int, int], None]


class Finished(NoBackground):
    """`learn` is told of each pod of ours once, those of the past in the order in which they ended."""

    def __init__(self, api: Api, scheduler: str, reader: Reader, learn: Learn) -> None:
        self._scheduler, self._reader, self._learn = scheduler, reader, learn
        self._known: set[str] = set()
        self._reflector = Reflector(api, Resource("/api/v1/pods", FinishedPod), self, selector=_SUCCEEDED)
        self._informers: asyncio.Task[None] | None = None
        self.refusals = Refusals()

    async def begin(self) -> None:
        """The past first, if it comes soon: a start is not held up by it."""
        self._informers = asyncio.create_task(self._reflector.run())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._reflector.synced.wait()
        except TimeoutError:
            _log.warning(
                "pods that succeeded before cannot be read yet: %s", self._reflector.problem or "it takes long"
            )

    async def run(self) -> None:
        if self._informers is None or self._informers.done():
            self._informers = asyncio.create_task(self._reflector.run())
        await self._informers

    async def end(self) -> None:
        if self._informers is not None:
            self._informers.cancel()

    # ------------------------------------------------------------------------------------- the reflector's sink

    def listed(self, objects: Iterable[FinishedPod], /) -> None:
        found = sorted(objects, key=lambda pod: (pod.ended_ms, pod.metadata.uid))
        for pod in found[-_HISTORY:]:
            self._take(pod)
        self._known &= {pod.metadata.uid for pod in found}

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: FinishedPod, /) -> None:
        if kind == "DELETED":
            self._known.discard(pod.metadata.uid)
        else:
            self._take(pod)

    def _take(self, pod: FinishedPod) -> None:
        uid = pod.metadata.uid
        if uid in self._known or pod.spec.scheduler_name != self._scheduler or not pod.ran_ms:
            return
        self._known.add(uid)
        try:
            self._learn(self._reader.pod(pod.pod, ours=True).job, pod.ran_ms, pod.ended_ms)
        except Exception as error:
            self.refusals.put(PODS_PATH, pod.metadata, f"nothing is learnt from it: {said(error)}")


def as_ran(spec: JobSpec, ran_ms: int) -> RuntimeSample:
    said_ms = spec.estimate_ms or spec.timeout_ms
    return RuntimeSample(spec.project, spec.user, name_pattern(spec), request_shape(spec), ran_ms, said_ms)
