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
from collections.abc import AsyncIterator

from msgspec import Struct

from hodei.kube.api.client import Access, Api
from hodei.kube.api.discovery import served_minor
from hodei.kube.api.lease import EVERY_S, LASTS_S, RENEW_WITHIN_S, Leadership
from hodei.kube.scheduler.background import attendants_of
from hodei.kube.scheduler.background_task import attended
from hodei.kube.scheduler.build import Options, PodSchedulerParts, furnish, make_driver
from hodei.kube.scheduler.http import Health, serving
from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.messages import of_release
from hodei.kube.scheduler.supervisor import Supervisor

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
    stopping, health, house = asyncio.Event(), Health(), furnish(options)
    supervisor = Supervisor(stopping.set)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    health.metrics = house.metrics.written
    health.troubles = lambda: [supervisor.failure] if supervisor.failure else []
    async with serving(health, *listen) as answering, connected(access) as api:
        supervisor.watch(answering, "what answers probes")
        code = 0
        if election is None:
            await _schedule(api, house, options, health, stopping, supervisor)
        else:
            code = await _lead(api, house, options, health, stopping, supervisor, election)
        supervisor.closing = True
    return 1 if supervisor.failure else code


async def _lead(
    api: Api,
    house: PodSchedulerParts,
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
            await _schedule(api, house, options, health, stopping, supervisor)
        return 1 if leadership.lost.is_set() else 0
    finally:
        await leadership.release()
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)


async def _schedule(
    api: Api,
    house: PodSchedulerParts,
    options: Options,
    health: Health,
    stopping: asyncio.Event,
    supervisor: Supervisor,
) -> None:
    if options.words is None:
        house.explaining.words = of_release(await served_minor(api))
    driver = make_driver(api, house, options)
    driver.attendants = attendants_of(api, house, options, driver)
    watching = Informers.of(api, house.pods, house.around, driver.stir, house.refusals)
    house.metrics.watches = watching
    began = time.monotonic()
    first = asyncio.create_task(watching.start(supervisor))
    ended = asyncio.create_task(stopping.wait())
    try:
        while not first.done() and not ended.done():
            await asyncio.wait((first, ended), timeout=10, return_when=asyncio.FIRST_COMPLETED)
            for problem in watching.problems if not first.done() else ():
                _log.warning("waiting for a first picture of the cluster: %s", problem)
        if stopping.is_set():
            return
        await first
        nodes = len(house.pods.nodes)
        _log.info(
            "schedules pods of %s: %d nodes, %d pods known after %.1f s",
            options.scheduler_name, nodes, len(house.pods.entries), time.monotonic() - began,
        )  # fmt: skip
        health.ready = True
        health.ages = watching.ages

        def troubles() -> list[str]:
            idle_s = time.monotonic() - driver.went_round
            stuck = [f"nothing has been decided for {idle_s:.0f} s"] if idle_s > _STUCK_S else []
            return [*stuck, *watching.stuck(), *([supervisor.failure] if supervisor.failure else [])]

        health.troubles = troubles
        async with attended(driver.attendants, house.metrics.restarted):
            await driver.run(stopping)
    finally:
        for task in (first, ended):
            task.cancel()
        await watching.stop()


@contextlib.asynccontextmanager
async def connected(access: Access) -> AsyncIterator[Api]:
    api = await Api.connect(access, connections=160)
    try:
        yield api
    finally:
        await api.close()
