"""Run time estimates: as stated by users, or learned from past runs.

Learned estimates are for ordering and forecasts; they never extend a limit. Where other jobs rely on the end of a job, the
stated limit counts (see docs/adr on estimates). Only a job without a stated limit gets the longest run time of similar jobs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator

from hodei.model.errors import InvalidInput
from hodei.model.estimate import Estimate, RuntimeSample, Source, name_pattern, request_shape
from hodei.model.job import JobSpec

# Kinds of jobs that are remembered; the least recently used one is dropped first.
_MAX_KINDS = 100_000
# Runs needed for an estimate, from the most to the least specific kind.
_ENOUGH = (2, 3, 3, 3)


class UserEstimates:
    """The estimate of the user, else the timeout."""

    learns = False

    def estimate(self, spec: JobSpec) -> Estimate:
        stated_ms = spec.estimate_ms or spec.timeout_ms
        source: Source = "user" if spec.estimate_ms else "timeout" if stated_ms else ""
        return Estimate(stated_ms, stated_ms, source)

    def learn(self, ran: RuntimeSample) -> None:
        pass


class LearnedEstimates:
    """A quantile of the last `window` run times of the most specific kind with enough runs: same project, user, name and
    shape; then without the shape; then with the shape but without the name; then any job of the user in the project."""

    learns = True

    def __init__(self, percent: int = 75, window: int = 20) -> None:
        if not 1 <= percent <= 100:
            raise InvalidInput(f"a quantile of {percent}", hint="a whole number from 1 to 100")
        if not 2 <= window <= 1000:
            raise InvalidInput(f"a window of {window} runs", hint="a whole number from 2 to 1000")
        self._percent, self._window = percent, window
        self._stated = UserEstimates()
        self._seen: dict[Hashable, deque[int]] = {}

    def estimate(self, spec: JobSpec) -> Estimate:
        stated = self._stated.estimate(spec)
        for key, enough in zip(
            _kinds(spec.project, spec.user, name_pattern(spec), request_shape(spec)), _ENOUGH, strict=True
        ):
            seen = self._seen.get(key)
            if seen is not None and len(seen) >= min(enough, self._window):
                break
        else:
            return stated
        times = sorted(seen)
        guess_ms = times[-(-len(times) * self._percent // 100) - 1]
        limit_ms = stated.limit_ms or times[-1]
        return Estimate(min(guess_ms, limit_ms), limit_ms, "learned", self._percent, len(times))

    def learn(self, ran: RuntimeSample) -> None:
        for key in _kinds(ran.project, ran.user, ran.name, ran.shape):
            # Removed and inserted again, so that the first key is the least recently used one.
            seen = self._seen.pop(key, None)
            if seen is None:
                seen = deque(maxlen=self._window)
            self._seen[key] = seen
            seen.append(ran.runtime_ms)
        while len(self._seen) > _MAX_KINDS:
            del self._seen[next(iter(self._seen))]


class CorrectedEstimates:
    """The stated time, shortened by as much as the last `window` runs of the user were shorter than stated.

    The mean is over binary logarithms, so that ten minutes of one hour weigh as much as one hour of six. The stated time
    counts as one more run without a difference, so that few runs have little effect.
    """

    learns = True

    def __init__(self, window: int = 20) -> None:
        self._window = window
        self._stated = UserEstimates()
        self._short: dict[str, deque[int]] = {}

    def estimate(self, spec: JobSpec) -> Estimate:
        stated, short = self._stated.estimate(spec), self._short.get(spec.user)
        if not stated.limit_ms or not short:
            return stated
        doublings = max(0, doublings_milli(stated.limit_ms) - sum(short) // (len(short) + 1))
        expected_ms = min(round(2 ** (doublings / 1000)) * 1000, stated.limit_ms)
        return Estimate(expected_ms, stated.limit_ms, "corrected", runs=len(short))

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
