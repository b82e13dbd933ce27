"""Live usage of running runs: the response of `GET /usage`."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.accounting import CostRow


class RunUsageRow(Struct, frozen=True):
    """A running run. `cpu_milli`: cores in use since the previous measurement (at least 2 s ago), in thousandths; on
    average since its start without one. `peak_memory`, `read_bytes`, `write_bytes`: in bytes, since its start. null is
    unknown. Percentages are of the request; a request of 0 means none."""

    run: str
    job: int
    name: str
    project: str
    user: str
    node: str
    backend: str
    started_at: str
    cpu_milli: int | None = None
    cpu_request: int = 0
    cpu_percent: int | None = None
    peak_memory: int | None = None
    memory_request: int = 0
    memory_percent: int | None = None
    cpu_ms: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None


class CostList(Struct, frozen=True):
    """Costs from `since` to `until`, by the prices of the nodes."""

    since: str
    until: str
    rows: list[CostRow]


class RunUsageList(Struct, frozen=True):
    """One page, the largest usage first, unknown usage last. The next page has `after=next_after`; 0 at the end. Usage
    changes between pages, so a run may appear on two of them, or on none."""

    runs: list[RunUsageRow]
    next_after: int = 0
