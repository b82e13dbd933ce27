"""Every performance target, measured on this machine: target, figure, pass or fail.

The column `by` is the kind of measurement:

    pods        the pod scheduler (`hodei kube`) in this process: objects go in, bindings come out and succeed at once. The
                cost of an API server is not included; `make bench-kube` measures it.
    phases      the scheduler of the server, one job at a time, without cached results for the nodes; each decision is
                committed to a real SQLite store. The median of 300 jobs.
    server      a real server in its own process, with its API and its store; jobs end at once
    processes   a real server with its agent; every job is a real process
    simulation  the real scheduler in simulated time: 100 nodes at 90 % load
    engine      a cluster that is filled until nothing fits (`hodei bench fragmentation`)
"""

from __future__ import annotations

import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct

from benchmarks import fragmentation, server
from benchmarks.engine import _peak_mb
from benchmarks.server import running_server
from hodei.client import Client
from hodei.control.controller import Controller
from hodei.model.config import SchedulingConfig
from hodei.model.effects import Start
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import JOB_ENDED, PRIORITY_CLASSES, Job, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.sim.driver import Simulation
from hodei.sim.traces.workload import Arrival, Workload
from hodei.store.sqlite import SqliteStore
from hodei.wiring import make_controller

_DEADLINE_S = 120.0
_NOW_MS = 1_800_000_000_000


class Figure(Struct, frozen=True):
    """`least`: the figure must be at least `target`; otherwise it must be less."""

    name: str
    target: float
    figure: float
    unit: str
    by: str
    least: bool = False
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.figure >= self.target if self.least else self.figure < self.target


def measure(given: SimpleNamespace) -> dict[str, Any]:
    wanted = given.only.split(",") if given.only else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"there is no kind of measurement {unknown[0]!r}; give one of {', '.join(PARTS)}")
    before = os.getloadavg()[0]
    figures = [figure for name in wanted for figure in PARTS[name](10 if given.quick else 1)]
    return {
        "machine": machine(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "quick": given.quick,
        "targets": [
            {
                "target": figure.name, "wanted": figure.target, "figure": figure.figure, "unit": figure.unit,
                "by": figure.by, "least": figure.least, "pass": figure.passed, "note": figure.note,
            }
            for figure in figures
        ],
        "failed": sum(not figure.passed for figure in figures),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    load = " to ".join(f"{each:g}" for each in result["load"])
    print(f"{result['machine']}; load {load}" + ("; at a tenth of the size" if result["quick"] else ""))
    print(f"{'target':<52}{'wanted':>12}{'figure':>12}  {'unit':<10}{'':<6}{'by':<12}")
    for row in result["targets"]:
        sign = ">=" if row["least"] else "<"
        figure = f"{row['figure']:,.0f}" if row["figure"] >= 1000 else f"{row['figure']:g}"
        wanted, verdict = f"{sign} {row['wanted']:,g}", "pass" if row["pass"] else "FAIL"
        line = f"{row['target']:<52}{wanted:>12}{figure:>12}  {row['unit']:<10}{verdict:<6}{row['by']:<12}"
        print(f"{line}{row['note']}".rstrip())
    print(f"{len(result['targets']) - result['failed']} of {len(result['targets'])} pass")


def machine() -> str:
    """The machine, for comparisons of figures."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        kib = next(
            int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
        )
        memory = f", {round(kib / 2**20)} GiB"
    except (OSError, StopIteration):
        memory = ""
    return f"{os.cpu_count()} cores of {model}{memory}, Python {platform.python_version()}"


def _figure(
    name: str, target: float, figure: float, unit: str, by: str, *, least: bool = False, note: str = ""
) -> Figure:
    return Figure(name, target, float(f"{figure:.3g}") if figure < 1000 else round(figure), unit, by, least, note)


def _median(took: Sequence[float]) -> float:
    return sorted(took)[len(took) // 2]


def _p99(took: Sequence[float]) -> float:
    return sorted(took)[min(len(took) - 1, len(took) * 99 // 100)]


def pods(divide: int) -> Iterator[Figure]:
    from hodei.kube.api import objects
    from hodei.kube.scheduler.run import Options, build_scheduler

    nodes, many, alone = 5000 // divide, 10_000 // divide, 500 // divide
    scheduler = build_scheduler(Options())
    allocatable = {"cpu": "32", "memory": "256Gi", "pods": "110"}
    for number in range(nodes):
        name = f"node-{number:05}"
        meta = {"name": name, "labels": {"zone": f"zone-{number % 3}", "kubernetes.io/hostname": name}}
        status = {"allocatable": allocatable}
        node = objects.from_builtins({"metadata": meta, "spec": {}, "status": status}, objects.Node)
        scheduler.pods.node_changed(name, None, node)

    def pod(number: int, *, new_shape: bool) -> objects.Pod:
        memory = f"{500 + number if new_shape else 500}Mi"
        resources = {"requests": {"cpu": "100m", "memory": memory}}
        spec = {"schedulerName": "hodei", "containers": [{"name": "main", "image": "img", "resources": resources}]}
        meta = {"name": f"pod-{number}", "namespace": "default", "uid": f"uid-{number}"}
        return objects.from_builtins({"metadata": meta, "spec": spec, "status": {}}, objects.Pod)

    def run_until_idle() -> int:
        """Run steps until no work is left. Returns the number of bound pods."""
        bound = 0
        while True:
            now_ms = time.time_ns() // 1_000_000
            step = scheduler.controller.step(now_ms, scheduler.pods.take_facts())
            for entry in scheduler.pods.place([act for act in step.acts if isinstance(act, Start)], now_ms):
                scheduler.pods.mark_bound(entry.uid, entry.run)
                bound += 1
            due = scheduler.controller.next_wakeup_ms(now_ms)
            if not scheduler.pods.has_work and (due is None or due > now_ms):
                return bound

    took = []
    for number in range(alone):
        made = pod(number, new_shape=True)
        began = time.perf_counter()
        scheduler.pods.pod_changed(made.metadata.uid, None, made)
        if run_until_idle() != 1:
            raise RuntimeError("a pod was not bound although there is room")
        took.append(time.perf_counter() - began)
    # The first decision builds the tables of all nodes.
    yield _figure(f"one decision with {nodes:,} nodes, the longest", 1, max(took), "s", "pods")
    yield _figure("one pod, scheduler idle, p99", 100, _p99(took[1:]) * 1000, "ms", "pods", note="no API server")
    waiting = [pod(alone + number, new_shape=False) for number in range(many)]
    began = time.perf_counter()
    for made in waiting:
        scheduler.pods.pod_changed(made.metadata.uid, None, made)
    bound = run_until_idle()
    seconds = time.perf_counter() - began
    if bound != many:
        raise RuntimeError(f"only {bound} of {many} pods were bound")
    yield _figure("pods at once", 100, many / seconds, "pods/s", "pods", least=True, note="no API server")
    yield _figure(f"memory with {many:,} pods", 2048, _peak_mb(), "MB", "pods", note="of the whole process")


class _Stopwatch:
    """The time spent in some methods since the last read."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._inside = False

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            if self._inside:  # one calls the other
                return call(*args, **named)
            began, self._inside = time.perf_counter(), True
            try:
                return call(*args, **named)
            finally:
                self._inside = False
                self.spent += time.perf_counter() - began

        return timed

    def read(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent


def phases(divide: int) -> Iterator[Figure]:
    nodes, jobs = 1000 // divide, 300 // divide
    controller = make_controller(SchedulingConfig())
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as home:
        store = SqliteStore(Path(home) / "hodei.db")
        store.open()
        learnt, filtered, scored, bound = (_Stopwatch() for _ in range(4))
        learnt.watch(controller, "_learn")
        runner = controller.engine.runner
        filtered.watch(runner, "refusals", "refused", "refused_by_one")
        scored.watch(runner, "score", "score_of_one", "normalize")
        bound.watch(controller, "_bind")
        joined = [NodeJoined(_node(number)) for number in range(nodes)]
        store.commit(controller.step(_NOW_MS, joined).saves)
        watches = {"informer": learnt, "filter": filtered, "score": scored, "bind": bound}
        for watch in watches.values():
            watch.read()
        bare: list[float] = []
        took: dict[str, list[float]] = {name: [] for name in (*watches, "total")}
        for id in range(1, jobs + 1):
            job = _job(id, cpu=1000, memory=(500 << 20) + id * 4096)
            controller.engine.use(dict(controller.engine.profiles))  # drops all cached results
            bare.append(_sync(Path(home) / "bare"))
            began = time.perf_counter()
            step = controller.step(_NOW_MS + id, [JobSubmitted(job)])
            decided = time.perf_counter()
            if len(step.plan.binds) != 1:
                raise RuntimeError("a job was not placed although there is room")
            store.commit(step.saves)
            committed = time.perf_counter() - decided
            for name, watch in watches.items():
                took[name].append(watch.read() + (committed if name == "bind" else 0))
            took["total"].append(time.perf_counter() - began)
        store.close()
    workers = f"{nodes:,} workers"
    for name, limit in (("informer", 10), ("filter", 20), ("score", 50), ("bind", 10), ("total", 100)):
        note = f"p99 {_p99(took[name]) * 1000:.3g} ms"
        if name in ("bind", "total"):
            note += f"; with the commit to disk, where a bare fsync takes {_median(bare) * 1000:.3g}, p99 {_p99(bare) * 1000:.3g}"
        yield _figure(f"{name} of one job, {workers}", limit, _median(took[name]) * 1000, "ms", "phases", note=note)


def _sync(path: Path) -> float:
    """The time of a bare fsync of one page on this disk."""
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _node(number: int) -> Node:
    name = f"node-{number:05}"
    return Node(name, "bench", capacity={CPU: 32_000, MEMORY: 128 << 30}, labels={"zone": f"zone-{number % 3}"})


def _job(id: int, *, cpu: int, memory: int, priority: int = 500, at_ms: int = _NOW_MS) -> Job:
    spec = JobSpec(name=f"job-{id}", tasks=(TaskSpec(request={CPU: cpu, MEMORY: memory}),), priority=priority)
    return Job(id, spec, "pending", at_ms, at_ms, queued_ms=at_ms)


def through_server(divide: int) -> Iterator[Figure]:
    jobs = 20_000 // divide
    given = SimpleNamespace(
        jobs=jobs, backend="instant", batch=500, clients=2, waiting=0, forecast_every="1m", decision_log="on"
    )
    found = server.measure(given)
    rate, note = found["jobs_per_s"], f"{jobs:,} jobs in {found['seconds']} s"
    yield _figure("jobs from submit to end", 10_000, rate * 60, "jobs/min", "server", least=True, note=note)
    yield _figure("jobs through the queue", 50_000, rate * 3600, "jobs/h", "server", least=True, note="the same run")
    yield _figure(
        "jobs that ended well", 99.5, 100 * (1 - found["failed"] / jobs), "%", "server", least=True, note="the same run"
    )


def processes(divide: int) -> Iterator[Figure]:
    at_once, contested = 120 // divide, 40 // divide
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as home:
        cores = 2 * contested
        (Path(home) / "config.toml").write_text(f'[[nodes]]\nname = "box"\ncpu = {cores}\nmemory = "8Gi"\n')
        with running_server(Path(home)) as (_, client):
            asleep = {"command": ["sleep", "600"], "memory": "1Mi", "grace": "1s"}
            share = {"cpu": f"{1000 * cores // (2 * at_once)}m"}
            ids = client.submit_all([asleep | share | {"name": "sleeper"}] * at_once)
            running = _until(client, ids, "running")
            yield _figure("jobs at once", 100 // divide, running, "jobs", "processes", least=True)
            _end(client, ids)
            # Low jobs fill the node; each critical one needs the capacity of two of them.
            low = client.submit_all([asleep | {"name": "low", "cpu": 1, "priority": "low"}] * cores)
            _until(client, low, "running")
            began = time.monotonic()
            high = client.submit_all([asleep | {"name": "high", "cpu": 2, "priority": "critical"}] * contested)
            started = _until(client, high, "running")
            seconds = time.monotonic() - began
            share_started = 100 * started / contested
            note = f"{started} of {contested} critical jobs preempted low ones in {seconds:.1f} s"
            yield _figure("preemptions that succeed", 100, share_started, "%", "processes", least=True, note=note)
            _end(client, [*high, *low])


def _end(client: Client, ids: Sequence[int]) -> None:
    for id in ids:
        client.cancel(id)
    _until(client, ids, *JOB_ENDED)


def _until(client: Client, ids: Sequence[int], *states: str) -> int:
    """The number of jobs in one of these states, when all are or at the deadline."""
    deadline, wanted = time.monotonic() + _DEADLINE_S, set(ids)
    while True:
        reached = sum(job.id in wanted for job in client.jobs(state=states))
        if reached >= len(ids) or time.monotonic() > deadline:
            return reached
        time.sleep(0.05)


def simulation(divide: int) -> Iterator[Figure]:
    """Jobs of 1 to 16 cores and a few minutes arrive at random, with a load of 90 % of the cluster."""
    jobs, nodes, load, draw = (
        10_000,  # regardless of `divide`: the result depends on the size
        [_node(number) for number in range(100)],
        0.9,
        random.Random(1),
    )
    cores = sum(node.capacity[CPU] for node in nodes) // 1000
    classes = {"high": 0.1, "medium": 0.6, "low": 0.3}
    arrivals, at_ms = [], 0.0
    sizes, minutes = (1, 1, 2, 2, 4, 4, 8, 16), (0.5, 1, 2, 2, 5, 10)
    work = sum(sizes) / len(sizes) * sum(minutes) / len(minutes) * 60_000  # mean of a job: cores times ms
    for id in range(1, jobs + 1):
        at_ms += draw.expovariate(load * cores / work)
        size, run_ms = draw.choice(sizes), round(draw.choice(minutes) * 60_000 * draw.uniform(0.5, 1.5))
        priority = PRIORITY_CLASSES[draw.choices(list(classes), list(classes.values()))[0]]
        spec = _job(id, cpu=size * 1000, memory=size * draw.choice((1, 2, 3)) << 30, priority=priority).spec
        arrivals.append(Arrival(round(at_ms), id, spec, run_ms))
    controller: Controller = make_controller(SchedulingConfig())
    result = Simulation(Workload("targets", arrivals, nodes), controller).run()
    priorities = {arrival.id: arrival.spec.priority for arrival in arrivals}
    started = [outcome for outcome in result.outcomes if outcome.started_ms >= 0]
    waits = [each.wait_ms for each in started if priorities[each.id] == PRIORITY_CLASSES["medium"]]
    note = f"{jobs:,} jobs, {len(nodes)} nodes, {cores:,} cores, load {load:.0%}"
    yield _figure(
        "wait of medium priority, mean", 2, sum(waits) / max(len(waits), 1) / 1000, "s", "simulation", note=note
    )
    # While jobs arrive; before that the cluster fills, and afterwards it drains.
    since, until = arrivals[len(arrivals) // 5].at_ms, arrivals[-1].at_ms
    held = sum(
        outcome.request.get(CPU, 0) / 1000 * max(0, min(outcome.ended_ms, until) - max(outcome.started_ms, since))
        for outcome in started
    )
    yield _figure("utilisation", 85, 100 * held / (cores * (until - since)), "%", "simulation", least=True)
    share = 100 * len(started) / jobs
    yield _figure("jobs that were scheduled", 99.5, share, "%", "simulation", least=True)


def engine(divide: int) -> Iterator[Figure]:
    nodes, seeds = fragmentation.NODES // divide, 1 if divide > 1 else fragmentation.SEEDS
    found = {mix: fragmentation.unusable(mix=mix, nodes=nodes, seeds=seeds) for mix in fragmentation.MIXES}
    note = "the worst of: " + ", ".join(f"{mix} {figure:g}" for mix, figure in found.items())
    yield _figure("fragmentation of a full cluster", 5, max(found.values()), "%", "engine", note=note)


# Memory is that of the whole process, so its measurement comes first.
PARTS: dict[str, Callable[[int], Iterable[Figure]]] = {
    "pods": pods,
    "phases": phases,
    "server": through_server,
    "processes": processes,
    "simulation": simulation,
    "engine": engine,
}


ABOUT = "Every performance target: figure, pass or fail."
OPTIONS = (
    click.option("--only", metavar="BY", help=f"Only these kinds of measurement: {', '.join(PARTS)}."),
    click.option("--quick", is_flag=True, help="A tenth of the size, to check that it works."),
)
