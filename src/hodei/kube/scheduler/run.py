"""`hodei kube run`: from the lease to the last binding.

A process that does not lead watches nothing: when it comes to lead it looks at everything anew, which takes seconds. One that
has lost the lead ends, so that nothing it still believes can do harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from hodei.engine.fairness.billing import BILLING
from hodei.kube.api.client import Access, Api, served_minor
from hodei.kube.api.lease import EVERY_S, LASTS_S, RENEW_WITHIN_S, Leadership
from hodei.kube.scheduler.background import BackgroundTask, Supervisor, attended
from hodei.kube.scheduler.build import LINE, Options, PodSchedulerParts, build_scheduler, make_driver
from hodei.kube.scheduler.group_status import GroupStatusWriter
from hodei.kube.scheduler.groups import EndedMembersInformer
from hodei.kube.scheduler.history import Finished, UsageStore, as_ran
from hodei.kube.scheduler.informers import Informers, WatchingJobs
from hodei.kube.scheduler.loop import SchedulerLoop
from hodei.kube.scheduler.messages import of_release
from hodei.kube.scheduler.pod_reader import Reader, Reading
from hodei.kube.scheduler.reservations import Reservations
from hodei.kube.scheduler.status_reporter import QueueStatus
from hodei.model.facts import Fact, HistoryRestored
from hodei.model.job import JobSpec
from hodei.runtime.clock import SystemClock

# ------------------------------------------------------------------------------------------------ http
# `/healthz /livez /readyz /metrics`: plain HTTP for probes and Prometheus. It says nothing about pods by name.


class Health:
    """`ready`: it may be counted on. `troubles`: why it should be started again; nothing while its loop goes round and all
    its watches do. `ages`: how long ago each watch was last heard, for `/livez?verbose`."""

    def __init__(self) -> None:
        self.ready = False
        self.troubles: Callable[[], list[str]] = list
        self.ages: Callable[[], Mapping[str, float]] = dict
        self.metrics: Callable[[], bytes] = lambda: b""

    def app(self) -> Starlette:
        async def live(request: Request) -> Response:
            troubles = self.troubles()
            lines = [f"not ok: {trouble}" for trouble in troubles] or ["ok"]
            if "verbose" in request.query_params:
                lines = [*(f"{path}: heard {age:.0f} s ago" for path, age in sorted(self.ages().items())), *lines]
            return PlainTextResponse("\n".join(lines), 500 if troubles else 200)

        async def ready(request: Request) -> Response:
            return PlainTextResponse("ok" if self.ready else "not yet", 200 if self.ready else 503)

        async def metrics(request: Request) -> Response:
            return Response(self.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

        return Starlette(
            routes=[
                Route("/healthz", live),
                Route("/livez", live),
                Route("/readyz", ready),
                Route("/metrics", metrics),
            ]
        )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the scheduler hears them itself


@contextlib.asynccontextmanager
async def serving(health: Health, host: str, port: int) -> AsyncIterator[asyncio.Task[None]]:
    """Answers while inside; the task that does."""
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


# ----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
# A loop that has not gone round for so long is stuck: whoever probes it starts it again.
_STUCK_S = 60.0


class Election(Struct, frozen=True):
    name: str = "hodei"
    namespace: str = ""
    identity: str = ""
    lasts_s: int = LASTS_S


async def run(access: Access, options: Options, listen: tuple[str, int], election: Election | None) -> int:
    """The exit code: 0 when told to end, 1 when the lead was lost or a part of it has failed."""
    stopping, health, scheduler = asyncio.Event(), Health(), build_scheduler(options)
    supervisor = Supervisor(stopping.set)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    health.metrics = scheduler.metrics.written
    health.troubles = lambda: [supervisor.failure] if supervisor.failure else []
    async with serving(health, *listen) as answering, connected(access) as api:
        supervisor.watch(answering, "what answers probes")
        code = 0
        if election is None:
            await _schedule(api, scheduler, options, health, stopping, supervisor)
        else:
            code = await _lead(api, scheduler, options, health, stopping, supervisor, election)
        supervisor.closing = True
    return 1 if supervisor.failure else code


async def _lead(
    api: Api,
    scheduler: PodSchedulerParts,
    options: Options,
    health: Health,
    stopping: asyncio.Event,
    supervisor: Supervisor,
    election: Election,
) -> int:
    identity = election.identity or f"{socket.gethostname()}_{os.getpid()}_{os.urandom(4).hex()}"
    share = election.lasts_s / LASTS_S
    leadership = Leadership(
        api, election.namespace or api.namespace, election.name, identity, on_lost=stopping.set,
        lasts_s=election.lasts_s, renew_within_s=RENEW_WITHIN_S * share, every_s=EVERY_S * share,
    )  # fmt: skip
    standing = asyncio.create_task(leadership.run())
    supervisor.watch(standing, "the election", may_return=True)
    health.ready = True  # also one that only stands by is as it should be
    try:
        ended = asyncio.create_task(stopping.wait())
        chosen = asyncio.create_task(leadership.acquired.wait())
        await asyncio.wait((ended, chosen), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        chosen.cancel()
        if leadership.acquired.is_set() and not stopping.is_set():
            await _schedule(api, scheduler, options, health, stopping, supervisor)
        return 1 if leadership.lost.is_set() else 0
    finally:
        await leadership.release()
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)


async def _schedule(
    api: Api,
    scheduler: PodSchedulerParts,
    options: Options,
    health: Health,
    stopping: asyncio.Event,
    supervisor: Supervisor,
) -> None:
    if options.words is None:
        scheduler.explainer.words = of_release(await served_minor(api))
    driver = make_driver(api, scheduler, options)
    driver.attendants = attendants_of(api, scheduler, options, driver)
    informers = Informers.of(api, scheduler.pods, scheduler.cache, driver.stir, scheduler.refusals)
    scheduler.metrics.watches = informers
    began = time.monotonic()
    first = asyncio.create_task(informers.start(supervisor))
    ended = asyncio.create_task(stopping.wait())
    try:
        while not first.done() and not ended.done():
            await asyncio.wait((first, ended), timeout=10, return_when=asyncio.FIRST_COMPLETED)
            for problem in informers.problems if not first.done() else ():
                _log.warning("waiting for a first picture of the cluster: %s", problem)
        if stopping.is_set():
            return
        await first
        nodes = len(scheduler.pods.nodes)
        _log.info(
            "schedules pods of %s: %d nodes, %d pods known after %.1f s",
            options.scheduler_name, nodes, len(scheduler.pods.entries), time.monotonic() - began,
        )  # fmt: skip
        health.ready = True
        health.ages = informers.ages

        def troubles() -> list[str]:
            idle_s = time.monotonic() - driver.went_round
            stuck = [f"nothing has been decided for {idle_s:.0f} s"] if idle_s > _STUCK_S else []
            return [*stuck, *informers.stuck(), *([supervisor.failure] if supervisor.failure else [])]

        health.troubles = troubles
        async with attended(driver.attendants, scheduler.metrics.restarted):
            await driver.run(stopping)
    finally:
        for task in (first, ended):
            task.cancel()
        await informers.stop()


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[Api]:
    api = await Api.connect(access, connections=160)
    try:
        yield api
    finally:
        await api.close()


def attendants_of(
    api: Api, scheduler: PodSchedulerParts, options: Options, driver: SchedulerLoop
) -> list[BackgroundTask]:
    """In the order in which they begin: first what is known of the past, then what is kept free, then the rest."""
    controller, pods, clock = scheduler.controller, scheduler.pods, SystemClock()
    out: list[BackgroundTask] = [
        WatchingJobs(api, scheduler.cache, scheduler.refusals, pods.wants_jobs),
        EndedMembersInformer(api, options.scheduler_name, pods.past, pods.has_groups, driver.stir),
        GroupStatusWriter(api, options.scheduler_name, pods, scheduler.cache, time.time),
    ]
    if controller.accounts.sharing is not None and options.usage_configmap:
        only = None if options.scheduling.budgets else frozenset({BILLING})
        namespace = options.namespace or api.namespace or "default"
        out.append(
            UsageStore(
                api, namespace, options.usage_configmap, controller, clock.now_ms, only=only, monotonic=time.monotonic
            )
        )
    forecasting = None
    if options.forecast_annotation:
        from hodei.kube.scheduler.forecasts import PodForecasts  # with all that it takes, which nobody else needs

        forecasting = PodForecasts(api, controller, pods, clock, options.scheduling.forecast)
    if controller.estimator.learns or forecasting is not None:

        def learn(spec: JobSpec, ran_ms: int, ended_ms: int) -> None:
            if controller.estimator.learns:
                pods.give([HistoryRestored(samples=(as_ran(spec, ran_ms),))])
            if forecasting is not None:
                forecasting.learn(spec, ran_ms, ended_ms)

        reader = Reader(scheduler.cache, Reading(LINE, options.one_pod_per_node))
        finished = Finished(api, options.scheduler_name, reader, learn)
        finished.refusals = reader.refusals = scheduler.refusals
        out.append(finished)
    if options.reserved:

        def tell(facts: Sequence[Fact]) -> None:
            pods.give(facts)
            driver.stir()

        out.append(Reservations(options.reserved, controller, pods.take_facts, tell, clock.now_ms, driver.decide))
    if scheduler.timed:
        out.append(QueueStatus(controller, pods, scheduler.explainer, driver.tell, clock.now_ms))
    if forecasting is not None:
        out.append(forecasting)
    return out
