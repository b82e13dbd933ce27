"""What dashboards and alerts for kube-scheduler read, under the same names, and a few of our own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hodei.control.controller import Step
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.kube.scheduler.cache import Refusals
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.pod_reader import at_ms
from hodei.kube.scheduler.pods import Pods

_SHORT = tuple(0.001 * 2**n for n in range(15))
_LONG = tuple(0.01 * 2**n for n in range(20))
_VICTIMS = (1, 2, 4, 8, 16, 32, 64)
_TRIES = (1, 2, 4, 8, 16)


class Metrics:
    """`profile`: the scheduler's name. Times of attempts are those of the whole step, shared evenly by what it tried."""

    def __init__(self, profile: str) -> None:
        self.registry, self._profile = CollectorRegistry(), profile
        r = self.registry
        by = ["result", "profile"]
        self._attempts = Counter("scheduler_schedule_attempts", "Attempts to schedule pods, by result", by, registry=r)
        self._duration = Histogram(
            "scheduler_scheduling_attempt_duration_seconds", "Time of an attempt", by, buckets=_SHORT, registry=r
        )
        self._algorithm = Histogram(
            "scheduler_scheduling_algorithm_duration_seconds", "Time of deciding", buckets=_SHORT, registry=r
        )
        self._binding = Histogram(
            "scheduler_framework_extension_point_duration_seconds", "Time of an extension point",
            ["extension_point", "status", "profile"], buckets=_SHORT, registry=r,
        )  # fmt: skip
        self._until_bound = Histogram(
            "scheduler_pod_scheduling_sli_duration_seconds", "From creation to binding", ["attempts"],
            buckets=_LONG, registry=r,
        )  # fmt: skip
        self._tries = Histogram(
            "scheduler_pod_scheduling_attempts", "Attempts until bound", buckets=_TRIES, registry=r
        )  # fmt: skip
        self._pending = Gauge("scheduler_pending_pods", "Pods that wait, by queue", ["queue"], registry=r)
        self._incoming = Counter(
            "scheduler_queue_incoming_pods", "Pods that came to a queue", ["queue", "event"], registry=r
        )
        self._unschedulable = Gauge(
            "scheduler_unschedulable_pods", "Pods that a plugin refused last", ["plugin", "profile"], registry=r
        )
        self._victims = Histogram(
            "scheduler_preemption_victims", "Pods sent away for one", buckets=_VICTIMS, registry=r
        )  # fmt: skip
        self._preemptions = Counter("scheduler_preemption_attempts", "Attempts to make room", registry=r)
        self._gangs = Counter(
            "scheduler_podgroup_schedule_attempts", "Attempts to schedule groups, by result", by, registry=r
        )
        self._ages = Gauge(
            "hodei_kube_watch_age_seconds", "Since the API was last heard about a collection", ["resource"], registry=r
        )
        self._unusable = Gauge(
            "hodei_kube_refused_objects", "Objects that cannot be used as they are", ["resource"], registry=r
        )
        self._restarts = Counter(
            "hodei_kube_task_restarts", "Tasks that failed and began again", ["task"], registry=r
        )  # fmt: skip
        self.watches: Informers | None = None
        self.refusals: Refusals | None = None
        self._faults: Tally[str] = Tally()
        for queue in ("active", "backoff", "unschedulable", "gated"):
            self._pending.labels(queue).set(0)
        # What is asked for with every pod is looked up once.
        self._bind_done = self._binding.labels("Bind", "Success", profile)
        self._until_bound_after = [self._until_bound.labels(str(tries)) for tries in range(16)]
        self._scheduled = self._attempts.labels("scheduled", profile)
        self._error = self._attempts.labels("error", profile)
        self._refused = self._attempts.labels("unschedulable", profile)
        self._pods: Pods | None = None
        self._arrived = 0
        self._lines: Sequence[SchedulingQueue | BackfillQueue] = ()
        self._plugins: set[str] = set()

    def stepped(
        self,
        step: Step,
        entries: list[Entry],
        took_s: float,
        pods: Pods,
        lines: Sequence[SchedulingQueue | BackfillQueue],
    ) -> None:
        self._pods, self._lines = pods, lines
        if pods.arrivals > self._arrived:
            self._incoming.labels("active", "PodAdd").inc(pods.arrivals - self._arrived)
            self._arrived = pods.arrivals
        plan = step.plan
        # One for whom others go was tried and refused as well, though the plan has no refusal of it.
        victims = Tally(eviction.preemptor for eviction in plan.evictions)
        for number in victims.values():
            self._preemptions.inc()
            self._victims.observe(number)
        refused = len(plan.refusals) + len(victims)
        tried = len({bind.job for bind in plan.binds}) + refused
        if not tried:
            return
        each = took_s / tried
        for result, number in (("scheduled", len(entries)), ("unschedulable", refused)):
            if number:
                duration = self._duration.labels(result, self._profile)
                for _ in range(number):
                    duration.observe(each)
        self._algorithm.observe(each)
        self._refused.inc(refused)
        members = Tally(bind.job for bind in plan.binds)
        for number in members.values():
            if number > 1:
                self._gangs.labels("scheduled", self._profile).inc()
        for refusal in plan.refusals:
            if len(pods.of_job(refusal.job)) > 1:
                self._gangs.labels("unschedulable", self._profile).inc()

    def bound(self, entry: Entry, now_ms: int, took_s: float) -> None:
        self._scheduled.inc()
        tries = 1 + entry.tries
        self._tries.observe(tries)
        self._bind_done.observe(took_s)
        since = at_ms(entry.pod.metadata.creation_timestamp, now_ms)
        self._until_bound_after[min(tries, 15)].observe(max(now_ms - since, 0) / 1000)

    def failed(self) -> None:
        self._error.inc()

    def restarted(self, task: str) -> None:
        self._restarts.labels(task).inc()

    def written(self) -> bytes:
        """As Prometheus reads it; what is a matter of looking is looked at now."""
        if self._pods is not None:
            self._count(self._pods)
        if self.watches is not None:
            for path, age_s in self.watches.ages().items():
                self._ages.labels(path).set(age_s)
            for one in self.watches.reflectors:
                if one.faults > self._faults[one.path]:
                    self._restarts.labels(f"watch {one.path}").inc(one.faults - self._faults[one.path])
                    self._faults[one.path] = one.faults
        if self.refusals is not None:
            now = self.refusals.now()
            for path in self.refusals.total:
                self._unusable.labels(path).set(now[path])
        return generate_latest(self.registry)

    def _count(self, pods: Pods) -> None:
        queues, plugins = Tally[str](), Tally[str]()
        for entry in pods.entries.values():
            if entry.stage == "aside" and entry.wanted.gates and not entry.node:
                queues["gated"] += 1
            elif entry.stage == "aside" and entry.reasons:
                queues["unschedulable"] += 1
                plugins.update({reason.plugin for reason in entry.reasons})
            elif entry.stage in ("queued", "gang"):
                line, gang = next(
                    ((one, one.gangs[entry.id]) for one in self._lines if entry.id in one.gangs), (None, None)
                )
                if line is None or gang is None:
                    queues["active"] += 1
                elif line.backing_off_until(entry.id):
                    queues["backoff"] += 1
                elif (refusal := line.refusal_of(gang)) is not None:
                    queues["unschedulable"] += 1
                    plugins.update({verdict.reason.plugin for verdict in refusal.verdicts})
                else:
                    queues["active"] += 1
        for queue in ("active", "backoff", "unschedulable", "gated"):
            self._pending.labels(queue).set(queues[queue])
        self._plugins |= set(plugins)
        for plugin in self._plugins:
            self._unschedulable.labels(plugin, self._profile).set(plugins[plugin])
