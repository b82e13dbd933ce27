"""`ports.Backend` over one cluster: orders become pods, watches become observations, the cluster's nodes are ours to fill as
far as others leave room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import structs

from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.kubernetes.manifest import Settings, check, manifest, own_labels
from hodei.backends.kubernetes.nodes import NodeSink, Picture, PodSink
from hodei.backends.kubernetes.pod_api import Gone, Pods, Unsure, each, node_usage
from hodei.backends.kubernetes.runs import Runs, UnconfirmedPods
from hodei.backends.kubernetes.states import Ending, RunPod, deadline_s, forced, grace_left, hopeless, unwell
from hodei.backends.kubernetes.streams import Logs, execute
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
# Bound and not over: what takes room on nodes.
_HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
FIRST_PICTURE_S = 30.0
# A watch that is refused so early is refused for a reason, and is not waited for.
REFUSED_S = 3.0
# A watch that was cut for so long, and nobody answers: the cluster is out of reach, and the house is told. If somebody
# does, the watch may be well again and have nothing to say; but about every minute it says at least that.
OUTAGE_S, SILENCE_S = 20.0, 100.0
CARE_EVERY_S = 2.0
PRUNE_EVERY_S = 3600.0
# Changes of the nodes' room come in bursts; one look is enough for each.
BURST_S = 0.3
CALL_S = 50.0
GIVE_UP_GRACE_S = 1


class KubernetesBackend(BaseBackend):
    kind = "kubernetes"

    def __init__(self, name: str, settings: Settings, context: BackendContext) -> None:
        super().__init__(name)
        check(name, settings)
        self.capabilities = structs.replace(CAPABILITIES, bare=bool(settings.image))
        self._settings, self._context = settings, context
        self._patience_ms = parse_duration_ms(settings.pull_patience)
        self._ours = own_labels(context.installation, name)
        self._logs = Logs(context.home / name / "logs", context.log_cap_bytes, context.keep_logs_s)
        self._nodes_news = asyncio.Event()
        self._runs = Runs(context.clock.now_ms, self._ended)
        self._doubts = UnconfirmedPods(self._runs, context.clock.now_ms)
        self._keeper = RunSupervision(self._runs, context.clock.now_ms, self._stop, self._errand)
        self._picture = Picture(name, settings, self._ours, self._nodes_news.set)
        self._pods: Pods | None = None
        self._reflectors: list[Reflector[Any]] = []
        self._loops: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._finishing: dict[RunId, asyncio.Task[None]] = {}
        self._caring: set[RunId] = set()
        self._down = ""

    # --------------------------------------------------------------------------------------- connection

    async def open(self) -> None:
        """What was known before stays known; ends that are not forgotten yet are told again."""
        await self.close()
        try:
            api = await Api.connect(self._settings.access)
        except ApiError as error:
            raise BackendError(error.message, hint=error.hint, code=NOT_REACHED) from error
        except InvalidInput as error:
            raise BackendError(error.message, hint=error.hint) from error
        self._pods = Pods(api, self._settings.namespace, self._context.installation)
        self._keeper.begin(self._pods)
        selector = ",".join(f"{key}={value}" for key, value in self._ours.items())
        own = Reflector(
            api, Resource(self._pods.path, RunPod), self._runs, selector={"labelSelector": selector}
        )  # fmt: skip
        nodes = Reflector(api, Resource("/api/v1/nodes", KubeNode), NodeSink(self._picture))
        holding = Reflector(
            api, Resource("/api/v1/pods", Pod), PodSink(self._picture), selector={"fieldSelector": _HOLDING}
        )  # fmt: skip
        self._reflectors = [own, nodes, holding]
        told_again = list(self._runs.ends.values())
        self._loops = [asyncio.create_task(one.run()) for one in self._reflectors]
        try:
            await self._first_picture()
        except BackendError:
            await self.close()
            raise
        self._loops += [asyncio.create_task(self._care()), asyncio.create_task(self._prune())]
        for end in told_again:
            self._ended(end)

    async def _first_picture(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not all(one.synced.is_set() for one in self._reflectors):
            problems = "; ".join(one.problem for one in self._reflectors if one.problem and not one.synced.is_set())
            waited = loop.time() - began
            if (problems and waited > REFUSED_S) or waited > FIRST_PICTURE_S:
                raise BackendError(
                    f"the cluster cannot be read: {problems or 'no answer'}"[:1000],
                    hint="see docs/how-to/kubernetes-backend.md for the rights that are needed",
                )
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        pods, self._pods, self._down = self._pods, None, ""
        tasks = [*self._loops, *self._errands]
        self._loops = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._keeper.begin(None)
        self._finishing.clear()
        self._caring.clear()
        self._runs.something_new.set()  # who waits there learns that it is closed
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

    # --------------------------------------------------------------------------------------------- nodes

    async def nodes(self) -> list[Node]:
        self._open()
        return self._picture.nodes()

    async def nodes_changed(self) -> None:
        await self._nodes_news.wait()
        await asyncio.sleep(BURST_S)
        self._nodes_news.clear()

    # -------------------------------------------------------------------------------------------- orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        pods = self._open()
        refused: dict[RunId, BackendError | BackendRefused] = {}
        answered = 0

        async def one(order: Start) -> None:
            nonlocal answered
            run, before = order.run.id, self._doubts.of(order)
            try:
                body = manifest(order, self.name, self._context.installation, self._settings)
                self._doubts.sent(run)
                await pods.create(body)
            except Unsure as unsure:
                if unsure.error.code == NOT_REACHED and not before:
                    self._doubts.settled(run)
                raise
            except (BackendError, BackendRefused) as error:
                if before:
                    self._errand(self._doubts.find_out(run, error, pods))
                else:
                    refused[run] = error
                    self._doubts.settled(run)
            else:
                self._doubts.settled(run)
            answered += 1

        try:
            async with asyncio.timeout(CALL_S):
                await each(orders, one)
        except Unsure as unsure:
            # Of this one, and of those behind it, nobody knows. They are ordered again: who is there stays as he is.
            sent = answered or any(self._doubts.of(order) for order in orders)
            raise (BackendError(unsure.error.message) if sent else unsure.error) from None
        except TimeoutError:
            raise BackendError(f"the API took more than {CALL_S:g} s for {len(orders)} pods") from None
        return refused

    async def stop(self, orders: Sequence[Stop]) -> None:
        async def one(order: Stop) -> None:
            if not self._keeper.stop_later(order):
                await self._stop(order.run, Ending(order.reason.text), math.ceil(order.grace_ms / 1000))

        async with self._bounded():
            await each(orders, one)

    async def _stop(self, run: RunId, ending: Ending, grace_s: int) -> None:
        pods, pod = self._open(), self._runs.pods.get(run)
        if run in self._runs.ends:
            return
        try:
            if pod is None or pod.ending is None:
                pod = await pods.mark(run, ending)
            left = grace_left(pod, self._context.clock.now_ms(), grace_s)
            if not pod.over and left is not None:
                await pods.delete(run, left)
        except Gone:
            self._doubts.stop_when_found(run, lambda: self._stop(run, ending, grace_s))

    async def forget(self, orders: Sequence[Forget]) -> None:
        """The pod may go now; its log stays until its time has come."""

        async def one(order: Forget) -> None:
            pods = self._open()
            if finishing := self._finishing.get(order.run):
                await asyncio.wait({finishing})
            self._runs.forget(order.run)
            self._keeper.forget(order.run)
            with contextlib.suppress(Gone):
                await pods.let_go(order.run)
                await pods.delete(order.run, 0)

        async with self._bounded():
            await each(orders, one)

    @contextlib.asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        self._open()
        try:
            async with asyncio.timeout(CALL_S):
                yield
        except TimeoutError:
            raise BackendError(f"the API took more than {CALL_S:g} s") from None

    # ----------------------------------------------------------------------------------- while they run

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        self._open()
        for order in orders:
            self._keeper.save(order.run, order.checkpoint)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        pods, pod = self._open(), self._runs.pods.get(run)
        if pod is None or pod.container.running is None:
            raise NotFound(f"run {run} does not run", hint="see how it stands with `hodei job show`")
        return await execute(pods.api, pods.path_of(run), command, timeout_ms)

    async def usage(self) -> dict[NodeName, NodeUsage]:
        return await node_usage(self._open().api, self.name, self._settings.node_prefix, await self.nodes())

    # -------------------------------------------------------------------------------------------- hearing

    async def observe(self) -> list[RunObserved]:
        while True:
            if news := self._runs.take_news():
                return news
            self._open()
            if self._down:
                raise BackendError(self._down)
            self._runs.something_new.clear()
            await self._runs.something_new.wait()

    async def known(self) -> dict[RunId, RunObserved]:
        self._open()
        return self._doubts.known() | self._runs.known()

    def _ended(self, end: RunObserved) -> None:
        """Its log is fetched before its end is told, because the pod goes when that is stored."""
        if end.run not in self._finishing:
            self._finishing[end.run] = self._errand(self._finish(end))

    async def _finish(self, end: RunObserved) -> None:
        run, pod, pods = end.run, self._runs.pods.get(end.run), self._pods
        try:
            if pod is not None and pods is not None and pod.began:
                await self._logs.keep(pods.api, pods.path_of(run), run)
        except (ApiError, TimeoutError, OSError) as error:
            log.warning(
                "backend %s: the log of run %s cannot be kept: %s", self.name, run, error or "no answer in time"
            )
        self._finishing.pop(run, None)
        self._runs.tell(end)

    # ---------------------------------------------------------------------------------------------- care

    async def _care(self) -> None:
        """Runs whose image never comes or that are not well are ended, times are set, and an outage is noticed."""
        well_at = dict.fromkeys(range(len(self._reflectors)), asyncio.get_running_loop().time())
        while True:
            await asyncio.sleep(CARE_EVERY_S)
            try:
                now_ms = self._context.clock.now_ms()
                for run, pod in list(self._runs.pods.items()):
                    if run not in self._runs.ends and run not in self._caring:
                        self._care_for(run, pod, now_ms)
                        self._keeper.look_after(run, pod, now_ms)
                await self._look_at_watches(well_at)
            except Exception as error:
                log.exception("backend %s", self.name)
                self._went_down(str(error))

    async def _look_at_watches(self, well_at: dict[int, float]) -> None:
        now = asyncio.get_running_loop().time()
        for at, (reflector, task) in enumerate(zip(self._reflectors, self._loops, strict=False)):
            if task.done():
                log.error("backend %s: a watch has ended", self.name, exc_info=task.exception())
                self._went_down("a watch has ended")
            elif not reflector.problem:
                well_at[at] = now
            elif now - well_at[at] > SILENCE_S or (now - well_at[at] > OUTAGE_S and not (await self.health()).ok):
                self._went_down(reflector.problem)

    def _care_for(self, run: RunId, pod: RunPod, now_ms: int) -> None:
        if end := forced(pod, now_ms):
            self._runs.end(end)
        elif ending := hopeless(pod, now_ms, self._patience_ms):
            self._care_by(run, self._stop(run, ending, GIVE_UP_GRACE_S))
        elif ending := unwell(pod, now_ms):
            self._care_by(run, self._stop(run, ending, math.ceil(pod.care.grace_ms / 1000)))
        elif seconds := deadline_s(pod):
            self._care_by(run, self._open().set_deadline(run, seconds))

    def _care_by(self, run: RunId, doing: Coroutine[Any, Any, None]) -> None:
        async def one() -> None:
            try:
                with contextlib.suppress(Gone):
                    await doing
            except BackendError as error:
                log.warning("backend %s: run %s: %s", self.name, run, error)
            finally:
                self._caring.discard(run)

        self._caring.add(run)
        self._errand(one())

    def _went_down(self, text: str) -> None:
        self._down = f"the cluster is out of reach: {text}"[:1000]
        self._runs.something_new.set()

    def _errand(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(doing)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._logs.prune)
            await asyncio.sleep(PRUNE_EVERY_S)

    # ---------------------------------------------------------------------------------------------- logs

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """All that it says is stdout: a pod has one log."""
        if stream == "stderr":
            if run not in self._runs.pods and not self._logs.kept(run):
                raise NotFound(f"no log is kept of run {run}")
            return b"", offset
        if self._logs.kept(run):
            return await asyncio.to_thread(self._logs.read_kept, run, offset, limit)
        pods = self._open()
        return await self._logs.read(pods.api, pods.path_of(run), run, max(0, offset), limit)


def make(name: str, settings: Settings, context: BackendContext) -> KubernetesBackend:
    return KubernetesBackend(name, settings, context)
