"""`ports.Backend` over one cluster: orders become pods, and watches become observations and nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.kubernetes.manifest import Settings, check, manifest, own_labels
from hodei.backends.kubernetes.nodes import NodeCache, Sink
from hodei.backends.kubernetes.pod_api import InDoubt, Logs, PodMissing, Pods, execute, node_usage, run_limited
from hodei.backends.kubernetes.runs import (
    RunPod,
    Runs,
    StopCause,
    UnconfirmedPods,
    deadline_s,
    forced_end,
    health_failure,
    remaining_grace_s,
    start_failure,
)
from hodei.backends.kubernetes.supervision import RunSupervision
from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import Node as KubeNode
from hodei.kube.api.objects import Pod
from hodei.kube.api.reflector import Reflector, Resource
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, InvalidInput, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.model.resources import parse_duration_ms
from hodei.ports import Stream
from hodei.process import cancel_tasks

log = logging.getLogger("hodei.kubernetes")
CAPABILITIES = Capabilities(
    images=True,
    bare=False,
    gpus=True,
    limits=True,
    two_streams=False,
    checkpoint=True,
    health_checks=True,
    execute=True,
    usage=True,
)
# Pods that take capacity on nodes.
_BOUND = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
SYNC_TIMEOUT_S = 30.0
# A watch with a problem this long after `open` is refused, not slow.
REFUSED_S = 3.0
# A watch that was cut for OUTAGE_S while the API does not answer is an outage. If the API answers, the watch may have
# recovered and have no events; but it sends at least a bookmark about every minute.
OUTAGE_S, SILENCE_S = 20.0, 100.0
SUPERVISE_EVERY_S = 2.0
PRUNE_EVERY_S = 3600.0
# Changes of nodes come in bursts; one update is enough for each.
BURST_S = 0.3
CALL_TIMEOUT_S = 50.0
NOT_STARTED_GRACE_S = 1


class KubernetesBackend(BaseBackend):
    kind = "kubernetes"

    def __init__(self, name: str, settings: Settings, context: BackendContext) -> None:
        super().__init__(name)
        check(name, settings)
        self.capabilities = structs.replace(CAPABILITIES, bare=bool(settings.image))
        self._settings, self._context = settings, context
        self._pull_timeout_ms = parse_duration_ms(settings.pull_timeout)
        self._own_labels = own_labels(context.installation, name)
        self._logs = Logs(context.home / name / "logs", context.log_cap_bytes, context.keep_logs_s)
        self._nodes_changed = asyncio.Event()
        self._runs = Runs(context.clock.now_ms, self._ended)
        self._unconfirmed = UnconfirmedPods(self._runs, context.clock.now_ms)
        self._supervision = RunSupervision(self._runs, context.clock.now_ms, self._stop, self._spawn)
        self._node_cache = NodeCache(name, settings, self._own_labels, self._nodes_changed.set)
        self._pods: Pods | None = None
        self._reflectors: list[Reflector[Any]] = []
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._archiving: dict[RunId, asyncio.Task[None]] = {}
        self._busy: set[RunId] = set()
        self._outage = ""

    async def open(self) -> None:
        """Known runs stay known; ends that are not forgotten yet are reported again."""
        await self.close()
        try:
            api = await Api.connect(self._settings.access)
        except ApiError as error:
            raise BackendError(error.message, hint=error.hint, code=NOT_REACHED) from error
        except InvalidInput as error:
            raise BackendError(error.message, hint=error.hint) from error
        self._pods = Pods(api, self._settings.namespace, self._context.installation)
        self._supervision.reset(self._pods)
        selector = ",".join(f"{key}={value}" for key, value in self._own_labels.items())
        own = Reflector(
            api, Resource(self._pods.path, RunPod), self._runs, selector={"labelSelector": selector}
        )  # fmt: skip
        cache = self._node_cache
        node_sink = Sink(cache.nodes_listed, cache.node_changed, cache.flush)
        pod_sink = Sink(cache.pods_listed, cache.pod_changed, cache.flush)
        nodes = Reflector(api, Resource("/api/v1/nodes", KubeNode), node_sink)
        bound = Reflector(api, Resource("/api/v1/pods", Pod), pod_sink, selector={"fieldSelector": _BOUND})
        self._reflectors = [own, nodes, bound]
        unforgotten = list(self._runs.ends.values())
        self._loops = [asyncio.create_task(one.run()) for one in self._reflectors]
        try:
            await self._wait_synced()
        except BackendError:
            await self.close()
            raise
        self._loops += [asyncio.create_task(self._supervise()), asyncio.create_task(self._prune())]
        for end in unforgotten:
            self._ended(end)

    async def _wait_synced(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while not all(one.synced.is_set() for one in self._reflectors):
            problems = "; ".join(one.problem for one in self._reflectors if one.problem and not one.synced.is_set())
            waited = loop.time() - started_s
            if (problems and waited > REFUSED_S) or waited > SYNC_TIMEOUT_S:
                raise BackendError(
                    f"the cluster cannot be read: {problems or 'no answer'}"[:1000],
                    hint="see docs/how-to/kubernetes-backend.md for the rights that are needed",
                )
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        pods, self._pods, self._outage = self._pods, None, ""
        tasks = [*self._loops, *self._tasks]
        self._loops = []
        await cancel_tasks(tasks)
        self._supervision.reset(None)
        self._archiving.clear()
        self._busy.clear()
        self._runs.changed_event.set()  # `observe` raises that the backend is closed
        if pods is not None:
            await pods.api.close()

    async def ping(self) -> str:
        try:
            answer = await self._open().api.request("GET", "/version", timeout_s=5, attempts=2)
        except ApiError as error:
            raise BackendError(error.message[:500], hint=error.hint) from error
        return f"Kubernetes {msgspec.json.decode(answer).get('gitVersion', '')}"

    def _open(self) -> Pods:
        if self._pods is None:
            raise BackendError(f"backend {self.name} is not open", code=NOT_REACHED)
        return self._pods

    async def nodes(self) -> list[Node]:
        self._open()
        return self._node_cache.nodes()

    async def nodes_changed(self) -> None:
        await self._nodes_changed.wait()
        await asyncio.sleep(BURST_S)
        self._nodes_changed.clear()

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        pods = self._open()
        refused: dict[RunId, BackendError | BackendRefused] = {}
        answered = 0

        async def one(order: Start) -> None:
            nonlocal answered
            run, before = order.run.id, self._unconfirmed.may_exist(order)
            try:
                body = manifest(order, self.name, self._context.installation, self._settings)
                self._unconfirmed.sent(run)
                await pods.create(body)
            except InDoubt as doubt:
                if doubt.error.code == NOT_REACHED and not before:
                    self._unconfirmed.confirm(run)
                raise
            except (BackendError, BackendRefused) as error:
                if before:
                    self._spawn(self._unconfirmed.resolve(run, error, pods))
                else:
                    refused[run] = error
                    self._unconfirmed.confirm(run)
            else:
                self._unconfirmed.confirm(run)
            answered += 1

        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await run_limited(orders, one)
        except InDoubt as doubt:
            # The outcome of this one and the following is unknown. They are ordered again: a pod that exists stays as it is.
            sent = answered or any(self._unconfirmed.may_exist(order) for order in orders)
            raise (BackendError(doubt.error.message) if sent else doubt.error) from None
        except TimeoutError:
            raise BackendError(f"the API took more than {CALL_TIMEOUT_S:g} s for {len(orders)} pods") from None
        return refused

    async def stop(self, orders: Sequence[Stop]) -> None:
        async def one(order: Stop) -> None:
            if not self._supervision.stop_after_checkpoint(order):
                await self._stop(order.run, StopCause(order.reason.text), math.ceil(order.grace_ms / 1000))

        async with self._bounded():
            await run_limited(orders, one)

    async def _stop(self, run: RunId, cause: StopCause, grace_s: int) -> None:
        pods, pod = self._open(), self._runs.pods.get(run)
        if run in self._runs.ends:
            return
        try:
            if pod is None or pod.stop_cause is None:
                pod = await pods.record_stop(run, cause)
            left = remaining_grace_s(pod, self._context.clock.now_ms(), grace_s)
            if not pod.ended and left is not None:
                await pods.delete(run, left)
        except PodMissing:
            self._unconfirmed.stop_when_found(run, lambda: self._stop(run, cause, grace_s))

    async def forget(self, orders: Sequence[Forget]) -> None:
        """Remove the pod; its log is archived."""

        async def one(order: Forget) -> None:
            pods = self._open()
            if archiving := self._archiving.get(order.run):
                await asyncio.wait({archiving})
            self._runs.forget(order.run)
            self._supervision.forget(order.run)
            with contextlib.suppress(PodMissing):
                await pods.remove_finalizer(order.run)
                await pods.delete(order.run, 0)

        async with self._bounded():
            await run_limited(orders, one)

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        self._open()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                yield
        except TimeoutError:
            raise BackendError(f"the API took more than {CALL_TIMEOUT_S:g} s") from None

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        self._open()
        for order in orders:
            self._supervision.checkpoint(order.run, order.checkpoint)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        pods, pod = self._open(), self._runs.pods.get(run)
        if pod is None or pod.container.running is None:
            raise NotFound(f"run {run} does not run", hint="see its state with `hodei job show`")
        return await execute(pods.api, pods.path_of(run), command, timeout_ms)

    async def usage(self) -> dict[NodeName, NodeUsage]:
        return await node_usage(self._open().api, self.name, self._settings.node_prefix, await self.nodes())

    async def observe(self) -> list[RunObserved]:
        while True:
            if seen := self._runs.take_observations():
                return seen
            self._open()
            if self._outage:
                raise BackendError(self._outage)
            self._runs.changed_event.clear()
            await self._runs.changed_event.wait()

    async def known(self) -> dict[RunId, RunObserved]:
        self._open()
        return self._unconfirmed.known() | self._runs.known()

    def _ended(self, end: RunObserved) -> None:
        """Archive its log before its end is reported, because the pod is removed once that is stored."""
        if end.run not in self._archiving:
            self._archiving[end.run] = self._spawn(self._archive_and_report(end))

    async def _archive_and_report(self, end: RunObserved) -> None:
        run, pod, pods = end.run, self._runs.pods.get(end.run), self._pods
        try:
            if pod is not None and pods is not None and pod.has_started:
                await self._logs.archive(pods.api, pods.path_of(run), run)
        except (ApiError, TimeoutError, OSError) as error:
            log.warning(
                "backend %s: the log of run %s cannot be archived: %s", self.name, run, error or "no answer in time"
            )
        self._archiving.pop(run, None)
        self._runs.report(end)

    async def _supervise(self) -> None:
        """Stop runs that do not start or are unhealthy, set deadlines, and detect outages."""
        healthy_at = dict.fromkeys(range(len(self._reflectors)), asyncio.get_running_loop().time())
        while True:
            await asyncio.sleep(SUPERVISE_EVERY_S)
            try:
                now_ms = self._context.clock.now_ms()
                for run, pod in list(self._runs.pods.items()):
                    if run not in self._runs.ends and run not in self._busy:
                        self._check_pod(run, pod, now_ms)
                        self._supervision.check(run, pod, now_ms)
                await self._check_watches(healthy_at)
            except Exception as error:
                log.exception("backend %s", self.name)
                self._set_outage(str(error))

    async def _check_watches(self, healthy_at: dict[int, float]) -> None:
        now = asyncio.get_running_loop().time()
        for at, (reflector, task) in enumerate(zip(self._reflectors, self._loops, strict=False)):
            if task.done():
                log.error("backend %s: a watch has ended", self.name, exc_info=task.exception())
                self._set_outage("a watch has ended")
            elif not reflector.problem:
                healthy_at[at] = now
            elif now - healthy_at[at] > SILENCE_S or (now - healthy_at[at] > OUTAGE_S and not (await self.health()).ok):
                self._set_outage(reflector.problem)

    def _check_pod(self, run: RunId, pod: RunPod, now_ms: int) -> None:
        if end := forced_end(pod, now_ms):
            self._runs.end(end)
        elif cause := start_failure(pod, now_ms, self._pull_timeout_ms):
            self._act(run, self._stop(run, cause, NOT_STARTED_GRACE_S))
        elif cause := health_failure(pod, now_ms):
            self._act(run, self._stop(run, cause, math.ceil(pod.supervision.grace_ms / 1000)))
        elif seconds := deadline_s(pod):
            self._act(run, self._open().set_deadline(run, seconds))

    def _act(self, run: RunId, action: Coroutine[Any, Any, None]) -> None:
        async def one() -> None:
            try:
                with contextlib.suppress(PodMissing):
                    await action
            except BackendError as error:
                log.warning("backend %s: run %s: %s", self.name, run, error)
            finally:
                self._busy.discard(run)

        self._busy.add(run)
        self._spawn(one())

    def _set_outage(self, text: str) -> None:
        self._outage = f"the cluster is out of reach: {text}"[:1000]
        self._runs.changed_event.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._logs.prune)
            await asyncio.sleep(PRUNE_EVERY_S)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """A pod has one log: everything is stdout."""
        if stream == "stderr":
            if run not in self._runs.pods and not self._logs.has(run):
                raise NotFound(f"no log is kept of run {run}")
            return b"", offset
        if self._logs.has(run):
            return await asyncio.to_thread(self._logs.read_file, run, Path(run), offset, limit)
        pods = self._open()
        return await self._logs.read(pods.api, pods.path_of(run), run, max(0, offset), limit)


make = KubernetesBackend
