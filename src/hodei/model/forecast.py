"""When a job that waits is expected to start."""

from __future__ import annotations

from msgspec import Struct


class Forecast(Struct, frozen=True, array_like=True):
    """Made at `made_ms`: an even chance to start by `p50_ms`, nine in ten to start by `p90_ms`. `reach_ms` is the P90
    before it was stretched by what past forecasts lacked."""

    made_ms: int
    p50_ms: int
    p90_ms: int
    reach_ms: int = 0


class StartForecast(Struct, frozen=True, omit_defaults=True):
    """A forecast as people are told of it: with how many in a hundred of the last `graded` ones were right, which is to say
    that the job had started by its P90."""

    p50_ms: int
    p90_ms: int
    made_ms: int
    right_percent: int = 0
    graded: int = 0
