"""The answer to "what if?": who would start when and where, who would be sent away, and for whom that differs from today."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.ids import JobId, NodeName


class Outlook(Struct, frozen=True, omit_defaults=True):
    """One job. `start_ms` is 0 if no start is in sight, and the present moment if it would start now.
    `before_ms`: the same as things are (0 also for a job that is only thought of)."""

    name: str
    job: JobId = 0
    start_ms: int = 0
    nodes: tuple[NodeName, ...] = ()
    before_ms: int = 0
    before_nodes: tuple[NodeName, ...] = ()


class Evicted(Struct, frozen=True, omit_defaults=True):
    """A job that runs, or would have started before, and would be told to go at `at_ms`: for the sake of `by` (0 and "":
    for nobody's, its node goes). `again_ms`: when it would start again, 0 if that is not in sight."""

    name: str
    at_ms: int
    job: JobId = 0
    by: JobId = 0
    by_name: str = ""
    again_ms: int = 0


class WhatIf(Struct, frozen=True, omit_defaults=True):
    """`jobs` are those that were asked about, in order. `sooner` and `later`: those that wait and would start at another
    time than as things are. `same`: how many would not. `notes`: what the answer does not know."""

    at_ms: int
    jobs: tuple[Outlook, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    sooner: tuple[Outlook, ...] = ()
    later: tuple[Outlook, ...] = ()
    same: int = 0
    notes: tuple[str, ...] = ()
