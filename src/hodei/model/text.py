"""Words for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'memory'?)`, or nothing when nothing is near."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
