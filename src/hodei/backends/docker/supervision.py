"""What is done about a run while it runs: its time limit, its checkpoints in between, looks whether it is well or idle.

Health checks by a command are the host's own doing (its `health_status` events). Only runs that ask for anything here have
a task of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp

from hodei.backends.docker.engine import DaemonError
from hodei.backends.docker.run_table import Tracked
from hodei.backends.docker.states import moment_ms
from hodei.backends.docker.usage import cpu_ns, last_word
from hodei.model.errors import BackendError
from hodei.model.health import HealthCheck, HealthState

if TYPE_CHECKING:
    from hodei.backends.docker.host import DockerHost

FILE_LOOK_S = 5.0
SHORTEST_LOOK_S, LONGEST_LOOK_S = 1.0, 15.0
# Less than one part in so many of a core is idle.
BUSY_PART = 100

Stop = Callable[[Tracked, str, str], None]


def begin(host: DockerHost, tracked: Tracked, now_ms: int) -> None:
    """The run has been seen running: set up what its order asks for, from where its clock stands."""
    care = tracked.care
    ran_s = max(0, now_ms - tracked.started_ms) / 1000
    if care.timeout_ms:
        host.spawn(tracked, _limit(host, tracked, care.timeout_ms / 1000 - ran_s))
    if care.checkpoint_file:
        host.spawn(tracked, _watch_file(host, tracked))
    if care.save is not None and care.save.every_ms:
        host.spawn(tracked, _save_now_and_then(host, tracked, care.save.every_ms / 1000))
    if care.health is not None:
        host.spawn(tracked, _look_after(host, tracked, care.health, ran_s))
    if care.idle_ms:
        host.spawn(tracked, _end_if_idle(host, tracked, care.idle_ms / 1000))


async def _limit(host: DockerHost, tracked: Tracked, left_s: float) -> None:
    await asyncio.sleep(max(left_s, 0))
    host.stop(tracked, "timeout", f"it ran longer than {tracked.care.timeout_ms / 1000:g} s")


async def _watch_file(host: DockerHost, tracked: Tracked) -> None:
    last = ""
    while True:
        await asyncio.sleep(FILE_LOOK_S)
        try:
            seen = await host.stops.look(tracked)
        except BackendError:
            continue
        if seen and seen != last:
            last = seen
            host.saved(tracked, moment_ms(seen, host.skew_ms))


async def _save_now_and_then(host: DockerHost, tracked: Tracked, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        if tracked.stopping is not None:
            return
        if tracked.care.save is not None:
            await host.save(tracked, tracked.care.save)


async def _look_after(host: DockerHost, tracked: Tracked, health: HealthCheck, ran_s: float) -> None:
    """By an address, or by the heartbeat of a file."""
    await asyncio.sleep(max(health.after_ms / 1000 - ran_s, 0))
    failures, beat = 0, ""
    while tracked.stopping is None:
        await asyncio.sleep(health.every_ms / 1000)
        try:
            if health.http:
                well = await _answers(health)
            else:
                seen = await host.stops.changed(tracked, health.file)
                well, beat = bool(seen) and seen != beat, seen
        except BackendError:
            continue  # the host is silent, which says nothing of the run
        failures = 0 if well else failures + 1
        state: HealthState = "ok" if well else "failing"
        host.health_seen(tracked, state)
        if failures >= health.failures:
            host.stop(tracked, "unhealthy", f"its health check failed {failures} times in a row")
            return


async def _answers(health: HealthCheck) -> bool:
    bound = aiohttp.ClientTimeout(total=health.timeout_ms / 1000)
    try:
        async with (
            aiohttp.ClientSession(timeout=bound) as session,
            session.get(health.http, allow_redirects=False) as response,
        ):
            return 200 <= response.status <= 399
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return False


async def _end_if_idle(host: DockerHost, tracked: Tracked, idle_s: float) -> None:
    """Quiet: hardly any processor, and not a word said."""
    every_s = min(max(idle_s / 10, SHORTEST_LOOK_S), LONGEST_LOOK_S)
    quiet_s, before_ns, said = 0.0, -1, ""
    while tracked.stopping is None:
        await asyncio.sleep(every_s)
        try:
            used_ns = await cpu_ns(host.engine, tracked.container)
            word = await last_word(host.engine, tracked.container)
        except DaemonError:
            continue
        busy = before_ns < 0 or used_ns - before_ns > every_s * 1e9 / BUSY_PART or word != said
        quiet_s = 0.0 if busy else quiet_s + every_s
        before_ns, said = used_ns, word
        if quiet_s >= idle_s:
            host.stop(tracked, "idle", f"it did nothing for {idle_s:g} s")
            return
