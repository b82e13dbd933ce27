"""What a job says for the case that it waits too long. What becomes of it: `model.escalation_state`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Wish = Literal["spread", "topology", "backend"]
WISHES: tuple[Wish, ...] = ("spread", "topology", "backend")


class Escalation(Struct, frozen=True, omit_defaults=True):
    """After `relax_after_ms` of waiting its rules named in `relax` count as wishes; after every `promote_after_ms` it goes
    up one class, as far as `promote_to`. What is 0 or empty is as the profile says."""

    relax: tuple[Wish, ...] = ()
    relax_after_ms: int = 0
    promote_after_ms: int = 0
    promote_to: int = 0
