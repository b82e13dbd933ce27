"""Forecasts of start times: several lookaheads of the controller with random run times and arrivals.

Run times are drawn from how past runs compared with their estimates, arrivals from past submissions. The starts in all
futures give the median (P50) and a time that nine of ten starts should not exceed (P90). What a lookahead cannot know (node
failures, other workloads) is learned from earlier forecasts: P90 is stretched by as much as past ones would have needed. No
clock is read and the random source is an argument: the same history and seeds give the same forecasts.
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

FUTURES = 10
# Arrivals that are remembered, and the number needed for a forecast.
_REMEMBERED = 1000
_ENOUGH_ARRIVALS = 20
# Run times that are remembered for each user and for all users, and the number of users.
_RUNS_PER_USER = 50
_RUNS_OF_ALL = 1000
_MAX_USERS = 10_000
# Run times of a user needed to draw from them.
_ENOUGH = 5
# Forecasts of one job that are kept to be graded, and grades that are kept.
_FORECASTS_KEPT = 16
_GRADES = 2000
# Before this many grades P90 is stretched by at least `_INITIAL_STRETCH` (in thousandths), chosen on a synthetic trace.
_GRADES_NEEDED = 30
_INITIAL_STRETCH = 2500
_MIN_STRETCH, _MAX_STRETCH = 1000, 20_000
# The percentile of past stretches. More than 90, because future forecasts differ from past ones.
_PERCENTILE = 92
# Probability 1, as an integer.
_CERTAIN = 10**12
# Arrivals in a lookahead: this many, and one more per pending job up to the maximum. Behind a long queue they matter less,
# and each costs a step.
_ARRIVALS, _MAX_ARRIVALS = 100, 300
# Added to waits before they are compared, so that two seconds instead of one are not twice as late.
_FLOOR_MS = 60_000


class RandomSource(Protocol):
    """`random.Random`, created by the caller: the same seed gives the same forecasts."""

    def randrange(self, start: int, stop: int) -> int: ...


class ArrivalModel:
    """Future arrivals: the remembered past is repeated, from a random moment on."""

    def __init__(self) -> None:
        self._at_ms: deque[int] = deque(maxlen=_REMEMBERED)
        self._specs: deque[JobSpec] = deque(maxlen=_REMEMBERED)
        self._last: JobId = 0

    def arrived(self, job: Job) -> None:
        """Called for every submitted job, in order; repeated calls change nothing."""
        if job.id <= self._last:
            return
        self._last = job.id
        self._at_ms.append(max(job.submitted_ms, self._at_ms[-1] if self._at_ms else 0))
        # A deadline in the past does not apply to a new job.
        self._specs.append(structs.replace(job.spec, deadline_ms=0) if job.spec.deadline_ms else job.spec)

    def draw(self, now_ms: int, first_id: JobId, most: int, random: RandomSource) -> Iterator[tuple[int, Job]]:
        """At most `most` future jobs, in order of time, numbered from `first_id` on."""
        times, specs = list(self._at_ms), list(self._specs)
        span_ms = now_ms - times[0] if times else 0
        if len(times) < _ENOUGH_ARRIVALS or span_ms <= 0:
            return iter(())
        return islice(_repeat(times, specs, now_ms, times[0] + random.randrange(0, span_ms), first_id), most)


def _repeat(
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


class Grade(Struct, frozen=True, array_like=True):
    """How much later than P50 the job started, and whether by P90. `stretch`: what P90 would have needed."""

    error_ms: int
    covered: bool
    stretch: int


class Record(Struct):
    """What is kept over a restart: the first and the latest forecast of each pending job, and the grades."""

    forecasts: dict[JobId, list[Forecast]] = {}
    grades: list[Grade] = []


class _Sample:
    """The last `size` numbers. They are added often and drawn seldom, so that they are sorted on demand."""

    __slots__ = ("_last", "_sorted")

    def __init__(self, size: int) -> None:
        self._last: deque[int] = deque(maxlen=size)
        self._sorted: list[int] | None = None

    def __len__(self) -> int:
        return len(self._last)

    def add(self, number: int) -> None:
        self._last.append(number)
        self._sorted = None

    def _in_order(self) -> list[int]:
        if self._sorted is None:
            self._sorted = sorted(self._last)
        return self._sorted

    def draw(self, above: int, random: RandomSource) -> int | None:
        """A number larger than `above`; None if there is none."""
        numbers = self._in_order()
        first = bisect_right(numbers, above)
        if first == len(numbers):
            return None
        return numbers[random.randrange(first, len(numbers))]

    def median(self) -> int:
        numbers = self._in_order()
        return numbers[len(numbers) // 2] if numbers else 0


class RunTimes:
    """Past run times: as thousandths of the stated time, or in milliseconds if there was none."""

    def __init__(self) -> None:
        self._of_user: dict[tuple[bool, str, str], _Sample] = {}
        self._of_all = {True: _Sample(_RUNS_OF_ALL), False: _Sample(_RUNS_OF_ALL)}

    def learn(self, spec: JobSpec, ran_ms: int) -> None:
        stated_ms = _stated_ms(spec)
        number = max(ran_ms, 1) * 1000 // stated_ms if stated_ms else max(ran_ms, 1)
        key = (bool(stated_ms), spec.project, spec.user)
        # Removed and inserted again, so that the first key is the least recently used one.
        sample = self._of_user.pop(key, None) or _Sample(_RUNS_PER_USER)
        self._of_user[key] = sample
        if len(self._of_user) > _MAX_USERS:
            del self._of_user[next(iter(self._of_user))]
        for one in (sample, self._of_all[bool(stated_ms)]):
            one.add(number)

    def usual_ms(self) -> int:
        """The median run time of jobs without a stated time; 0 if there is none."""
        return self._of_all[False].median()

    def draw(self, spec: JobSpec, so_far_ms: int, random: RandomSource) -> int:
        """The total run time of a run that has run for `so_far_ms`; the stated time if no such run is remembered."""
        stated_ms = _stated_ms(spec)
        above = so_far_ms * 1000 // stated_ms if stated_ms else so_far_ms
        mine = self._of_user.get((bool(stated_ms), spec.project, spec.user))
        found = mine.draw(above, random) if mine is not None and len(mine) >= _ENOUGH else None
        if found is None:
            found = self._of_all[bool(stated_ms)].draw(above, random)
        if found is None:
            return stated_ms
        return max(found * stated_ms // 1000, so_far_ms + 1) if stated_ms else found


class _DrawnRunTimes:
    """Run times of one future. The members of a gang end together."""

    def __init__(self, run_times: RunTimes, random: RandomSource) -> None:
        self._run_times, self._random = run_times, random
        self._drawn: dict[tuple[JobId, int], int] = {}

    def __call__(self, run: Run, spec: JobSpec, so_far_ms: int) -> int:
        key = (run.job, run.attempt)
        if key not in self._drawn:
            self._drawn[key] = self._run_times.draw(spec, so_far_ms, self._random)
        return self._drawn[key]


class Forecasts:
    """`predict` computes forecasts and `keep` stores them; `started` and `ended` report what happened."""

    def __init__(self) -> None:
        self.run_times = RunTimes()
        self.arrivals = ArrivalModel()
        self.of: dict[JobId, list[Forecast]] = {}
        self._grades: deque[Grade] = deque(maxlen=_GRADES)
        self._covered = 0

    def ended(self, job: Job) -> None:
        """Learn the run time of a job that succeeded."""
        if job.state == "succeeded" and job.scheduled_ms and job.finished_ms:
            self.run_times.learn(job.spec, job.finished_ms - job.scheduled_ms)
        self.of.pop(job.id, None)

    def started(self, job: JobId, at_ms: int) -> list[Grade]:
        grades = []
        for forecast in self.of.pop(job, ()):
            grades.append(Grade(at_ms - forecast.p50_ms, at_ms <= forecast.p90_ms, _stretch(forecast, at_ms)))
        self._add(grades)
        return grades

    def _add(self, grades: Iterable[Grade]) -> None:
        for grade in grades:
            if len(self._grades) == _GRADES:
                self._covered -= self._grades[0].covered  # it is dropped
            self._grades.append(grade)
            self._covered += grade.covered

    def forget(self, waiting: Iterable[JobId]) -> None:
        """Drop the forecasts of all other jobs."""
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
        """The percentage of graded forecasts whose job started by P90."""
        return self._covered * 100 // max(len(self._grades), 1)

    def stretch(self, now_ms: int) -> int:
        """By how much P90 is stretched, in thousandths: what `_PERCENTILE` of a hundred past forecasts would have needed.

        Pending jobs count too: they need more than the time so far. Without them only early starts would count (this is the
        Kaplan-Meier estimator)."""
        known = [(grade.stretch, True) for grade in self._grades]
        known += [(_stretch(forecast, now_ms), False) for kept in self.of.values() for forecast in kept]
        known.sort()
        least = _MIN_STRETCH if self.graded >= _GRADES_NEEDED else _INITIAL_STRETCH
        late = _CERTAIN
        for place, (stretch, started) in enumerate(known):
            if started:
                others = len(known) - place - 1
                late = late * others // (others + 1)
                if late * 100 <= (100 - _PERCENTILE) * _CERTAIN:
                    return min(max(stretch, least), _MAX_STRETCH)
        return min(max(known[-1][0] if known else 0, least), _MAX_STRETCH)

    def predict(
        self,
        controller: Controller,
        now_ms: int,
        random: Callable[[int], RandomSource],
        *,
        futures: int = FUTURES,
        max_steps: int = 20_000,
        begins: Mapping[RunId, int] | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> dict[JobId, Forecast]:
        """A forecast for each job that starts in nine of ten futures. `controller`: a clone, which is not changed. `random`:
        the random source of a future, by number. `begins`: see `look_ahead`. If `go_on` ends it early, complete futures
        count, or else the first one as far as it got."""
        starts: dict[JobId, list[int]] = {}
        waiting = {id for id, job in controller.cluster.jobs.items() if job.state == "pending"}
        first_id = max(controller.cluster.jobs, default=0) + 1
        most = min(_ARRIVALS + len(waiting), _MAX_ARRIVALS)
        seen = 0
        for number in range(futures):
            run_times, random_arrivals = _DrawnRunTimes(self.run_times, random(number)), random(number + futures)
            ahead = look_ahead(
                clone_controller(controller),
                now_ms,
                run_times,
                arrivals=self.arrivals.draw(now_ms, first_id, most, random_arrivals),
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
            if len(kept) > _FORECASTS_KEPT:
                del kept[1::2]  # keep the first, the latest, and every other one in between

    def record(self) -> Record:
        ends = {job: [*kept[:1], *kept[1:][-1:]] for job, kept in self.of.items()}
        return Record(ends, list(self._grades))

    def restore(self, record: Record) -> None:
        self.of.update(record.forecasts)
        self._add(record.grades)


def _forecast(times: list[int], futures: int, now_ms: int, stretch: int) -> Forecast | None:
    """`times`: the starts in those futures in which the job starts."""
    middle, late = -(-futures // 2) - 1, -(-futures * 9 // 10) - 1
    if len(times) <= late:
        return None
    reach_ms = times[late]
    p90_ms = now_ms + (reach_ms - now_ms + _FLOOR_MS) * stretch // 1000 - _FLOOR_MS
    return Forecast(now_ms, times[middle], max(p90_ms, reach_ms), reach_ms)


def _stretch(forecast: Forecast, at_ms: int) -> int:
    """The wait until `at_ms`, in thousandths of the wait that the lookaheads predicted."""
    waited, reach = at_ms - forecast.made_ms, forecast.reach_ms - forecast.made_ms
    return (waited + _FLOOR_MS) * 1000 // (reach + _FLOOR_MS)


def _stated_ms(spec: JobSpec) -> int:
    return spec.estimate_ms or spec.timeout_ms
