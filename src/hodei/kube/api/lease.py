"""Leader election with a Lease, which is only written over the version that was read.

Clocks of two machines are never compared: a lease has expired when this process has seen it unchanged for its whole duration,
by its own monotonic clock. A leader that cannot renew gives up (`lost`) before another may take over.
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
    """One candidate. `run` takes part in the election until the lead is lost or released; the object cannot be used again.

    `acquired` is set when this process leads. `lost` is set when it does not lead any more, also after `release`: it must stop acting as
    the leader at once. The next leader starts `lease_s - renew_within_s` seconds later at the earliest.
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
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        """`identity` must be unique, also across restarts on one host. `now` is only written, never compared."""
        self.acquired = asyncio.Event()
        self.lost = asyncio.Event()
        self.holder = ""
        self.problem = ""
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._on_lost = on_lost
        self._lease_s, self._renew_within_s, self._renew_every_s = lease_s, renew_within_s, renew_every_s
        self._monotonic, self._now, self._sleep, self._random_fraction = monotonic, now, sleep, random_fraction
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._lease: dict[str, Any] | None = None
        self._observed: tuple[str, str] = ("", "")
        self._observed_at = self._held_until = 0.0
        self._writing = asyncio.Lock()
        self._released = False

    @property
    def leads(self) -> bool:
        return self.acquired.is_set() and not self.lost.is_set()

    async def run(self) -> None:
        while not self._released and not await self._attempt(self._acquire):
            # Candidates that wait in step would collide in step.
            await self._sleep(self._renew_every_s * (1 + 0.2 * self._random_fraction()))
        if self._released:
            return
        _log.info("%s holds the lease %s/%s and leads", self._identity, self._namespace, self._name)
        self.acquired.set()
        await self._renew_until_lost()

    async def release(self) -> None:
        """Release the lease so that another can take it at once, or leave the election. Never raises ApiError."""
        self._released = True
        was_leader = self.leads
        self._lose("it was released")
        if not was_leader:
            return
        async with self._writing:
            try:
                async with asyncio.timeout(self._renew_within_s):
                    await self._write("", lease_s=1)
            except (ApiError, TimeoutError) as error:
                _log.warning("The lease %s could not be released and will expire: %s", self._name, error)

    async def _renew_until_lost(self) -> None:
        renewed = self._monotonic()
        while self.leads:
            await self._sleep(self._renew_every_s)
            if not self.leads:
                return
            remaining_s = renewed + self._renew_within_s - self._monotonic()
            began = self._monotonic()
            try:
                async with asyncio.timeout(max(remaining_s, 0.01)):
                    renewed_now = await self._attempt(self._renew)
            except TimeoutError:
                renewed_now = None
            if renewed_now:
                renewed = began  # the time of the request, not of the response: others count from before that
            elif renewed_now is False and self.leads:
                self._lose(f"{self.holder or 'another process'} holds it")
            elif self._monotonic() - renewed >= self._renew_within_s:
                self._lose(f"it could not be renewed for {self._renew_within_s:g} s: {self.problem}")

    def _lose(self, why: str) -> None:
        if not self.leads:
            return
        _log.warning("%s has lost the lease %s/%s: %s", self._identity, self._namespace, self._name, why)
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost()

    async def _attempt(self, step: Callable[[], Awaitable[bool]]) -> bool | None:
        """True: this process holds it. False: another does. None: unknown."""
        async with self._writing:
            if self._released:
                return None
            try:
                ours = await step()
            except ApiError as error:
                if error.status == 409:
                    return None if self.leads else False  # written by another in between: read it first
                self.problem = f"{error.message} {error.hint}".strip()
                if error.status in (401, 403):
                    _log.warning("The lease %s/%s: %s", self._namespace, self._name, self.problem)
                return None
            except Exception as error:  # a malformed lease must not end the election
                self.problem = (
                    f"The lease {self._namespace}/{self._name} cannot be read: {type(error).__name__}: {error}"
                )
                _log.warning("%s", self.problem)
                return None
            self.problem = ""
            return ours

    async def _acquire(self) -> bool:
        if not await self._read():
            if self._monotonic() < self._held_until:
                return False  # deleted; its holder may still lead, and creates it again
            await self._create()
            return True
        if self.holder not in ("", self._identity):
            self._held_until = self._observed_at + self._holder_lease_s()
            if self._monotonic() < self._held_until:
                return False
        await self._write(self._identity, lease_s=self._lease_s)
        return True

    async def _create(self) -> None:
        """ApiError 409 if it exists."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                **self._holder_fields(self._identity, self._lease_s),
                "acquireTime": self._timestamp(),
                "leaseTransitions": 0,
            },
        }
        answer = await self._api.request("POST", self._collection, msgspec.json.encode(body), timeout_s=5)
        self._lease, self.holder = msgspec.json.decode(answer), self._identity

    async def _renew(self) -> bool:
        """Write over the last version; read it first only if it has changed."""
        try:
            await self._write(self._identity, lease_s=self._lease_s)
            return True
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        if not await self._read():
            _log.warning("The lease %s/%s was deleted; it is created again", self._namespace, self._name)
            await self._create()  # 409: another was faster, and the next attempt shows who
            return True
        if self.holder != self._identity:
            return False
        await self._write(self._identity, lease_s=self._lease_s)
        return True

    async def _read(self) -> bool:
        """False if it does not exist."""
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
        observed = (lease["metadata"]["uid"], lease["metadata"]["resourceVersion"])
        if observed != self._observed:
            self._observed, self._observed_at = observed, self._monotonic()
        return True

    def _holder_lease_s(self) -> float:
        spec = (self._lease or {}).get("spec") or {}
        return float(spec.get("leaseDurationSeconds") or self._lease_s)

    async def _write(self, holder: str, *, lease_s: int) -> None:
        """Write over the last version that was read or written: 409 if it has changed."""
        assert self._lease is not None
        spec = dict(self._lease.get("spec") or {})
        if holder and holder != (spec.get("holderIdentity") or ""):
            spec["acquireTime"] = self._timestamp()
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        body = {**self._lease, "spec": {**spec, **self._holder_fields(holder, lease_s)}}
        answer = await self._api.request(
            "PUT", f"{self._collection}/{self._name}", msgspec.json.encode(body), timeout_s=5
        )
        self._lease, self.holder = msgspec.json.decode(answer), holder

    def _holder_fields(self, holder: str, lease_s: int) -> dict[str, Any]:
        return {"holderIdentity": holder, "leaseDurationSeconds": lease_s, "renewTime": self._timestamp()}

    def _timestamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
