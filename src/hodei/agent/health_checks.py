"""Is a run that lives also well? Looks at it now and then, and has it stopped when too many looks in a row say no."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hodei.agent import proc
from hodei.agent.exec import HEALTH
from hodei.agent.health import Health, get_status
from hodei.agent.probes import Seen
from hodei.agent.run import Run

if TYPE_CHECKING:
    from hodei.agent.runs import Runs


class HealthChecks:
    """Looks at all runs in the table of `runs` that asked for it."""

    def __init__(self, runs: Runs) -> None:
        self._runs, self._loop = runs, runs.loop
        self._calls: set[asyncio.Task[None]] = set()

    def watch(self, run: Run) -> None:
        """Begin with a run that has just been born, or go on with one of an agent before us."""
        if run.health is not None:
            begin_ms = run.started_boot_ms + run.health.after_ms + run.health.every_ms - proc.boot_clock_ms()
            self._runs.later(run, max(begin_ms, 0) / 1000, self._look)

    def _look(self, run: Run) -> None:
        health = run.health
        if health is None or run.end is not None or run.stop_code:
            return
        if health.command:
            try:
                self._runs.beside.start(
                    run, HEALTH, health.command, health.timeout_ms, lambda error: self._seen(run, error), quiet=True
                )
            except (OSError, ValueError) as error:
                self._seen(run, f"it could not be started: {error}")
        elif health.http:
            call = self._loop.create_task(self._call(run, health))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        else:
            self._look_at_file(run, health)

    def _look_at_file(self, run: Run, health: Health) -> None:
        answered = False

        def answer(seen: Seen | None) -> None:
            nonlocal answered
            if answered:
                return
            answered = True
            if seen is None:
                self._seen(run, f"there is no file {health.file}")
            elif seen == run.heartbeat:
                self._seen(run, f"{health.file} has not changed for {health.every_ms / 1000:g}s")
            else:
                run.heartbeat = seen
                self._seen(run, "")

        def too_late(_: Run) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._seen(run, f"its disk did not answer within {health.timeout_ms / 1000:g}s")

        self._runs.looks.ask(health.file, answer)
        self._runs.later(run, health.timeout_ms / 1000, too_late)

    async def _call(self, run: Run, health: Health) -> None:
        try:
            async with asyncio.timeout(health.timeout_ms / 1000):
                status = await get_status(health.http)
        except TimeoutError:
            self._seen(run, f"no answer within {health.timeout_ms / 1000:g}s")
        except (OSError, ValueError) as error:
            self._seen(run, f"no answer: {error}")
        else:
            self._seen(run, "" if 200 <= status < 400 else f"status {status}")

    def _seen(self, run: Run, error: str) -> None:
        """One look is over: count, tell if that is news, and look again or give it up."""
        health = run.health
        if health is None or run.end is not None or run.stop_code:
            return
        run.health_failures = run.health_failures + 1 if error else 0
        state = "failing" if error else "ok"
        if state != run.health_state:
            run.health_state = state
            self._runs.report(run)
        if run.health_failures >= health.failures:
            times = f"{run.health_failures} times in a row" if run.health_failures > 1 else "once"
            self._runs.stops.order(run, "unhealthy", f"its health check failed {times}: {error}", run.grace_ms)
        else:
            self._runs.later(run, health.every_ms / 1000, self._look)
