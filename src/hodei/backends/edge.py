"""Kind `edge`: devices that run the agent and may be offline for hours.

Work on a device goes on while it is offline, and its ends and logs arrive when it is back. A profile says what a kind of
device is like; a device chooses it with the label `hodei.io/profile` when it joins.
"""

from __future__ import annotations

import asyncio

from msgspec import Struct, structs

from hodei.backends.base import BackendContext
from hodei.backends.remote.backend import AgentBackend, AgentNode, Patience
from hodei.backends.remote.registry import JoinedNode
from hodei.model.config import Duration, Span
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node, Taint
from hodei.model.resources import parse_duration_ms, parse_quantity
from hodei.ports import Stream

PROFILE_LABEL = "hodei.io/profile"
BATTERY, METERED = Taint("hodei.io/battery", "", "PreferNoSchedule"), Taint("hodei.io/metered", "", "PreferNoSchedule")
# A part of a log that is read at once, so that a slow link is not taken by one reader.
_MAX_PART = 256 << 10


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """`battery` and `metered` become taints that keep work away unless nothing else takes it, or it tolerates them. `data`:
    data sets that live on such devices. `log_rate`: bytes of logs per second that are fetched from one device; 0: no limit.
    """

    labels: dict[str, str] = {}
    data: tuple[str, ...] = ()
    battery: bool = False
    metered: bool = False
    offline_ok: Duration = "24h"
    log_rate: str | int = "256Ki"


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`lost_after` 0s: runs on a silent device are never given up."""

    away_after: Span = "2m"
    lost_after: Duration = "0s"
    profiles: dict[str, Profile] = {}


class EdgeBackend(AgentBackend):
    kind = "edge"
    capabilities = structs.replace(AgentBackend.capabilities, offline=True)

    def __init__(self, name: str, context: BackendContext, patience: Patience, profiles: dict[str, Profile]) -> None:
        super().__init__(name, context, patience)
        self._profiles = {"": Profile(), **profiles}
        self._offline_ok_ms = {key: parse_duration_ms(one.offline_ok) for key, one in self._profiles.items()}
        self._log_rate = {key: parse_quantity(one.log_rate) for key, one in self._profiles.items()}
        self._next_read_s: dict[NodeName, float] = {}

    def _profile_of(self, joined: JoinedNode) -> str:
        """Its name; "" if the device names none, or one that is not configured."""
        name = joined.labels.get(PROFILE_LABEL, "")
        return name if name in self._profiles else ""

    def offline_ok_ms(self, joined: JoinedNode) -> int:
        return joined.offline_ok_ms or self._offline_ok_ms[self._profile_of(joined)]

    def node_of(self, node: AgentNode) -> Node:
        found, profile = super().node_of(node), self._profiles[self._profile_of(node.joined)]
        flags = [taint for taint, set_ in ((BATTERY, profile.battery), (METERED, profile.metered)) if set_]
        given = {taint.key for taint in found.taints}
        return structs.replace(
            found,
            labels={**profile.labels, **found.labels},
            taints=(*found.taints, *(taint for taint in flags if taint.key not in given)),
            data=profile.data,
        )

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        """At most `log_rate` bytes per second from one device."""
        node = self._nodes.get(self._location.get(run, ""))
        rate = self._log_rate[self._profile_of(node.joined)] if node is not None else 0
        if node is None or not rate:
            return await super().logs(run, stream, offset, limit)
        now_s = self._now_s()
        turn_s = max(self._next_read_s.get(node.name, 0.0), now_s)
        part = min(limit, _MAX_PART, max(rate, 1024))
        self._next_read_s[node.name] = turn_s + part / rate
        await asyncio.sleep(turn_s - now_s)
        data, after = await super().logs(run, stream, offset, part)
        # What was not there costs nothing.
        self._next_read_s[node.name] -= (part - len(data)) / rate
        return data, after


def make(name: str, settings: Settings, context: BackendContext) -> EdgeBackend:
    for key, profile in settings.profiles.items():
        try:
            parse_duration_ms(profile.offline_ok)
            parse_quantity(profile.log_rate)
        except InvalidInput as error:
            raise InvalidInput(f"backends.{name}.profiles.{key}: {error.message}", hint=error.hint) from None
        if not key or len(key) > 63:
            raise InvalidInput(f"backends.{name}.profiles: {key[:80]!r} is not a name for a profile")
    patience = Patience(parse_duration_ms(settings.away_after), parse_duration_ms(settings.lost_after))
    return EdgeBackend(name, context, patience, settings.profiles)
