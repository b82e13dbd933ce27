"""Plans capacity in the background, in a forked child that sees the controller as it is at the fork."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from hodei.control.capacity.planner import plan_capacity
from hodei.control.controller import Controller
from hodei.model.capacity import CapacityPlan
from hodei.model.errors import Unavailable
from hodei.model.facts import CapacityPlanned, Fact
from hodei.ports import Clock
from hodei.runtime.fork_worker import ForkWorker

log = logging.getLogger("hodei.capacity")
# A plan uses at most this much time; what it has found by then is ordered, and the next plan continues.
_LIMIT_S = 20.0
_NICE = 5


class CapacityTask:
    def __init__(self, controller: Controller, clock: Clock, enqueue: Callable[[Sequence[Fact]], None]) -> None:
        self._controller, self._clock, self._enqueue = controller, clock, enqueue
        self._worker = ForkWorker(1, nice=_NICE, limit_s=2 * _LIMIT_S)

    def close(self) -> None:
        self._worker.close()

    async def run(self) -> None:
        """Plans at its interval, forever, if there is anything to order or to release."""
        while True:
            policy = self._controller.scaling.policy
            await asyncio.sleep(policy.interval_ms / 1000)
            if not policy.enabled or not self._controller.scaling.offers_nodes:
                continue
            try:
                plan = await self._worker.run(self._plan)
            except Unavailable as error:
                log.warning("no capacity plan: %s", error)
                continue
            except Exception:
                log.exception("planning of capacity failed; next try in %g s", policy.interval_ms / 1000)
                continue
            if not self._controller.scaling.is_known(plan):
                self._enqueue([CapacityPlanned(plan)])

    def _plan(self) -> CapacityPlan:
        ends_s = time.monotonic() + _LIMIT_S
        return plan_capacity(self._controller, self._clock.now_ms(), lambda: time.monotonic() < ends_s)
