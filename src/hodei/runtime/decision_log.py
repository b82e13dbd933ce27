"""Every step's facts and plan as JSON lines: enough to decide all of it again, and to see whether the plans are the same.

The first line carries the configuration. Each further one: {"now": ms, "facts": [...], "plan": {...}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from hodei.engine.plan import Plan
from hodei.model.config import SchedulingConfig
from hodei.model.facts import Fact

FORMAT = 1


class DecisionLog:
    def __init__(self, path: Path, config: SchedulingConfig, last_event: int) -> None:
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            # A log starts with the world as it was: an old one is kept beside the new.
            path.replace(path.with_name(path.name + ".1"))
        self._file: BinaryIO = path.open("wb")
        path.chmod(0o600)
        self._write({"hodei_decision_log": FORMAT, "config": config, "last_event": last_event})

    def step(self, now_ms: int, facts: Sequence[Fact], plan: Plan) -> None:
        self._write({"now": now_ms, "facts": facts, "plan": plan})

    def flush(self) -> None:
        self._file.flush()

    def _write(self, line: object) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()
