"""`hodei kube run`: leader election, watches, the scheduling loop, and HTTP for probes and metrics.

A process that does not lead watches nothing; when it is elected it reads the whole cluster, which takes seconds. A process
that loses the lead exits, so that it does not act on outdated state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hodei.configuration import make_estimator
from hodei.control.accounting.accounts import accounts_policy
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.retry import Backoff, RetryPolicy
from hodei.control.queue.backfill import BackfillQueue
from hodei.engine.fairness.billing import BILLING
from hodei.engine.profile import Profile
from hodei.engine.topology_index import AssumedVolumes
from hodei.kube.api.client import Access, Api, served_minor
from hodei.kube.api.lease import LEASE_S, RENEW_EVERY_S, RENEW_WITHIN_S, Leadership
from hodei.kube.api.quantities import UNDECLARED
from hodei.kube.scheduler.background import BackgroundTask, Supervisor, run_in_background
from hodei.kube.scheduler.cache import ClusterCache, Refusals
from hodei.kube.scheduler.group_status import GroupStatusWriter
from hodei.kube.scheduler.history import FinishedPodInformer, UsageStore, runtime_sample
from hodei.kube.scheduler.informers import Informers, ended_members_informer, job_informer
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.messages import LATEST, Messages, PodExplainer, messages_for
from hodei.kube.scheduler.metrics import Metrics
from hodei.kube.scheduler.pod_api import PodApi
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.reservations import ConfiguredReservation, Reservations
from hodei.kube.scheduler.status_reporter import QueueStatus, StatusReporter
from hodei.kube.scheduler.translate import CORDON_TAINT, LONG_RUNNING_MS, Reader, ReaderOptions
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.facts import Fact, HistoryRestored
from hodei.model.job import JobSpec
from hodei.plugins.registry import build_profile, implied_plugins, queue_options
from hodei.plugins.volumes import Volumes
from hodei.process import call_on_stop_signal
from hodei.runtime.clock import SystemClock

WEIGHTS = {
    "taints": 3,
    "affinity": 2,
    "spread": 2,
    "job_affinity": 2,
    "fit": 1,
    "balanced_allocation": 1,
    "image_locality": 1,
}
# The profile of all pods.
PROFILE = "default"
# Plugins for features that pods do not have.
_DISABLED = ("platform", "devices", "overcommit", "workload", "distribution")


def kube_profile(
    name: str = PROFILE,
    *,
    queue: str = "priority",
    queue_arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, int] = WEIGHTS,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    plugins: tuple[str, ...] = (),
    disabled: tuple[str, ...] = (),
) -> Profile:
    """`arguments`: further arguments of plugins (`{"affinity": {"added": ...}}`)."""
    plugin_arguments = {"health": {"cordon_taint": CORDON_TAINT}, **(arguments or {})}
    return build_profile(
        name,
        queue=queue,
        queue_arguments=queue_arguments,
        plugins=("volumes", *plugins),
        disabled=(*_DISABLED, *disabled),
        scores=dict(weights),
        arguments=plugin_arguments,
    )


def cluster_profile(config: SchedulingConfig) -> Profile:
    """The profile of a live cluster, with the operator's settings of the profile `default`."""
    wanted = config.profiles.get(PROFILE, ProfileConfig())
    options = {**wanted.options, "fit": {"assumed": UNDECLARED, **wanted.options.get("fit", {})}}
    return kube_profile(
        queue=wanted.queue,
        queue_arguments=queue_options(wanted),
        weights=WEIGHTS if wanted.scores is None else wanted.scores,
        arguments=options,
        plugins=(*wanted.plugins, *implied_plugins(config, wanted)),
        disabled=wanted.disable,
    )


def assumed_volumes(controller: Controller) -> AssumedVolumes:
    """The free volumes that decisions have given to claims; none if the plugin is disabled."""
    for plugin in controller.engine.profiles[PROFILE].filters:
        if isinstance(plugin, Volumes):
            return plugin.assumed
    return AssumedVolumes()


# A pod that cannot be bound is retried as long as it exists.
_UNLIMITED = 1 << 30
# Few, so that bindings are sent between decisions.
_TRIES_PER_STEP = 32


class Options(Struct, frozen=True):
    scheduler_name: str = "hodei"
    events: Literal["all", "failures"] = "all"
    priority_annotation: str = ""
    one_pod_per_node: bool = False
    scheduling: SchedulingConfig = SchedulingConfig()
    messages: Messages | None = None  # None: those of the cluster's release
    reservations: tuple[ConfiguredReservation, ...] = ()
    forecast_annotation: bool = False
    usage_configmap: str = "hodei-usage"
    priority_preferred: bool = False
    namespace: str = ""  # for the usage ConfigMap; "": the account's own


class PodScheduler(Struct):
    """Without a loop, for commands that only read."""

    controller: Controller
    cache: ClusterCache
    pods: Pods
    explainer: PodExplainer
    metrics: Metrics
    refusals: Refusals
    uses_start_reservations: bool = False  # whether a queue makes start reservations


def build_scheduler(options: Options, tries: int = _TRIES_PER_STEP) -> PodScheduler:
    """`tries`: pods and gangs tried per step; 0 to decide nothing."""
    clock = SystemClock()
    config = options.scheduling
    controller = Controller(
        {PROFILE: cluster_profile(config)},
        retry=RetryPolicy(failed_start=Backoff(1000, 2, 10_000, 100), max_losses=_UNLIMITED),
        admission=AdmissionPolicy("wait"),
        preemption=PreemptionPolicy(config.preemption.enabled, max_per_job=_UNLIMITED, by="number"),
        estimator=make_estimator(config.estimates),
        accounts=accounts_policy(config),
        max_tries=tries,
    )
    controller.evictions.enabled = False  # Kubernetes' own controller evicts pods for taints
    cache = ClusterCache(
        priority_annotation=options.priority_annotation, priority_preferred=options.priority_preferred
    )  # fmt: skip
    controller.cluster.table.topology_index.projects = cache.projects
    controller.preemption.guard = cache.budgets
    uses_start_reservations = any(isinstance(queue, BackfillQueue) for queue in controller.queues.values())
    refusals = Refusals()
    reader_options = ReaderOptions(
        PROFILE, options.one_pod_per_node, LONG_RUNNING_MS if uses_start_reservations else 0
    )  # fmt: skip
    reader = Reader(cache.context, reader_options, refusals)
    pods = Pods(
        options.scheduler_name,
        cache,
        reader,
        clock.now_ms,
        link_members=controller.preemption.link,
        observe_starts=controller.estimator.learns,
    )
    explainer = PodExplainer(controller, pods.name_of, options.messages or LATEST)
    metrics = Metrics(options.scheduler_name, refusals)
    return PodScheduler(controller, cache, pods, explainer, metrics, refusals, uses_start_reservations)


def make_loop(api: Api, scheduler: PodScheduler, options: Options) -> SchedulerLoop:
    pod_api = PodApi(api, options.scheduler_name, events=options.events)
    reporter = StatusReporter(scheduler.controller, scheduler.pods, pod_api, scheduler.explainer)
    clock = SystemClock()
    loop = SchedulerLoop(
        api, scheduler.controller, scheduler.pods, scheduler.cache, pod_api, reporter, scheduler.metrics, clock.now_ms,
        assumed_volumes(scheduler.controller),
    )  # fmt: skip
    scheduler.refusals.listeners.append(loop.report_refused_object)
    return loop


_log = logging.getLogger(__name__)
# The liveness probe fails if the loop has not run for this long.
_STUCK_S = 60.0


class Health:
    """`/healthz /livez /readyz /metrics` over plain HTTP, without names of pods. `checks`: each returns reasons for a restart.
    `watches`: each returns the time since the last contact of its watches, for `/livez?verbose`."""

    def __init__(self, metrics: Callable[[], bytes] = lambda: b"") -> None:
        self.ready = False
        self._metrics = metrics
        self.checks: list[Callable[[], list[str]]] = []
        self.watches: list[Callable[[], Mapping[str, float]]] = []

    def app(self) -> Starlette:
        async def live(request: Request) -> Response:
            problems = [problem for check in self.checks for problem in check()]
            lines = [f"not ok: {problem}" for problem in problems] or ["ok"]
            if "verbose" in request.query_params:
                ages = sorted(age for watch in self.watches for age in watch().items())
                lines = [f"{path}: last contact {age:.0f} s ago" for path, age in ages] + lines
            return PlainTextResponse("\n".join(lines), 500 if problems else 200)

        async def ready(request: Request) -> Response:
            return PlainTextResponse("ok" if self.ready else "not yet", 200 if self.ready else 503)

        async def metrics(request: Request) -> Response:
            return Response(self._metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

        endpoints = {"/healthz": live, "/livez": live, "/readyz": ready, "/metrics": metrics}
        return Starlette(routes=[Route(path, endpoint) for path, endpoint in endpoints.items()])


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the scheduler handles signals itself


@contextlib.asynccontextmanager
async def serve_health(health: Health, host: str, port: int) -> AsyncIterator[asyncio.Task[None]]:
    """Serve while inside; yields the server's task."""
    config = uvicorn.Config(health.app(), host=host, port=port, log_level="warning", access_log=False, lifespan="off")
    server = _Server(config)
    task = asyncio.create_task(server.serve())
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 (uvicorn has no event to wait for)
            await asyncio.sleep(0.01)
        if task.done():
            await task
        yield task
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, SystemExit):
            await task


class Election(Struct, frozen=True):
    name: str = "hodei"
    namespace: str = ""
    identity: str = ""
    lease_s: int = LEASE_S


async def run(access: Access, options: Options, listen: tuple[str, int], election: Election | None) -> int:
    """The exit code: 0 after a signal, 1 if the lead was lost or a part has failed."""
    stopping, scheduler = asyncio.Event(), build_scheduler(options)
    supervisor, health = Supervisor(stopping.set), Health(scheduler.metrics.render)
    call_on_stop_signal(stopping.set)
    health.checks.append(lambda: [supervisor.failure] if supervisor.failure else [])
    async with serve_health(health, *listen) as http_server, connected(access) as api:
        supervisor.watch(http_server, "the HTTP server for probes")
        process = _Process(api, scheduler, options, health, stopping, supervisor)
        code = 0
        if election is None:
            await process.schedule()
        else:
            code = await process.run_elected(election)
        supervisor.closing = True
    return 1 if supervisor.failure else code


class _Process(Struct):
    api: Api
    scheduler: PodScheduler
    options: Options
    health: Health
    stopping: asyncio.Event
    supervisor: Supervisor

    async def run_elected(self, election: Election) -> int:
        identity = election.identity or f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
        share = election.lease_s / LEASE_S
        leadership = Leadership(
            self.api, election.namespace or self.api.namespace, election.name, identity, on_lost=self.stopping.set,
            lease_s=election.lease_s, renew_within_s=RENEW_WITHIN_S * share, renew_every_s=RENEW_EVERY_S * share,
        )  # fmt: skip
        election_task = asyncio.create_task(leadership.run())
        self.supervisor.watch(election_task, "the election", may_return=True)
        self.health.ready = True  # a standby is healthy too
        try:
            stopped = asyncio.create_task(self.stopping.wait())
            elected = asyncio.create_task(leadership.acquired.wait())
            await asyncio.wait((stopped, elected), return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            elected.cancel()
            if leadership.acquired.is_set() and not self.stopping.is_set():
                await self.schedule()
            return 1 if leadership.lost.is_set() else 0
        finally:
            await leadership.release()
            election_task.cancel()
            await asyncio.gather(election_task, return_exceptions=True)

    async def schedule(self) -> None:
        scheduler, options, supervisor = self.scheduler, self.options, self.supervisor
        if options.messages is None:
            scheduler.explainer.messages = messages_for(await served_minor(self.api))
        loop = make_loop(self.api, scheduler, options)
        loop.background_tasks = background_tasks_for(self.api, scheduler, options, loop)
        informers = Informers(self.api, scheduler.pods, scheduler.cache, loop.wake, scheduler.refusals)
        scheduler.metrics.informers = informers
        began = time.monotonic()
        synced = asyncio.create_task(informers.start(supervisor))
        stopped = asyncio.create_task(self.stopping.wait())
        try:
            while not synced.done() and not stopped.done():
                await asyncio.wait((synced, stopped), timeout=10, return_when=asyncio.FIRST_COMPLETED)
                for problem in informers.problems if not synced.done() else ():
                    _log.warning("the cluster is not read completely yet: %s", problem)
            if self.stopping.is_set():
                return
            await synced
            _log.info(
                "scheduling pods of %s: read %d nodes and %d pods in %.1f s",
                options.scheduler_name, len(scheduler.pods.nodes), len(scheduler.pods.entries), time.monotonic() - began,
            )  # fmt: skip

            def stuck() -> list[str]:
                idle_s = time.monotonic() - loop.last_round
                return [f"nothing has been decided for {idle_s:.0f} s"] if idle_s > _STUCK_S else []

            self.health.checks += [stuck, informers.stuck]
            self.health.watches.append(informers.ages)
            self.health.ready = True
            async with run_in_background(loop.background_tasks, scheduler.metrics.restarted):
                await loop.run(self.stopping)
        finally:
            for task in (synced, stopped):
                task.cancel()
            await informers.stop()


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[Api]:
    api = await Api.connect(access, connections=160)
    try:
        yield api
    finally:
        await api.close()


def background_tasks_for(
    api: Api, scheduler: PodScheduler, options: Options, loop: SchedulerLoop
) -> list[BackgroundTask]:
    """In order of their start: history, then reservations, then the rest."""
    controller, pods, clock = scheduler.controller, scheduler.pods, SystemClock()
    out: list[BackgroundTask] = [
        job_informer(api, scheduler.cache, scheduler.refusals, pods.needs_jobs),
        ended_members_informer(api, options.scheduler_name, pods.ended_members, pods.has_groups),
        GroupStatusWriter(api, options.scheduler_name, pods, scheduler.cache, time.time),
    ]
    if controller.accounts.sharing is not None and options.usage_configmap:
        resources = None if options.scheduling.budgets else frozenset({BILLING})
        namespace = options.namespace or api.namespace or "default"
        out.append(
            UsageStore(
                api,
                namespace,
                options.usage_configmap,
                controller,
                clock.now_ms,
                resources=resources,
                monotonic=time.monotonic,
            )
        )
    forecasts = None
    if options.forecast_annotation:
        from hodei.kube.scheduler.forecasts import PodForecasts  # heavy, and rarely used

        forecasts = PodForecasts(api, controller, pods, clock, options.scheduling.forecast)
    if controller.estimator.learns or forecasts is not None:

        def on_finished(spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
            if controller.estimator.learns:
                pods.add_facts([HistoryRestored(samples=(runtime_sample(spec, ran_ms),))])
            if forecasts is not None:
                forecasts.learn(spec, ran_ms, ended_ms)

        reader = Reader(scheduler.cache.context, ReaderOptions(PROFILE, options.one_pod_per_node), scheduler.refusals)
        out.append(FinishedPodInformer(api, options.scheduler_name, reader, on_finished, scheduler.refusals))
    if options.reservations:

        def add_facts(facts: Sequence[Fact]) -> None:
            pods.add_facts(facts)
            loop.wake()

        out.append(Reservations(options.reservations, controller, pods.take_facts, add_facts, clock.now_ms, loop.step))
    if scheduler.uses_start_reservations:
        out.append(QueueStatus(controller, pods, scheduler.explainer, loop.report, clock.now_ms))
    if forecasts is not None:
        out.append(forecasts)
    return out
