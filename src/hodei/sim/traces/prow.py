"""Prow's job definitions (kubernetes/test-infra) as a CI workload: periodics by interval or cron, pushes as bursts.

The definitions have requests and schedules, but no run times and no pushes: those are drawn with a seed.
Options: `days` (1), `seed` (1), `pushes` a day over all repositories (200).
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import accumulate, takewhile
from random import Random

from msgspec import Struct, structs

from hodei.model.cron import Cron, parse_cron
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY, parse_duration_ms, parse_quantity
from hodei.sim.traces.generate import OFFICE_HOURS
from hodei.sim.traces.workload import Arrival, ReadSettings, TraceFile, Workload, uniform_nodes

COLUMNS = ("kind", "repo", "name", "cpu_request", "mem_request", "interval", "cron", "minimum_interval", "timeout")
_START_MS = round(datetime(2024, 1, 1, tzinfo=UTC).timestamp() * 1000)  # a Monday
_DAY_MS = 86_400_000
_DEFAULT_TIMEOUT_MS = 2 * 3_600_000
_DEFAULT_CPU, _DEFAULT_MEMORY = 1000, 2**30
_MEMORY_PER_CPU = 4 * 2**30
# Beta distribution of the share of its timeout that a run takes, a third on average.
_TIMEOUT_SHARE = (1.5, 3.0)
_LEAST_RUN_MS = 10_000
# A push runs every job with always_run, and each other job with this probability (it touched the files of the job).
_TOUCHED = 0.1
# The share of pushes that are merged and run postsubmits.
_MERGED = 0.25


class _Job(Struct, frozen=True):
    kind: str
    repo: str
    spec: JobSpec
    timeout_ms: int
    interval_ms: int
    cron: Cron | None
    always: bool


def read(file: TraceFile, settings: ReadSettings) -> Workload:
    days, seed = settings.options.integer("days", 1, most=3660), settings.options.integer("seed", 1, least=0)
    pushes = settings.options.integer("pushes", 200, least=0, most=1_000_000)
    counts: Counter[str] = Counter()
    jobs = list(_jobs(file, counts))
    rng = Random(seed)
    when = [*_periodics(jobs, rng, days), *_pushes(jobs, rng, days, pushes)]
    when.sort(key=lambda pair: pair[0])  # stable: the order of definitions breaks ties
    arrivals = []
    for id, (at_ms, job) in enumerate(when, 1):
        run_ms = max(_LEAST_RUN_MS, round(job.timeout_ms * rng.betavariate(*_TIMEOUT_SHARE)))
        spec = job.spec if settings.estimates == "user" else structs.replace(job.spec, estimate_ms=run_ms)
        arrivals.append(Arrival(at_ms, id, spec, run_ms))
    notes = [
        f"{days} days from Monday midnight with seed {seed}, {pushes} pushes a day spread over repositories and hours",
        "run times are drawn: a share of the timeout, a third of it on average; the timeout is the estimate",
        "max_concurrency is ignored",
    ]
    notes.extend(f"{count:,} of {len(jobs):,} definitions {what}" for what, count in sorted(counts.items()))
    if settings.procs is None:
        notes.append("the definitions have no nodes: give processors (with 4Gi each) or a cluster")
    nodes = uniform_nodes(settings.procs, CPU, settings.per_node, {MEMORY: _MEMORY_PER_CPU}) if settings.procs else []
    return Workload(file.name, arrivals, nodes, notes)


def _jobs(file: TraceFile, counts: Counter[str]) -> Iterator[_Job]:
    places, rows = file.table(COLUMNS)
    always_at, file_at = places.get("always_run"), places.get("file")
    tasks: dict[tuple[int, int], tuple[TaskSpec, ...]] = {}
    for line, row in rows:
        cell = {column: row[places[column]].strip() for column in COLUMNS}
        try:
            shape = (
                parse_quantity(cell["cpu_request"], scale=1000) if cell["cpu_request"] else _DEFAULT_CPU,
                parse_quantity(cell["mem_request"]) if cell["mem_request"] else _DEFAULT_MEMORY,
            )
            timeout_ms = parse_duration_ms(cell["timeout"]) if cell["timeout"] else _DEFAULT_TIMEOUT_MS
            every = cell["interval"] or cell["minimum_interval"]
            interval_ms = parse_duration_ms(every) if every else 0
            cron = _parse_schedule(cell["cron"]) if cell["cron"] else None
        except InvalidInput as error:
            file.fail(line, error.message, error.hint)
        counts["without a cpu or memory request: one cpu, one Gi is used"] += not (
            cell["cpu_request"] and cell["mem_request"]
        )
        counts["without a timeout: two hours are used"] += not cell["timeout"]
        counts["with a minimum interval: it is used as the interval"] += bool(cell["minimum_interval"])
        if shape not in tasks:
            tasks[shape] = (TaskSpec(request={CPU: shape[0], MEMORY: shape[1]}),)
        always = always_at is not None and always_at < len(row) and row[always_at] == "True"
        path = row[file_at] if file_at is not None and file_at < len(row) else ""
        project = cell["repo"] or "/".join(path.split("/")[2:4]).removesuffix(".yaml") or "default"
        spec = JobSpec(name=cell["name"], tasks=tasks[shape], project=project, estimate_ms=timeout_ms)
        yield _Job(cell["kind"], cell["repo"], spec, timeout_ms, interval_ms, cron, always)
    for what in [what for what, count in counts.items() if not count]:
        del counts[what]


def _parse_schedule(text: str) -> Cron | None:
    """None for a date that never comes: definitions use 31 February to switch a job off."""
    try:
        return parse_cron(text)
    except InvalidInput:
        fields = text.split()
        try:
            parse_cron(" ".join((*fields[:3], "*", *fields[4:])))
        except InvalidInput:
            pass
        else:
            return None  # it is valid in other months
        raise


def _periodics(jobs: list[_Job], rng: Random, days: int) -> Iterator[tuple[int, _Job]]:
    for job in jobs:
        if job.cron is not None:
            # A time of midnight on the first day counts: due times are strictly after the given one.
            for at_ms in takewhile(lambda at: at < _START_MS + days * _DAY_MS, job.cron.times_ms(_START_MS - 1)):
                yield at_ms - _START_MS, job
        elif job.interval_ms:
            # An interval counts from the last run, which was some time ago.
            for at_ms in range(rng.randrange(job.interval_ms), days * _DAY_MS, job.interval_ms):
                yield at_ms, job


def _pushes(jobs: list[_Job], rng: Random, days: int, pushes: int) -> Iterator[tuple[int, _Job]]:
    """Repositories with more jobs get more pushes; all jobs of a push arrive together."""
    repos: dict[str, dict[str, list[_Job]]] = {}
    merges: dict[str, list[_Job]] = {}
    for job in jobs:
        if job.kind == "presubmits":
            # Definitions of one name are for different branches: a push is to one of them.
            repos.setdefault(job.repo, {}).setdefault(job.spec.name, []).append(job)
        elif job.kind == "postsubmits":
            merges.setdefault(job.repo, []).append(job)
    names = sorted(repos)
    popular = list(accumulate(len(repos[name]) for name in names))
    hours = list(accumulate(OFFICE_HOURS))
    for day in range(days if names else 0):
        for _ in range(pushes):
            hour = bisect(hours, rng.random() * hours[-1])
            at_ms = day * _DAY_MS + hour * 3_600_000 + rng.randrange(3_600_000)
            repo = names[bisect(popular, rng.random() * popular[-1])]
            for variants in repos[repo].values():
                job = variants[0] if len(variants) == 1 else rng.choice(variants)
                if job.always or rng.random() < _TOUCHED:
                    yield at_ms, job
            if rng.random() < _MERGED:
                yield from ((at_ms, job) for job in merges.get(repo, ()))
