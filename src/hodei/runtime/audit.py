"""The audit does not grow for ever: what is older than it has to be kept is forgotten, a little at a time."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from hodei.model.errors import Unavailable

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.audit")
_EVERY_S = 60.0
_AT_ONCE = 1000


async def forget_old(service: Service, retention_ms: int) -> None:
    while True:
        try:
            await forget_once(service, retention_ms)
        except Unavailable as error:
            log.warning("the audit's retention could not run: %s", error)
        await asyncio.sleep(_EVERY_S)


async def forget_once(service: Service, retention_ms: int) -> int:
    before = service.clock.now_ms() - retention_ms
    gone = 0
    while True:
        now = await service.loop.write(partial(service.store.prune_audit, before_ms=before, limit=_AT_ONCE))
        gone += now
        if now < _AT_ONCE:
            return gone
