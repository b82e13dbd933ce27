"""The usage ledger behind fair share and budgets.

Usage is an amount times the time it was held (base units of `model.resources` times milliseconds), in exact integers per
account path, resource and time bucket. All values are sums of integers, so that late and unordered facts give the same
result, and the usage of a project is exactly that of its users.

Decay applies on reading: with a half-life a bucket counts half as much each half-life (everything within one bucket counts
alike: an error of at most 2^(bucket / half-life), 0.4 % for an hour in a week); after 32 half-lives it does not count.
With a window the last buckets count in full, and others not at all.

To bound memory, buckets older than two half-lives (or the window) are folded (hours into days); a folded one counts as if
everything had happened in its middle. This changes the weight of an hour by at most 2^(half a day / half-life), 5 % of the
quarter or less that is left of it; sums without decay stay exact. After `keep_ms` buckets are dropped.

No clock is read here: times are arguments, and none lies after the `now_ms` of a reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import repeat

from msgspec import Struct

from hodei.model.accounting import UsageRow
from hodei.model.errors import InvalidInput
from hodei.model.ids import RunId
from hodei.model.resources import Resources

Path = tuple[str, ...]

# Bits of the factor of a bucket: relative error below 2^-40.
FACTOR_BITS = 40
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS
# Usage older than this many half-lives would count less than a four-billionth: it counts nothing.
_HALF_LIVES = 32
# Half-lives before buckets are folded.
_FINE = 2


class OpenRun(Struct):
    """A run that is still charged."""

    path: Path
    amounts: Resources
    at_ms: int


class OwnUsage(Struct):
    """The usage of one resource by ended runs of one account itself, by bucket; those before `folded` are folded."""

    amounts: dict[int, int]
    folded: int


class Line:
    """The usage of one resource by one account and all below it.

    Open runs are not counted one by one: `rate` is the amount held in all, `settled` the bucket up to whose start it is in
    `amounts`, and `offset` what the rate overstates in that bucket (runs that started within it). `eras`: the same amounts
    times the factor of their bucket, by half-life.
    """

    __slots__ = ("amounts", "eras", "folded", "offset", "rate", "settled")

    def __init__(self, folded: int) -> None:
        self.amounts: dict[int, int] = {}
        self.eras: dict[int, int] = {}
        self.folded = folded
        self.rate = self.offset = self.settled = 0


class Factors(dict[int, int]):
    """2^(bucket / half-life) times 2^FACTOR_BITS. By decimals, because powers of floats differ between machines."""

    def __init__(self, half_life: int) -> None:
        self._half_life = half_life

    def __missing__(self, place: int) -> int:
        with localcontext() as context:
            context.prec = 40
            factor = int(Decimal(2) ** (FACTOR_BITS + Decimal(place) / self._half_life))
        self[place] = factor
        return factor


class Ledger:
    """Charged with the usage of runs; read by path: a prefix has the sum of all below it, `()` the total."""

    def __init__(
        self, *, half_life_ms: int = WEEK_MS, window_ms: int = 0, bucket_ms: int = HOUR_MS, folds: int = 24,
        keep_ms: int = 400 * DAY_MS,
    ) -> None:  # fmt: skip
        """`window_ms`: a rolling window instead of the half-life. `folds`: the number of buckets folded into one."""
        span_ms = window_ms or half_life_ms
        if bucket_ms < 1 or folds < 1 or span_ms < bucket_ms or span_ms % bucket_ms:
            raise InvalidInput(
                f"a half-life or window of {span_ms} ms in buckets of {bucket_ms} ms", hint="a whole number of buckets"
            )
        self._bucket, self._folds = bucket_ms, folds
        self._window = window_ms // bucket_ms
        self._half_life = 0 if window_ms else half_life_ms // bucket_ms
        self._factors = Factors(max(1, self._half_life))
        self._fine = self._window + 1 if self._window else _FINE * self._half_life
        # Kept as long as it counts, so that a restored ledger reads the same.
        self._keep = max(keep_ms // bucket_ms, self._fine, (_HALF_LIVES + 1) * self._half_life) + folds
        # Buckets before this one are folded, or will be before they are read; earlier still, they are dropped.
        self._boundary = 0
        self._dropped = 0
        self._lines: dict[Path, dict[str, Line]] = {}
        # For each path the resource maps of its prefixes and itself, so that a charge does not build paths.
        self._chains: dict[Path, tuple[dict[str, Line], ...]] = {}
        # The usage of each path itself by ended runs; open runs are opened again after a restart.
        self._own_usage: dict[Path, dict[str, OwnUsage]] = {}
        self._dirty: set[tuple[Path, str, int]] = set()
        self._open: dict[RunId, OpenRun] = {}
        self._ended_early: dict[RunId, int] = {}
        self._to_fold: list[Path] = []

    def charge(self, path: Path, amounts: Resources, from_ms: int, to_ms: int) -> None:
        """`path` held `amounts` from `from_ms` to `to_ms`."""
        pieces, amounts = self._pieces(from_ms, to_ms), _without_zeros(amounts)
        if not pieces:
            return
        for lines in self._chain(path):
            for resource, amount in amounts.items():
                line = self._line(lines, resource)
                for bucket, ms in pieces:
                    self._add(line, bucket, amount * ms)
        self._keep_rows(path, amounts, pieces)

    def opened(self, run_id: RunId, path: Path, amounts: Resources, at_ms: int) -> None:
        """`path` holds `amounts` from `at_ms` on. Idempotent; its end may have been reported before."""
        if run_id in self._open:
            return
        ended_ms = self._ended_early.pop(run_id, None)
        if ended_ms is not None:
            self.charge(path, amounts, at_ms, ended_ms)
            return
        self._open[run_id] = run = OpenRun(path, _without_zeros(amounts), at_ms)
        self._step(path, run.amounts, at_ms, 1)

    def closed(self, run_id: RunId, at_ms: int) -> None:
        """The run has ended. The end of an unknown run is remembered until its start is reported."""
        run = self._open.pop(run_id, None)
        if run is None:
            self._ended_early.setdefault(run_id, at_ms)
            return
        at_ms = max(at_ms, run.at_ms)
        self._step(run.path, run.amounts, at_ms, -1)
        self._keep_rows(run.path, run.amounts, self._pieces(run.at_ms, at_ms))

    def usage(self, prefix: Path, now_ms: int) -> Resources:
        """The decayed usage of `prefix` and all below it, open runs included. Resources without usage are left out. Rounded
        down to one base unit times a millisecond; `exact_usage` has the fraction."""
        return {name: part // whole for name, part, whole in self._readings(prefix, now_ms) if part >= whole}

    def exact_usage(self, prefix: Path, now_ms: int) -> dict[str, Fraction]:
        """As `usage`, not rounded: the sum over users is exactly the project's."""
        return {name: Fraction(part, whole) for name, part, whole in self._readings(prefix, now_ms) if part > 0}

    def usage_of(self, resource: str, now_ms: int, depth: int) -> dict[Path, int]:
        """The decayed usage of one resource by every account at that depth (1 organisations, 2 projects, ...), by path."""
        now = now_ms // self._bucket
        found: dict[Path, int] = {}
        for path in sorted(path for path in self._lines if len(path) == depth):
            line = self._lines[path].get(resource)
            if line is not None:
                part, whole = self._read(self._up_to_date(line, now), now, now_ms)
                if part >= whole:
                    found[path] = part // whole
        return found

    def used_since(self, prefix: Path, since_ms: int, now_ms: int) -> Resources:
        """The usage from the bucket of `since_ms` on (its whole day, if hours are folded), without decay."""
        now, since = now_ms // self._bucket, since_ms // self._bucket
        lines = self._lines.get(prefix, {})
        found: Resources = {}
        for name in sorted(lines):
            line = self._up_to_date(lines[name], now)
            first = since - since % self._folds if since < self._boundary else since
            past = sum(amount for bucket, amount in line.amounts.items() if bucket >= first)
            used = past + self._pending(line, now_ms)
            if used > 0:
                found[name] = used
        return found

    def rows(self) -> list[UsageRow]:
        """The usage of ended runs, sorted. Open runs are opened again after `restore`."""
        return [
            self._row(path, resource, bucket * self._bucket)
            for path, resource in sorted((path, name) for path, kept in self._own_usage.items() for name in kept)
            for bucket in sorted(self._own_usage_of(path, resource).amounts)
        ]

    def take_dirty(self) -> list[UsageRow]:
        """The rows that changed since the last call, with their present amounts; 0: the row is deleted."""
        for path, resource in {(path, resource) for path, resource, _ in self._dirty}:
            self._own_usage_of(path, resource)
        taken = [self._row(*key) for key in sorted(self._dirty)]
        self._dirty.clear()
        return taken

    def restore(self, rows: Iterable[UsageRow]) -> None:
        """Load what `rows` or `take_dirty` returned, into an empty ledger. Rows of other widths (after a change of buckets)
        go to the bucket of their middle, and are dirty, so that the store replaces them."""
        given, folded_ms = list(rows), self._bucket * self._folds
        if self._folds > 1:
            folded = [row.start_ms for row in given if row.width_ms == folded_ms and row.start_ms % folded_ms == 0]
            self._boundary = max(self._boundary, (max(folded, default=-folded_ms) + folded_ms) // self._bucket)
        for row in given:
            middle = (row.start_ms + row.width_ms // 2) // self._bucket
            for lines in self._chain(row.path):
                self._add(self._line(lines, row.resource), middle, row.amount)
            kept = self._own_usage_of(row.path, row.resource)
            bucket = self._folded_bucket(middle)
            kept.amounts[bucket] = kept.amounts.get(bucket, 0) + row.amount
            new = self._row(row.path, row.resource, bucket * self._bucket)
            if (new.start_ms, new.width_ms) != (row.start_ms, row.width_ms):
                self._dirty |= {(row.path, row.resource, row.start_ms), (row.path, row.resource, new.start_ms)}

    def fold(self, now_ms: int, at_most: int = 100) -> bool:
        """Fold old buckets and drop those beyond `keep_ms`; called from time to time.

        Handles `at_most` accounts per call and returns whether there are more; readings in between are the same. Each call
        makes rows dirty: take them in between."""
        now = now_ms // self._bucket
        boundary = (now - self._fine) // self._folds * self._folds
        if boundary > self._boundary:
            self._boundary = boundary
            self._dropped = max(self._dropped, (now - self._keep) // self._folds * self._folds)
            self._to_fold = list(self._lines)
            self._ended_early = {
                run: at_ms for run, at_ms in self._ended_early.items() if at_ms >= boundary * self._bucket
            }  # fmt: skip
        for path in self._to_fold[-at_most:]:
            for name in list(self._own_usage.get(path, ())):
                if not self._own_usage_of(path, name).amounts:
                    del self._own_usage[path][name]
            lines = self._lines[path]
            for name, line in list(lines.items()):
                if not self._up_to_date(line, now).amounts and not line.rate:
                    del lines[name]
        del self._to_fold[-at_most:]
        return bool(self._to_fold)

    def _chain(self, path: Path) -> tuple[dict[str, Line], ...]:
        chain = self._chains.get(path)
        if chain is None:
            chain = tuple(self._lines.setdefault(path[:depth], {}) for depth in range(len(path) + 1))
            self._chains[path] = chain
        return chain

    def _line(self, lines: dict[str, Line], resource: str) -> Line:
        line = lines.get(resource)
        if line is None:
            line = lines[resource] = Line(self._boundary)
        elif line.folded != self._boundary:
            self._fold_line(line)
        return line

    def _pieces(self, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
        """The buckets of an interval, each with its milliseconds."""
        if to_ms <= from_ms:
            return []
        width = self._bucket
        first, last = from_ms // width, (to_ms - 1) // width
        if first == last:
            return [(first, to_ms - from_ms)]
        between = [(bucket, width) for bucket in range(first + 1, last)]
        return [(first, (first + 1) * width - from_ms), *between, (last, to_ms - last * width)]

    def _folded_bucket(self, bucket: int) -> int:
        """The bucket that holds its usage: itself, or the first of those that it is folded with."""
        return bucket - bucket % self._folds if bucket < self._boundary else bucket

    def _add(self, line: Line, bucket: int, amount: int) -> None:
        """Add usage to a line that is folded up to the boundary."""
        if bucket < self._boundary:
            if bucket < self._dropped:
                return
            bucket -= bucket % self._folds
            line.amounts[bucket] = line.amounts.get(bucket, 0) + amount
            bucket += self._folds // 2
        else:
            line.amounts[bucket] = line.amounts.get(bucket, 0) + amount
        self._weigh(line, bucket, amount)

    def _weigh(self, line: Line, bucket: int, amount: int) -> None:
        if self._half_life:
            era, place = divmod(bucket, self._half_life)
            line.eras[era] = line.eras.get(era, 0) + amount * self._factors[place]

    def _step(self, path: Path, amounts: Resources, at_ms: int, sign: int) -> None:
        """From `at_ms` on so much more (or less) is held. A run is two steps."""
        width = self._bucket
        bucket, into_ms = divmod(at_ms, width)
        for lines in self._chain(path):
            for resource, held in amounts.items():
                line, amount = self._line(lines, resource), sign * held
                self._settle(line, bucket)
                if bucket == line.settled:
                    line.offset += amount * into_ms
                else:
                    self._add(line, bucket, amount * (width - into_ms))
                    for later in range(bucket + 1, line.settled):
                        self._add(line, later, amount * width)
                line.rate += amount

    def _settle(self, line: Line, bucket: int) -> None:
        """Add the usage of open runs up to the start of `bucket`; never goes back."""
        if bucket <= line.settled:
            return
        whole = line.rate * self._bucket
        if whole != line.offset:
            self._add(line, line.settled, whole - line.offset)
        if whole:
            for past in range(line.settled + 1, bucket):
                self._add(line, past, whole)
        line.settled, line.offset = bucket, 0

    def _up_to_date(self, line: Line, now: int) -> Line:
        if line.folded != self._boundary:
            self._fold_line(line)
        self._settle(line, now)
        return line

    def _pending(self, line: Line, now_ms: int) -> int:
        """The usage of open runs since the line was settled."""
        return line.rate * (now_ms - line.settled * self._bucket) - line.offset

    def _readings(self, prefix: Path, now_ms: int) -> Iterator[tuple[str, int, int]]:
        now = now_ms // self._bucket
        lines = self._lines.get(prefix, {})
        for name in sorted(lines):
            yield name, *self._read(self._up_to_date(lines[name], now), now, now_ms)

    def _read(self, line: Line, now: int, now_ms: int) -> tuple[int, int]:
        """The decayed usage as a fraction."""
        pending = self._pending(line, now_ms)
        if self._window:
            counted = range(now - self._window + 1, max(now, line.settled) + 1)
            return pending + sum(map(line.amounts.get, counted, repeat(0))), 1
        era, place = divmod(now, self._half_life)
        factor = self._factors[place]
        total = pending * factor << _HALF_LIVES
        for past, weighed in line.eras.items():
            if era - past <= _HALF_LIVES:
                total += weighed << (_HALF_LIVES - era + past)
        return total, factor << _HALF_LIVES

    def _fold_line(self, line: Line) -> None:
        old = [bucket for bucket in line.amounts if line.folded <= bucket < self._boundary]
        # All are removed before any is added, because they are added to the bucket of one of them.
        taken = [(bucket, line.amounts.pop(bucket)) for bucket in old]
        for bucket, amount in taken:
            self._weigh(line, bucket, -amount)
            self._add(line, bucket, amount)
        for bucket in [bucket for bucket in line.amounts if bucket < self._dropped]:
            del line.amounts[bucket]
        if self._half_life:
            oldest = self._dropped // self._half_life
            for era in [era for era in line.eras if era < oldest]:
                del line.eras[era]
        line.folded = self._boundary

    def _keep_rows(self, path: Path, amounts: Resources, pieces: list[tuple[int, int]]) -> None:
        for resource, amount in amounts.items():
            kept = self._own_usage_of(path, resource).amounts
            for bucket, ms in pieces:
                place = self._folded_bucket(bucket)
                if place >= self._dropped:
                    kept[place] = kept.get(place, 0) + amount * ms
                    self._dirty.add((path, resource, place * self._bucket))

    def _own_usage_of(self, path: Path, resource: str) -> OwnUsage:
        """The usage of a path itself, folded up to the boundary."""
        own = self._own_usage.setdefault(path, {})
        kept = own.get(resource)
        if kept is None:
            kept = own[resource] = OwnUsage({}, self._boundary)
        if kept.folded != self._boundary:
            for bucket in [bucket for bucket in kept.amounts if bucket < self._boundary]:
                place = self._folded_bucket(bucket)
                if place != bucket or bucket >= kept.folded or place < self._dropped:
                    amount = kept.amounts.pop(bucket)
                    self._dirty |= {(path, resource, bucket * self._bucket), (path, resource, place * self._bucket)}
                    if place >= self._dropped:
                        kept.amounts[place] = kept.amounts.get(place, 0) + amount
            kept.folded = self._boundary
        return kept

    def _row(self, path: Path, resource: str, start_ms: int) -> UsageRow:
        kept = self._own_usage.get(path, {}).get(resource)
        bucket, off = divmod(start_ms, self._bucket)
        amount = 0 if kept is None or off else kept.amounts.get(bucket, 0)
        folded = bucket < self._boundary and bucket % self._folds == 0
        return UsageRow(path, resource, start_ms, self._bucket * (self._folds if folded else 1), amount)


def _without_zeros(amounts: Resources) -> Resources:
    return {name: amount for name, amount in amounts.items() if amount}
