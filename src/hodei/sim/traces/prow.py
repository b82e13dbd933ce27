"""Prow's job definitions (kubernetes/test-infra) as a CI load: periodics by interval or cron, pushes as bursts.

The definitions say what is asked for and when, not how long it ran or who pushed: those are drawn with a seed.
Options: `days` (1), `seed` (1), `pushes` a day over all repositories (200).
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import accumulate, takewhile
from random import Random

from msgspec import Struct

from hodei.model.cron import Cron, parse_cron
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY, parse_duration_ms, parse_quantity
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Arrival, Workload, machine

COLUMNS = ("kind", "repo", "name", "cpu_request", "mem_request", "interval", "cron", "minimum_interval", "timeout")
_START_MS = round(datetime(2024, 1, 1, tzinfo=UTC).timestamp() * 1000)  # a Monday
_DAY_MS = 86_400_000
_DEFAULT_TIMEOUT_MS = 2 * 3_600_000
_DEFAULT_CPU, _DEFAULT_MEMORY = 1000, 2**30
_MEMORY_PER_CPU = 4 * 2**30
# How much of its timeout a run takes: between a hundredth and all, mostly less than half.
_SHARE = (1.5, 3.0)
_LEAST_RUN_MS = 10_000
# A push runs every job marked always_run, and each other one if it touched the files that the job is about.
_TOUCHED = 0.1
_MERGED = 0.25
# Pushes by hour of the day: few at night, most between 9 and 18 UTC.
_HOURS = (2, 2, 2, 2, 2, 3, 4, 6, 8, 10, 10, 9, 8, 9, 10, 10, 10, 9, 7, 6, 5, 4, 3, 2)


class _Job(Struct, frozen=True):
    kind: str
    repo: str
    spec: JobSpec
    timeout_ms: int
    interval_ms: int
    cron: Cron | None
    always: bool


def read(source: Source, how: Reading) -> Workload:
    days, seed = how.options.whole("days", 1, most=3660), how.options.whole("seed", 1, least=0)
    pushes = how.options.whole("pushes", 200, least=0, most=1_000_000)
    counts: Counter[str] = Counter()
    jobs = list(_jobs(source, counts))
    rng = Random(seed)
    when = [*_periodics(jobs, rng, days), *_pushes(jobs, rng, days, pushes)]
    when.sort(key=lambda pair: pair[0])  # stable: the order of definitions breaks ties
    arrivals = []
    for id, (at_ms, job) in enumerate(when, 1):
        run_ms = max(_LEAST_RUN_MS, round(job.timeout_ms * rng.betavariate(*_SHARE)))
        spec = job.spec if how.estimates == "user" else _with_estimate(job.spec, run_ms)
        arrivals.append(Arrival(at_ms, id, spec, run_ms))
    notes = [
        f"{days} days from Monday midnight with seed {seed}, {pushes} pushes a day spread over repositories and hours",
        "run times are drawn: a share of the timeout, a third of it on average; the timeout is the estimate",
        "limits on how many of a job run at once (max_concurrency) are not kept",
    ]
    notes.extend(f"{count:,} of {len(jobs):,} definitions {what}" for what, count in sorted(counts.items()))
    if how.procs is None:
        notes.append("the definitions do not say what they run on: give processors (with 4Gi each) or a cluster")
    nodes = machine(how.procs, CPU, how.per_node, {MEMORY: _MEMORY_PER_CPU}) if how.procs else []
    return Workload(source.name, arrivals, nodes, notes)


def _with_estimate(spec: JobSpec, run_ms: int) -> JobSpec:
    return JobSpec(name=spec.name, tasks=spec.tasks, project=spec.project, estimate_ms=run_ms)


def _jobs(source: Source, counts: Counter[str]) -> Iterator[_Job]:
    places, rows = source.table(COLUMNS)
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
            cron = parse_cron(cell["cron"]) if cell["cron"] else None
        except InvalidInput as error:
            source.wrong(line, error.message, error.hint)
        counts["without a cpu or memory request: one cpu, one Gi is taken"] += not (
            cell["cpu_request"] and cell["mem_request"]
        )
        counts["without a timeout: two hours are taken"] += not cell["timeout"]
        counts["with a minimum interval: it is taken as the interval"] += bool(cell["minimum_interval"])
        if shape not in tasks:
            tasks[shape] = (TaskSpec(request={CPU: shape[0], MEMORY: shape[1]}),)
        always = always_at is not None and always_at < len(row) and row[always_at] == "True"
        file = row[file_at] if file_at is not None and file_at < len(row) else ""
        project = cell["repo"] or "/".join(file.split("/")[2:4]).removesuffix(".yaml") or "default"
        spec = JobSpec(name=cell["name"], tasks=tasks[shape], project=project, estimate_ms=timeout_ms)
        yield _Job(cell["kind"], cell["repo"], spec, timeout_ms, interval_ms, cron, always)
    for what in [what for what, count in counts.items() if not count]:
        del counts[what]


def _periodics(jobs: list[_Job], rng: Random, days: int) -> Iterator[tuple[int, _Job]]:
    for job in jobs:
        if job.cron is not None:
            # A time of midnight on the first day counts: due times are strictly after the given one.
            for at_ms in takewhile(lambda at: at < _START_MS + days * _DAY_MS, job.cron.times_ms(_START_MS - 1)):
                yield at_ms - _START_MS, job
        elif job.interval_ms:
            # Intervals count from when the job was last seen, which was some time ago.
            for at_ms in range(rng.randrange(job.interval_ms), days * _DAY_MS, job.interval_ms):
                yield at_ms, job


def _pushes(jobs: list[_Job], rng: Random, days: int, pushes: int) -> Iterator[tuple[int, _Job]]:
    """Repositories with more jobs see more pushes; all jobs of a push arrive together."""
    repos: dict[str, dict[str, list[_Job]]] = {}
    merges: dict[str, list[_Job]] = {}
    for job in jobs:
        if job.kind == "presubmits":
            # One name for several branches: a push is to one of them.
            repos.setdefault(job.repo, {}).setdefault(job.spec.name, []).append(job)
        elif job.kind == "postsubmits":
            merges.setdefault(job.repo, []).append(job)
    names = sorted(repos)
    popular = list(accumulate(len(repos[name]) for name in names))
    hours = list(accumulate(_HOURS))
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
