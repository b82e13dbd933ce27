"""How many cases each property tries: a fraction by default, all of them with HODEI_EXAMPLES=100 (`make test-all`)."""

from __future__ import annotations

import os

from hypothesis import settings

PERCENT = int(os.environ.get("HODEI_EXAMPLES", "25"))


def examples(count: int) -> settings:
    return settings(max_examples=max(count * PERCENT // 100, 10), deadline=None)
