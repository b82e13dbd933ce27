"""How it is known that a run which lives is also well: one way to look, how often, and when it is given up."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# A host in a health check's address that stands for the node on which the run is.
NODE_HOST = "node"
HealthState = Literal["", "ok", "failing"]


class HealthCheck(Struct, frozen=True, omit_defaults=True):
    """Exactly one of `command` (exit code 0 is well), `http` (any status from 200 to 399) and `file` (a heartbeat: its
    time of change moves on from look to look) is set; none of them: nobody looks.

    `after_ms` from the start on a look every `every_ms`, the first one `every_ms` later; one that takes longer than
    `timeout_ms` has failed. After so many `failures` in a row the run is stopped.
    """

    command: tuple[str, ...] = ()
    http: str = ""
    file: str = ""
    every_ms: int = 30_000
    timeout_ms: int = 5_000
    after_ms: int = 0
    failures: int = 3

    @property
    def wanted(self) -> bool:
        return bool(self.command or self.http or self.file)
