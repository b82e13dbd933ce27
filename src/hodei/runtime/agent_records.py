"""Keeps the credentials of joined agents in the store."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from hodei.model.effects import SaveValue
from hodei.model.facts import EventNoted
from hodei.runtime.rights import CALLER

if TYPE_CHECKING:
    from hodei.ports import Store
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.agents")
NOTE = "agents"


def load_agents(store: Store) -> str:
    """The stored note; "" if there is none, or it is damaged."""
    text = store.note(NOTE)
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.MsgspecError as error:
        log.error("the record of joined agents is damaged and set aside; they have to join again: %s", error)
        store.mark_suspect("note", NOTE, str(error))
        return ""
    return text


async def commit_agents(service: Service, kind: str, detail: dict[str, Any], body: str) -> None:
    """Durable on return. What an agent changes of itself needs no role; its audit row is part of the commit."""
    caller = CALLER.get()
    event, saves = EventNoted(kind, detail=detail), [SaveValue(NOTE, body)]
    if caller is None or caller.entry.role == "admin":
        await service.loop.commit([event], saves, wait_for_store=True)
        return
    rows = caller.record([event], saves) if caller.entry.verb in ("agent.enrol", "agent.rotate") else ()
    before = CALLER.set(None)
    try:
        await service.loop.commit([event], [*saves, *rows], wait_for_store=True)
    finally:
        CALLER.reset(before)
