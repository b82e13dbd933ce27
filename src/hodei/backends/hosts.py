"""Kind `hosts`: any machine that runs the agent and dials out to this server."""

from __future__ import annotations

from msgspec import Struct

from hodei.backends.base import BackendContext
from hodei.backends.remote.backend import AgentBackend, Patience
from hodei.model.config import Duration, Span
from hodei.model.resources import parse_duration_ms


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`away_after`: a silent node is not ready. `lost_after`: its runs are given up; 0s for never."""

    away_after: Span = "60s"
    lost_after: Duration = "10m"


class HostsBackend(AgentBackend):
    kind = "hosts"


def make(name: str, settings: Settings, context: BackendContext) -> HostsBackend:
    patience = Patience(parse_duration_ms(settings.away_after), parse_duration_ms(settings.lost_after))
    return HostsBackend(name, context, patience)
