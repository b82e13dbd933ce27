"""The pulse of one backend: it is asked for a sign of life every so often, and barred while it gives none.

What fails is the backend's own answer to `health`, its silence, or a call that came to nothing (`call_failed`). A backend that is
barred is asked again when the pause of its circuit is over, or at once if it was heard of again (`look_now`); one good
answer, and it counts as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import Struct

from hodei.control.lifecycle.retry import Circuit, CircuitPolicy
from hodei.model.backend import Health
from hodei.ports import Backend, Clock

log = logging.getLogger("hodei.pulse")


class HealthPolicy(Struct, frozen=True):
    every_ms: int = 30_000
    timeout_ms: int = 10_000
    circuit: CircuitPolicy = CircuitPolicy()


class HealthMonitor:
    """`turned` is called when the circuit breaks or is whole again."""

    def __init__(self, backend: Backend, clock: Clock, policy: HealthPolicy, turned: Callable[[], None]) -> None:
        self._backend, self._clock, self._policy, self._turned = backend, clock, policy, turned
        self.circuit = Circuit(policy.circuit)
        self.last: Health | None = None
        self.at_ms = 0
        self._calls_in_vain = 0
        self._now = asyncio.Event()

    async def run(self) -> None:
        while True:
            now_ms = self._clock.now_ms()
            pause_ms = max(self.circuit.next_ms(now_ms, self._policy.every_ms) - now_ms, 100)
            try:
                await asyncio.wait_for(self._now.wait(), pause_ms / 1000)
            except TimeoutError:
                pass
            self._now.clear()
            await self.beat()

    def look_now(self) -> None:
        """It has come back from an outage: do not wait for the end of a pause that was meant for one that is away."""
        self._now.set()

    async def beat(self) -> Health:
        """Ask once, within the time there is for it."""
        timeout_ms = self._policy.timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                health = await self._backend.health()
        except TimeoutError:
            health = Health(False, f"no answer within {timeout_ms / 1000:g} s", timeout_ms)
        except Exception as error:  # it never should: a backend that does is not well
            health = Health(False, str(error) or type(error).__name__)
        self.last, self.at_ms = health, self._clock.now_ms()
        if not health.ok:
            self._failed(health.text)
        elif self.circuit.state(self.at_ms) == "half-open" or not self._calls_in_vain:
            self._mended()
        return health

    def call_failed(self, text: str) -> None:
        """Whatever it says of its health, it did not do what it was asked to."""
        self._calls_in_vain += 1
        self._failed(text)

    def call_went_well(self) -> None:
        """After one or more that did not."""
        self._mended()

    def _failed(self, text: str) -> None:
        if self.circuit.failed(self._clock.now_ms(), text):
            log.warning("backend %s is not well: %s", self._backend.name, text)
            self._turned()

    def _mended(self) -> None:
        self._calls_in_vain = 0
        if self.circuit.succeeded():
            log.warning("backend %s is well again", self._backend.name)
            self._turned()
