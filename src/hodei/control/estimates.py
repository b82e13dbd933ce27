"""How long jobs run: by what their users say, or by how long such jobs ran before.

What is learned orders and forecasts; it never loosens a bound. Whoever said how long a job takes at most is taken at
their word where others rely on it (see docs/adr on estimates). Only a job of which nobody said anything is bound by
the longest that its like have taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator

from hodei.model.errors import InvalidInput
from hodei.model.estimate import Estimate, RuntimeSample, Source, name_pattern, request_shape
from hodei.model.job import JobSpec

# So many kinds of jobs are remembered; the one that was not seen for longest is forgotten first.
_KINDS_KEPT = 100_000
# Fewer runs than these tell nothing; of exactly the same work fewer are needed.
_ENOUGH = (2, 3, 3, 3)


class UserEstimates:
    """What the user said: the estimate, else the timeout."""

    learns = False

    def estimate(self, spec: JobSpec) -> Estimate:
        said_ms = spec.estimate_ms or spec.timeout_ms
        source: Source = "user" if spec.estimate_ms else "timeout" if said_ms else ""
        return Estimate(said_ms, said_ms, source)

    def learn(self, ran: RuntimeSample) -> None:
        pass


class LearnedEstimates:
    """A quantile of the last `window` run times of the most specific kind that has been seen often enough: the same
    project, user, name and shape; the same but for the shape; the same but for the name; any work of that user there."""

    learns = True

    def __init__(self, percent: int = 75, window: int = 20) -> None:
        if not 1 <= percent <= 100:
            raise InvalidInput(f"a quantile of {percent}", hint="a whole number from 1 to 100")
        if not 2 <= window <= 1000:
            raise InvalidInput(f"a window of {window} runs", hint="a whole number from 2 to 1000")
        self._percent, self._window = percent, window
        self._said = UserEstimates()
        self._seen: dict[Hashable, deque[int]] = {}

    def estimate(self, spec: JobSpec) -> Estimate:
        said = self._said.estimate(spec)
        for key, enough in zip(
            _kinds(spec.project, spec.user, name_pattern(spec), request_shape(spec)), _ENOUGH, strict=True
        ):
            seen = self._seen.get(key)
            if seen is not None and len(seen) >= min(enough, self._window):
                break
        else:
            return said
        times = sorted(seen)
        guess_ms = times[-(-len(times) * self._percent // 100) - 1]
        limit_ms = said.limit_ms or times[-1]
        return Estimate(min(guess_ms, limit_ms), limit_ms, "learned", self._percent, len(times))

    def learn(self, ran: RuntimeSample) -> None:
        for key in _kinds(ran.project, ran.user, ran.name, ran.shape):
            # Taken out and put back, so that the first in the dictionary is the one not seen for longest.
            seen = self._seen.pop(key, None)
            if seen is None:
                seen = deque(maxlen=self._window)
            self._seen[key] = seen
            seen.append(ran.runtime_ms)
        while len(self._seen) > _KINDS_KEPT:
            del self._seen[next(iter(self._seen))]


class CorrectedEstimates:
    """What the user said, less by as much as that user's last `window` runs were shorter than was said of them.

    Reckoned in doublings, so that ten minutes for an hour weigh as much as an hour for six; what is said now counts as one
    more run that keeps its word, so that little is made of little.
    """

    learns = True

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._said = UserEstimates()
        self._short: dict[str, deque[int]] = {}

    def estimate(self, spec: JobSpec) -> Estimate:
        said, short = self._said.estimate(spec), self._short.get(spec.user)
        if not said.limit_ms or not short:
            return said
        doublings = max(0, doublings_milli(said.limit_ms) - sum(short) // (len(short) + 1))
        expected_ms = min(round(2 ** (doublings / 1000)) * 1000, said.limit_ms)
        return Estimate(expected_ms, said.limit_ms, "corrected", runs=len(short))

    def learn(self, ran: RuntimeSample) -> None:
        if ran.stated_ms:
            short = self._short.setdefault(ran.user, deque(maxlen=self._window))
            short.append(max(0, doublings_milli(ran.stated_ms) - doublings_milli(ran.runtime_ms)))


def doublings_milli(amount_ms: int) -> int:
    """Thousandths of the binary logarithm of whole seconds."""
    return round(1000 * math.log2(max(amount_ms // 1000, 1)))


def _kinds(project: str, user: str, name: str, shape: str) -> Iterator[Hashable]:
    """From the most to the least specific."""
    yield project, user, name, shape
    yield project, user, name, None
    yield project, user, None, shape
    yield project, user, None, None
