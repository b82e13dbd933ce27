"""What outlives a restart: usage of namespaces, kept in a ConfigMap for fair share and budgets, and run times of finished pods.

Only the leader writes, at most once a minute and when it stops. Running pods are not in the ConfigMap: the next leader sees
them in the cluster, with their start times.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Literal

from msgspec import field

from hodei.control.controller import Controller, Step
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import ApiStruct, Meta, Pod, PodSpec, PodStatus
from hodei.kube.api.quantities import bounded
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background import BackgroundTask
from hodei.kube.scheduler.cache import Refusals
from hodei.kube.scheduler.translate import PODS_PATH, Reader, at_ms, describe_error
from hodei.model.accounting import UsageRow
from hodei.model.effects import SaveUsage
from hodei.model.estimate import RuntimeSample, name_pattern, request_shape
from hodei.model.facts import UsageRestored
from hodei.model.job import JobSpec
from hodei.model.resources import MAX_DURATION_MS

_log = logging.getLogger(__name__)
KEY = "usage.json.gz"
WRITE_EVERY_S = 60.0
# A ConfigMap holds 1 MiB; base64 adds a third.
MAX_BYTES = 700_000
# Guards against a decompression bomb.
_MAX_UNPACKED = 64 << 20
_CHECK_EVERY_S = 1.0
_ROLE_HINT = "Grant the Role hodei-lease of deploy/kubernetes/rbac.yaml."
_FORMAT = 1
_Key = tuple[tuple[str, ...], str, int]
_key = attrgetter("path", "resource", "start_ms")  # of a UsageRow


class UsageStore(BackgroundTask):
    """`resources`: those to keep; None for all."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        controller: Controller,
        now_ms: Callable[[], int],
        *,
        resources: frozenset[str] | None = None,
        monotonic: Callable[[], float],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._api, self._controller, self._now_ms, self._monotonic = api, controller, now_ms, monotonic
        self._namespace, self._name, self._resources, self._max_bytes = namespace, name, resources, max_bytes
        self._collection = f"/api/v1/namespaces/{namespace}/configmaps"
        self._rows: dict[_Key, UsageRow] = {}
        self._changed = False
        self._written_at = -WRITE_EVERY_S
        self._version = ""  # resourceVersion of the ConfigMap; "" if there is none
        self._metadata: dict[str, Any] = {}

    async def start(self) -> None:
        """Past usage is known before the first decision."""
        try:
            rows = self._decode_rows(await self._read())
        except ApiError as error:
            if error.status != 403:
                raise
            _log.error(
                "past usage cannot be read, fair share starts from zero and is not kept: %s %s",
                error.message,
                _ROLE_HINT,
            )
            return
        self._rows = {_key(row): row for row in rows}
        if rows:
            self.on_step(self._controller.step(self._now_ms(), [UsageRestored(rows=tuple(rows))]))
            _log.info("read the usage of %d accounts", len({row.path for row in rows}))

    def on_step(self, step: Step) -> None:
        for save in step.saves:
            if isinstance(save, SaveUsage):
                self._record(save.rows)

    def _record(self, rows: Iterable[UsageRow]) -> None:
        for row in rows:
            if self._resources is not None and row.resource not in self._resources:
                continue
            if row.amount:
                self._rows[_key(row)] = row
            else:
                self._rows.pop(_key(row), None)
            self._changed = True

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            if self._changed and self._monotonic() - self._written_at >= WRITE_EVERY_S:
                await self._write(overwrite=True)

    async def stop(self) -> None:
        """Does not overwrite another's version: if the lead was lost, the new leader's is right."""
        if self._changed:
            await self._write(overwrite=False)

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

    async def _write(self, *, overwrite: bool) -> None:
        self._written_at = self._monotonic()
        self._changed = False
        rows = list(self._rows.values())
        packed, oldest_ms = await asyncio.get_running_loop().run_in_executor(None, _pack_newest, rows, self._max_bytes)
        if oldest_ms:
            _log.warning("the oldest usage is dropped: a ConfigMap cannot hold more")
            self._rows = {key: row for key, row in self._rows.items() if row.start_ms >= oldest_ms}
        try:
            try:
                await self._send_configmap(packed)
            except ApiError as error:
                if error.status != 409 or not overwrite:
                    raise
                # Another process wrote in between, an earlier leader at most: ours is newer.
                await self._read()
                await self._send_configmap(packed)
        except ApiError as error:
            self._changed = True
            _log.warning("usage could not be saved, it is tried again: %s %s", error.message, error.hint)

    async def _send_configmap(self, packed: bytes) -> None:
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

    def _decode_rows(self, packed: bytes) -> list[UsageRow]:
        if not packed:
            return []
        try:
            return [row for row in _unpack(packed) if row.amount]
        except (ValueError, TypeError, KeyError, EOFError, OSError, zlib.error) as error:
            _log.error(
                "the usage in ConfigMap %s/%s cannot be read (%s); fair share starts from zero",
                self._namespace, self._name, error,
            )  # fmt: skip
            return []


def _pack_newest(rows: list[UsageRow], max_bytes: int) -> tuple[bytes, int]:
    """The newest rows that fit, and their earliest start (0: all fit). Old hours are dropped for all accounts alike."""
    packed, oldest_ms = _pack(rows), 0
    while len(packed) > max_bytes:
        starts = sorted(row.start_ms for row in rows)
        cutoff_ms = starts[len(starts) - len(starts) * max_bytes // len(packed) * 9 // 10 - 1]
        oldest_ms = min((start for start in starts if start > cutoff_ms), default=starts[-1] + 1)
        rows = [row for row in rows if row.start_ms >= oldest_ms]
        packed = _pack(rows)
    return packed, oldest_ms


def _pack(rows: list[UsageRow]) -> bytes:
    """Grouped by account and resource, so that names appear once."""
    accounts: dict[tuple[tuple[str, ...], str], list[tuple[int, int, int]]] = {}
    for row in sorted(rows, key=_key):
        accounts.setdefault((row.path, row.resource), []).append((row.start_ms, row.width_ms, row.amount))
    found = {"form": _FORMAT, "accounts": [[list(path), name, used] for (path, name), used in accounts.items()]}
    # Without a timestamp, equal rows are equal bytes.
    return gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 6, mtime=0)


def _unpack(packed: bytes) -> Iterator[UsageRow]:
    text = zlib.decompressobj(wbits=31)
    found = json.loads(text.decompress(packed, _MAX_UNPACKED))
    if found["form"] != _FORMAT:
        raise ValueError(f"its format is {found['form']!r}")
    for path, resource, used in found["accounts"]:
        for start_ms, width_ms, amount in used:
            yield UsageRow(tuple(map(str, path)), str(resource), int(start_ms), int(width_ms), int(amount))


_SUCCEEDED = {"fieldSelector": "status.phase=Succeeded"}
_START_TIMEOUT_S = 20.0
# Enough of the newest pods that exist at the start.
_MAX_HISTORY = 10_000


class _Terminated(ApiStruct, frozen=True):
    finished_at: str | None = None


class _State(ApiStruct, frozen=True):
    terminated: _Terminated | None = None


class _Container(ApiStruct, frozen=True):
    state: _State = _State()


class _Status(ApiStruct, frozen=True):
    phase: str = ""
    start_time: str | None = None
    container_statuses: tuple[_Container, ...] = ()


class FinishedPod(ApiStruct, frozen=True):
    metadata: Meta = Meta()
    spec: PodSpec = field(default_factory=PodSpec)
    status: _Status = _Status()

    @property
    def ended_ms(self) -> int:
        """When its last container ended; 0 if unknown."""
        ends = [one.state.terminated.finished_at for one in self.status.container_statuses if one.state.terminated]
        return max((at_ms(stamp) for stamp in ends), default=0)

    @property
    def ran_ms(self) -> int:
        began = at_ms(self.status.start_time)
        return bounded(self.ended_ms - began, 1, MAX_DURATION_MS) if began and self.ended_ms else 0

    @property
    def pod(self) -> Pod:
        return Pod(self.metadata, self.spec, PodStatus(self.status.phase, start_time=self.status.start_time))


# Called with the job, its run time and its end.
OnFinished = Callable[[JobSpec, int, int], None]


class FinishedPodInformer(BackgroundTask):
    """Calls `on_finished` once for each pod of ours that succeeded, in order of their ends for those that exist at the start."""

    def __init__(self, api: Api, scheduler: str, reader: Reader, on_finished: OnFinished, refusals: Refusals) -> None:
        self._scheduler, self._reader, self._on_finished, self._refusals = scheduler, reader, on_finished, refusals
        self._seen: set[str] = set()
        self._reflector = Reflector(api, Resource("/api/v1/pods", FinishedPod), self, selector=_SUCCEEDED)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the history first, but does not delay the start if it takes long."""
        self._watch = asyncio.create_task(self._reflector.run())
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._reflector.synced.wait()
        except TimeoutError:
            _log.warning(
                "pods that succeeded before cannot be read yet: %s", self._reflector.problem or "the list takes long"
            )

    async def run(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._reflector.run())
        await self._watch

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def listed(self, objects: Iterable[FinishedPod], /) -> None:
        found = sorted(objects, key=lambda pod: (pod.ended_ms, pod.metadata.uid))
        for pod in found[-_MAX_HISTORY:]:
            self._record(pod)
        self._seen &= {pod.metadata.uid for pod in found}

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: FinishedPod, /) -> None:
        if kind == "DELETED":
            self._seen.discard(pod.metadata.uid)
        else:
            self._record(pod)

    def _record(self, pod: FinishedPod) -> None:
        uid = pod.metadata.uid
        if uid in self._seen or pod.spec.scheduler_name != self._scheduler or not pod.ran_ms:
            return
        self._seen.add(uid)
        try:
            self._on_finished(self._reader.pod(pod.pod, ours=True).job, pod.ran_ms, pod.ended_ms)
        except Exception as error:
            self._refusals.put(PODS_PATH, pod.metadata, f"no run time is learned from it: {describe_error(error)}")


def runtime_sample(spec: JobSpec, ran_ms: int) -> RuntimeSample:
    declared_ms = spec.estimate_ms or spec.timeout_ms
    return RuntimeSample(spec.project, spec.user, name_pattern(spec), request_shape(spec), ran_ms, declared_ms)
