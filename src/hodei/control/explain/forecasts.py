"""When will it start? Forecasts by running the real controller ahead, several times, with run times as they have been.

How long runs really take is drawn from how past runs compared with what was said of them, and who else comes from who came
(`control.explain.forecasts`). From the starts in all these futures follow a middle one (P50) and one that nine of ten should not
exceed (P90). What no such run can know (which nodes fail, that tomorrow is not like today) is learned from earlier
forecasts: the P90 is stretched by as much as past ones had to be. No clock here, and chance comes from outside: the same
history and the same seeds give the same forecasts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

from msgspec import Struct, structs

from hodei.control.controller import Controller
from hodei.control.explain.lookahead import clone_controller, look_ahead
from hodei.model.estimate import Forecast, StartForecast
from hodei.model.ids import JobId, RunId
from hodei.model.job import Job, JobSpec, Run

# ------------------------------------------------------------------------------------------ randomness
# Chance, as it comes from outside: nothing in here throws dice of its own.


class RandomSource(Protocol):
    """`random.Random`, made by whoever asks for forecasts: with the same seed they are the same."""

    def randrange(self, start: int, stop: int) -> int: ...


# ----------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------- arrival model
# Who else will come? Those who came before come again: the past from a random moment of it on, over and over.


# So many are remembered, and fewer than those tell nothing.
_REMEMBERED = 1000
_ENOUGH_ARRIVALS = 20


class ArrivalModel:
    def __init__(self) -> None:
        self._at_ms: deque[int] = deque(maxlen=_REMEMBERED)
        self._specs: deque[JobSpec] = deque(maxlen=_REMEMBERED)
        self._last: JobId = 0

    def arrived(self, job: Job) -> None:
        """To be told of every job once it is submitted, in their order; of one that is known already nothing is learned."""
        if job.id <= self._last:
            return
        self._last = job.id
        self._at_ms.append(max(job.submitted_ms, self._at_ms[-1] if self._at_ms else 0))
        # A deadline that has passed means nothing to another job.
        self._specs.append(structs.replace(job.spec, deadline_ms=0) if job.spec.deadline_ms else job.spec)

    def draw(self, now_ms: int, first_id: JobId, most: int, chance: RandomSource) -> Iterator[tuple[int, Job]]:
        """At most so many to come, in order of time, numbered from `first_id` on."""
        times, specs = list(self._at_ms), list(self._specs)
        span_ms = now_ms - times[0] if times else 0
        if len(times) < _ENOUGH_ARRIVALS or span_ms <= 0:
            return iter(())
        return islice(_again(times, specs, now_ms, times[0] + chance.randrange(0, span_ms), first_id), most)


def _again(
    times: list[int], specs: list[JobSpec], now_ms: int, from_ms: int, first_id: JobId
) -> Iterator[tuple[int, Job]]:
    ahead_ms, place, id = now_ms - from_ms, bisect_left(times, from_ms), first_id
    while True:
        for past_ms, spec in zip(times[place:], specs[place:], strict=True):
            at_ms = max(past_ms + ahead_ms, now_ms)
            yield at_ms, Job(id, spec, "pending", at_ms, at_ms, queued_ms=at_ms)
            id += 1
        ahead_ms += now_ms - times[0]
        place = 0


# ----------------------------------------------------------------------------------------------------

FUTURES = 10
# Of each user so many runs are remembered, of all together so many more, and so many users.
_OF_USER = 50
_OF_ALL = 1000
_USERS = 10_000
# Fewer than these tell nothing about a user.
_ENOUGH = 5
# So many forecasts of one job are kept to be graded, and so many grades.
_KEPT = 16
_GRADES = 2000
# Until so many have been graded, P90 is stretched by at least this much (in thousandths): chosen by eye on one invented trace
# under sjf, where half as much again was too little.
_GRADES_NEEDED = 30
_AT_FIRST = 2500
_LEAST, _MOST = 1000, 20_000
# Which of the past stretches is taken, in percent. More than 90, because the next ones are like the last ones only so far.
_AIM = 92
# What is certain, as a whole number.
_CERTAIN = 10**12
# So many may come in a run ahead, and one more for each that waits, up to the second number: behind a long queue they
# matter less, and every one of them costs a step.
_NEWCOMERS, _MOST_NEWCOMERS = 100, 300
# Waits are compared with this added, so that a start after two seconds instead of one is not twice as late.
_FLOOR_MS = 60_000


class Grade(Struct, frozen=True, array_like=True):
    """How a forecast came out: how much later than P50 the job started (earlier: below 0), and whether by P90."""

    error_ms: int
    covered: bool
    stretch: int


class Record(Struct):
    """All that is worth keeping over a restart: the first and the latest forecast of each who waits, and the grades."""

    forecasts: dict[JobId, list[Forecast]] = {}
    grades: list[Grade] = []


class _Sample:
    """The last `size` numbers, in order of time and of size. They come all the time and are drawn from now and then, so
    they are put in order of size when someone asks."""

    __slots__ = ("_last", "_sorted")

    def __init__(self, size: int) -> None:
        self._last: deque[int] = deque(maxlen=size)
        self._sorted: list[int] | None = None

    def __len__(self) -> int:
        return len(self._last)

    def add(self, number: int) -> None:
        self._last.append(number)
        self._sorted = None

    def _by_size(self) -> list[int]:
        if self._sorted is None:
            self._sorted = sorted(self._last)
        return self._sorted

    def draw(self, above: int, chance: RandomSource) -> int | None:
        """One that is larger than `above`; None if there is none."""
        numbers = self._by_size()
        first = bisect_right(numbers, above)
        if first == len(numbers):
            return None
        return numbers[chance.randrange(first, len(numbers))]

    def middle(self) -> int:
        numbers = self._by_size()
        return numbers[len(numbers) // 2] if numbers else 0


class RunTimes:
    """How long runs took: as thousandths of what was said, and where nothing was said in milliseconds."""

    def __init__(self) -> None:
        self._of_user: dict[tuple[bool, str, str], _Sample] = {}
        self._of_all = {True: _Sample(_OF_ALL), False: _Sample(_OF_ALL)}

    def learn(self, spec: JobSpec, ran_ms: int) -> None:
        said_ms = _said_ms(spec)
        number = max(ran_ms, 1) * 1000 // said_ms if said_ms else max(ran_ms, 1)
        key = (bool(said_ms), spec.project, spec.user)
        # Taken out and put back: the first in the dictionary is the one not seen for longest.
        sample = self._of_user.pop(key, None) or _Sample(_OF_USER)
        self._of_user[key] = sample
        if len(self._of_user) > _USERS:
            del self._of_user[next(iter(self._of_user))]
        for one in (sample, self._of_all[bool(said_ms)]):
            one.add(number)

    def usual_ms(self) -> int:
        """How long those mostly ran of which nobody had said how long; 0 if there was none."""
        return self._of_all[False].middle()

    def draw(self, spec: JobSpec, so_far_ms: int, chance: RandomSource) -> int:
        """How long a run that has lasted `so_far_ms` may take in all; what was said if no such run is remembered."""
        said_ms = _said_ms(spec)
        above = so_far_ms * 1000 // said_ms if said_ms else so_far_ms
        mine = self._of_user.get((bool(said_ms), spec.project, spec.user))
        found = mine.draw(above, chance) if mine is not None and len(mine) >= _ENOUGH else None
        if found is None:
            found = self._of_all[bool(said_ms)].draw(above, chance)
        if found is None:
            return said_ms
        return max(found * said_ms // 1000, so_far_ms + 1) if said_ms else found


class _Drawn:
    """Run times of one future. The members of a gang end together."""

    def __init__(self, run_times: RunTimes, chance: RandomSource) -> None:
        self._run_times, self._chance = run_times, chance
        self._drawn: dict[tuple[JobId, int], int] = {}

    def __call__(self, run: Run, spec: JobSpec, so_far_ms: int) -> int:
        key = (run.job, run.attempt)
        if key not in self._drawn:
            self._drawn[key] = self._run_times.draw(spec, so_far_ms, self._chance)
        return self._drawn[key]


class Forecasts:
    """What was foretold and what came of it. `learned` and `started` are to be called with what happens, `foresee` now
    and then; `keep` takes in what was foreseen."""

    def __init__(self) -> None:
        self.run_times = RunTimes()
        self.arrivals = ArrivalModel()
        self.of: dict[JobId, list[Forecast]] = {}
        self._grades: deque[Grade] = deque(maxlen=_GRADES)
        self._covered = 0

    # ------------------------------------------------------------------------------------------ what happens

    def ended(self, job: Job) -> None:
        """Only work that came to its own end tells how long such work takes."""
        if job.state == "succeeded" and job.scheduled_ms and job.finished_ms:
            self.run_times.learn(job.spec, job.finished_ms - job.scheduled_ms)
        self.of.pop(job.id, None)

    def started(self, job: JobId, at_ms: int) -> list[Grade]:
        """Every forecast that was kept for it is graded."""
        grades = []
        for forecast in self.of.pop(job, ()):
            grades.append(Grade(at_ms - forecast.p50_ms, at_ms <= forecast.p90_ms, _stretch(forecast, at_ms)))
        self._add(grades)
        return grades

    def _add(self, grades: Iterable[Grade]) -> None:
        for grade in grades:
            if len(self._grades) == _GRADES:
                self._covered -= self._grades[0].covered  # it makes way
            self._grades.append(grade)
            self._covered += grade.covered

    def forget(self, waiting: Iterable[JobId]) -> None:
        """Keep only what was foretold of these."""
        known = set(waiting)
        self.of = {job: kept for job, kept in self.of.items() if job in known}

    def latest(self, job: JobId) -> StartForecast | None:
        kept = self.of.get(job)
        if not kept:
            return None
        last = kept[-1]
        return StartForecast(last.p50_ms, last.p90_ms, last.made_ms, self.covered_percent, self.graded)

    @property
    def graded(self) -> int:
        return len(self._grades)

    @property
    def covered_percent(self) -> int:
        """Of the last forecasts so many in a hundred were right: the job started by its P90."""
        return self._covered * 100 // max(len(self._grades), 1)

    # -------------------------------------------------------------------------------------------- foretelling

    def stretch(self, now_ms: int) -> int:
        """By how much P90 is stretched, in thousandths: by as much as `_AIM` of a hundred past ones would have needed.

        Those who still wait count as well. Of them it is known only that they need more than the time so far; without them
        only the lucky ones would be learned from (this is the estimate of Kaplan and Meier)."""
        known = [(grade.stretch, True) for grade in self._grades]
        known += [(_stretch(forecast, now_ms), False) for kept in self.of.values() for forecast in kept]
        known.sort()
        least = _LEAST if self.graded >= _GRADES_NEEDED else _AT_FIRST
        late = _CERTAIN
        for place, (stretch, started) in enumerate(known):
            if started:
                others = len(known) - place - 1
                late = late * others // (others + 1)
                if late * 100 <= (100 - _AIM) * _CERTAIN:
                    return min(max(stretch, least), _MOST)
        return min(max(known[-1][0] if known else 0, least), _MOST)

    def foresee(
        self,
        controller: Controller,
        now_ms: int,
        chance: Callable[[int], RandomSource],
        *,
        futures: int = FUTURES,
        max_steps: int = 20_000,
        begins: Mapping[RunId, int] | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> dict[JobId, Forecast]:
        """A forecast for each job that starts in nine of ten futures. `controller` is a twin, and is left as it is; `chance`
        gives each future, by number, what it is drawn with; `begins`: when runs in a backend's own line will.
        If `go_on` ends it early those futures count that were seen to their end, or else the first as far as it was."""
        starts: dict[JobId, list[int]] = {}
        waiting = {id for id, job in controller.cluster.jobs.items() if job.state == "pending"}
        first_id = max(controller.cluster.jobs, default=0) + 1
        most = min(_NEWCOMERS + len(waiting), _MOST_NEWCOMERS)
        seen = 0
        for number in range(futures):
            drawn, dice = _Drawn(self.run_times, chance(number)), chance(number + futures)
            ahead = look_ahead(
                clone_controller(controller),
                now_ms,
                drawn,
                arrivals=self.arrivals.draw(now_ms, first_id, most, dice),
                awaited=waiting,
                begins=begins,
                max_steps=max_steps,
                go_on=go_on,
            )
            if ahead.end == "stopped" and number:
                break
            seen += 1
            for job, start in ahead.starts.items():
                starts.setdefault(job, []).append(start.at_ms)
            if ahead.end == "stopped":
                break
        stretch = self.stretch(now_ms)
        found = {}
        for job, times in starts.items():
            if job in waiting:
                forecast = _forecast(sorted(times), seen, now_ms, stretch)
                if forecast is not None:
                    found[job] = forecast
        return found

    def keep(self, found: dict[JobId, Forecast]) -> None:
        for job, forecast in found.items():
            kept = self.of.setdefault(job, [])
            kept.append(forecast)
            if len(kept) > _KEPT:
                del kept[1::2]  # the first and the latest stay; of those between every other one

    # ------------------------------------------------------------------------------------------- over a restart

    def record(self) -> Record:
        ends = {job: [*kept[:1], *kept[1:][-1:]] for job, kept in self.of.items()}
        return Record(ends, list(self._grades))

    def restore(self, record: Record) -> None:
        self.of.update(record.forecasts)
        self._add(record.grades)


def _forecast(times: list[int], futures: int, now_ms: int, stretch: int) -> Forecast | None:
    """`times` are those of the futures in which it starts; it may not start at all in some."""
    middle, late = -(-futures // 2) - 1, -(-futures * 9 // 10) - 1
    if len(times) <= late:
        return None
    reach_ms = times[late]
    p90_ms = now_ms + (reach_ms - now_ms + _FLOOR_MS) * stretch // 1000 - _FLOOR_MS
    return Forecast(now_ms, times[middle], max(p90_ms, reach_ms), reach_ms)


def _stretch(forecast: Forecast, at_ms: int) -> int:
    """How many thousandths of what the runs ahead had reached is the wait until `at_ms`."""
    waited, reach = at_ms - forecast.made_ms, forecast.reach_ms - forecast.made_ms
    return (waited + _FLOOR_MS) * 1000 // (reach + _FLOOR_MS)


def _said_ms(spec: JobSpec) -> int:
    return spec.estimate_ms or spec.timeout_ms
