"""A question to `POST /whatif`; the answer is `hodei.model.whatif.WhatIf` as it is."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.config import SchedulingConfig


class WhatIfRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be different; any of these, also together. `jobs`: job documents that would be submitted now.
    `policy`: a `scheduling` section in place of the server's own. `add_nodes`: so many more nodes, copies of `like` (or
    of the largest). `remove_nodes`: nodes whose work moves elsewhere and that take no more."""

    jobs: list[dict[str, Any]] = []
    policy: SchedulingConfig | None = None
    add_nodes: int = 0
    like: str = ""
    remove_nodes: list[str] = []
