"""Who leads: one of several equal processes, by a Lease that is written only over the version that was read.

Clocks of two machines are never compared: a lease has run out when *we* have seen it unchanged for as long as it lasts, by our
own monotonic clock. A leader that could not renew steps down (`lost`) before anybody else may take over.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hodei.kube.api.client import Api, ApiError

_log = logging.getLogger(__name__)

LEASE_S, RENEW_WITHIN_S, RENEW_EVERY_S = 15, 10.0, 2.0


def _utc() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time.time(), datetime.UTC)


class Leadership:
    """One contender. `run` stands for election until the lead is lost or released; then this object is spent.

    `acquired` is set when we lead. `lost` is set when we led and do not any more, also after `release`: whoever acts as the leader
    must have stopped when it is set, and there are `lasts_s - renew_within_s` seconds between it and the next leader's start.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        *,
        on_lost: Callable[[], None] | None = None,
        lease_s: int = LEASE_S,
        renew_within_s: float = RENEW_WITHIN_S,
        renew_every_s: float = RENEW_EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = _utc,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`identity` must differ between contenders, also between two lives on one host. `now` is written down, never read."""
        self.acquired = asyncio.Event()
        self.lost = asyncio.Event()
        self.holder = ""
        self.problem = ""
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._on_lost = on_lost
        self._lease_s, self._renew_within_s, self._renew_every_s = lease_s, renew_within_s, renew_every_s
        self._monotonic, self._now, self._sleep, self._chance = monotonic, now, sleep, chance
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._lease: dict[str, Any] | None = None
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = self._anothers_until = 0.0
        self._writing = asyncio.Lock()
        self._released = False

    @property
    def leads(self) -> bool:
        return self.acquired.is_set() and not self.lost.is_set()

    async def run(self) -> None:
        while not self._released and not await self._try(self._take):
            # Contenders that wait in step would collide in step.
            await self._sleep(self._renew_every_s * (1 + 0.2 * self._chance()))
        if self._released:
            return
        _log.info("%s leads by the lease %s/%s", self._identity, self._namespace, self._name)
        self.acquired.set()
        await self._keep()

    async def release(self) -> None:
        """Gives the lead back so that the next may have it at once, or stops standing for it. Never raises ApiError."""
        self._released = True
        led = self.leads
        self._step_down("it was given back")
        if not led:
            return
        async with self._writing:
            try:
                async with asyncio.timeout(self._renew_within_s):
                    await self._write("", lease_s=1)
            except (ApiError, TimeoutError) as error:
                _log.warning("The lease %s could not be given back and will run out by itself: %s", self._name, error)

    # ---------------------------------------------------------------------------------------- leading

    async def _keep(self) -> None:
        renewed = self._monotonic()
        while self.leads:
            await self._sleep(self._renew_every_s)
            if not self.leads:
                return
            left = renewed + self._renew_within_s - self._monotonic()
            began = self._monotonic()
            try:
                async with asyncio.timeout(max(left, 0.01)):
                    kept = await self._try(self._renew)
            except TimeoutError:
                kept = None
            if kept:
                renewed = began  # when it was asked for, not when it was answered: the others count from before that
            elif kept is False and self.leads:
                self._step_down(f"{self.holder or 'somebody'} holds it")
            elif self._monotonic() - renewed >= self._renew_within_s:
                self._step_down(f"it could not be renewed for {self._renew_within_s:g} s: {self.problem}")

    def _step_down(self, why: str) -> None:
        if not self.leads:
            return
        _log.warning("%s leads no more by the lease %s/%s: %s", self._identity, self._namespace, self._name, why)
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost()

    # ---------------------------------------------------------------------------------------- the lease

    async def _try(self, step: Callable[[], Awaitable[bool]]) -> bool | None:
        """True: it is ours. False: it is another's. None: not known."""
        async with self._writing:
            if self._released:
                return None
            try:
                ours = await step()
            except ApiError as error:
                if error.status == 409:
                    return None if self.leads else False  # somebody wrote in between: read before judging
                self.problem = f"{error.message} {error.hint}".strip()
                if error.status in (401, 403):
                    _log.warning("The lease %s/%s: %s", self._namespace, self._name, self.problem)
                return None
            except Exception as error:  # a lease that says what no lease says; the election goes on
                self.problem = (
                    f"The lease {self._namespace}/{self._name} cannot be read: {type(error).__name__}: {error}"
                )
                _log.warning("%s", self.problem)
                return None
            self.problem = ""
            return ours

    async def _take(self) -> bool:
        if not await self._read():
            if self._monotonic() < self._anothers_until:
                return False  # somebody deleted it; its leader may lead still, and makes it anew
            await self._make()
            return True
        if self.holder not in ("", self._identity):
            self._anothers_until = self._seen_at + self._their_time()
            if self._monotonic() < self._anothers_until:
                return False
        await self._write(self._identity, lease_s=self._lease_s)
        return True

    async def _make(self) -> None:
        """409 if there is one."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                **self._claim(self._identity, self._lease_s),
                "acquireTime": self._stamp(),
                "leaseTransitions": 0,
            },
        }
        answer = await self._api.request("POST", self._collection, msgspec.json.encode(body), timeout_s=5)
        self._lease, self.holder = msgspec.json.decode(answer), self._identity

    async def _renew(self) -> bool:
        """Over the version that we wrote last; only if that is not the newest any more it is read first."""
        try:
            await self._write(self._identity, lease_s=self._lease_s)
            return True
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        if not await self._read():
            _log.warning("The lease %s/%s was deleted; it is made again", self._namespace, self._name)
            await self._make()  # 409: another was quicker, and the next look tells who
            return True
        if self.holder != self._identity:
            return False
        await self._write(self._identity, lease_s=self._lease_s)
        return True

    async def _read(self) -> bool:
        """Looks at it; False if there is none."""
        try:
            lease = msgspec.json.decode(await self._api.request("GET", f"{self._collection}/{self._name}", timeout_s=5))
        except ApiError as error:
            if error.status != 404:
                raise
            self._lease, self.holder = None, ""
            return False
        self._lease = lease
        spec = lease.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        seen = (lease["metadata"]["uid"], lease["metadata"]["resourceVersion"])
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._monotonic()
        return True

    def _their_time(self) -> float:
        spec = (self._lease or {}).get("spec") or {}
        return float(spec.get("leaseDurationSeconds") or self._lease_s)

    async def _write(self, holder: str, *, lease_s: int) -> None:
        """Over the version that was read or written last: 409 if that is not the newest."""
        assert self._lease is not None
        spec = dict(self._lease.get("spec") or {})
        if holder and holder != (spec.get("holderIdentity") or ""):
            spec["acquireTime"] = self._stamp()
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        body = {**self._lease, "spec": {**spec, **self._claim(holder, lease_s)}}
        answer = await self._api.request(
            "PUT", f"{self._collection}/{self._name}", msgspec.json.encode(body), timeout_s=5
        )
        self._lease, self.holder = msgspec.json.decode(answer), holder

    def _claim(self, holder: str, lease_s: int) -> dict[str, Any]:
        return {"holderIdentity": holder, "leaseDurationSeconds": lease_s, "renewTime": self._stamp()}

    def _stamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
