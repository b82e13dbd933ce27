"""kube-scheduler's metrics under the same names, for its dashboards and alerts, and a few of our own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hodei.control.controller import Step
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.kube.scheduler.cache import Refusals
from hodei.kube.scheduler.groups import Entry
from hodei.kube.scheduler.informers import Informers
from hodei.kube.scheduler.pods import Pods
from hodei.kube.scheduler.translate import at_ms

_SHORT = tuple(0.001 * 2**n for n in range(15))
_LONG = tuple(0.01 * 2**n for n in range(20))
_VICTIMS = (1, 2, 4, 8, 16, 32, 64)
_TRIES = (1, 2, 4, 8, 16)


class Metrics:
    """`profile`: the scheduler's name. The time of a step is divided evenly among its attempts."""

    def __init__(self, profile: str, refusals: Refusals) -> None:
        self.registry, self._profile, self._refusals = CollectorRegistry(), profile, refusals
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=_SHORT)
        by = ["result", "profile"]
        self._attempts = counter("scheduler_schedule_attempts", "Attempts to schedule pods, by result", by)
        self._duration = histogram("scheduler_scheduling_attempt_duration_seconds", "Time of an attempt", by)
        self._algorithm = histogram("scheduler_scheduling_algorithm_duration_seconds", "Time of the algorithm")
        self._binding = histogram(
            "scheduler_framework_extension_point_duration_seconds", "Time of an extension point",
            ["extension_point", "status", "profile"],
        )  # fmt: skip
        self._scheduling_time = histogram(
            "scheduler_pod_scheduling_sli_duration_seconds",
            "Time from creation to binding",
            ["attempts"],
            buckets=_LONG,
        )
        self._tries = histogram("scheduler_pod_scheduling_attempts", "Attempts until bound", buckets=_TRIES)
        self._pending = gauge("scheduler_pending_pods", "Pending pods, by queue", ["queue"])
        self._incoming = counter("scheduler_queue_incoming_pods", "Pods added to a queue", ["queue", "event"])
        self._unschedulable = gauge(
            "scheduler_unschedulable_pods", "Pods last refused by a plugin", ["plugin", "profile"]
        )  # fmt: skip
        self._victims = histogram("scheduler_preemption_victims", "Victims of one preemption", buckets=_VICTIMS)
        self._preemptions = counter("scheduler_preemption_attempts", "Preemption attempts")
        self._gangs = counter("scheduler_podgroup_schedule_attempts", "Attempts to schedule pod groups, by result", by)
        self._ages = gauge("hodei_kube_watch_age_seconds", "Time since the last data of a watch", ["resource"])
        self._refused_objects = gauge("hodei_kube_refused_objects", "Objects that cannot be used", ["resource"])
        self._restarts = counter("hodei_kube_task_restarts", "Tasks that failed and restarted", ["task"])
        self.informers: Informers | None = None
        self._faults: Tally[str] = Tally()
        for queue in ("active", "backoff", "unschedulable", "gated"):
            self._pending.labels(queue).set(0)
        # Labels are looked up once, not for every pod.
        self._bind_done = self._binding.labels("Bind", "Success", profile)
        self._scheduling_time_after = [self._scheduling_time.labels(str(attempts)) for attempts in range(16)]
        self._scheduled = self._attempts.labels("scheduled", profile)
        self._error = self._attempts.labels("error", profile)
        self._refused = self._attempts.labels("unschedulable", profile)
        self._pods: Pods | None = None
        self._counted_queued = 0
        self._queues: Sequence[SchedulingQueue | BackfillQueue] = ()
        self._plugins: set[str] = set()

    def stepped(
        self,
        step: Step,
        entries: list[Entry],
        took_s: float,
        pods: Pods,
        queues: Sequence[SchedulingQueue | BackfillQueue],
    ) -> None:
        self._pods, self._queues = pods, queues
        if pods.queued_count > self._counted_queued:
            self._incoming.labels("active", "PodAdd").inc(pods.queued_count - self._counted_queued)
            self._counted_queued = pods.queued_count
        plan = step.plan
        # A preemptor was tried and refused as well, but the plan has no refusal for it.
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
            if len(pods.entries_of(refusal.job)) > 1:
                self._gangs.labels("unschedulable", self._profile).inc()

    def bound(self, entry: Entry, now_ms: int, took_s: float) -> None:
        self._scheduled.inc()
        attempts = 1 + entry.tries
        self._tries.observe(attempts)
        self._bind_done.observe(took_s)
        since = at_ms(entry.pod.metadata.creation_timestamp, now_ms)
        self._scheduling_time_after[min(attempts, 15)].observe(max(now_ms - since, 0) / 1000)

    def failed(self) -> None:
        self._error.inc()

    def restarted(self, task: str) -> None:
        self._restarts.labels(task).inc()

    def render(self) -> bytes:
        """The metrics in Prometheus' text format; gauges are computed now."""
        if self._pods is not None:
            self._count(self._pods)
        if self.informers is not None:
            for path, age_s in self.informers.ages().items():
                self._ages.labels(path).set(age_s)
            for one in self.informers.reflectors:
                if one.faults > self._faults[one.path]:
                    self._restarts.labels(f"watch {one.path}").inc(one.faults - self._faults[one.path])
                    self._faults[one.path] = one.faults
        now = self._refusals.now()
        for path in self._refusals.total:
            self._refused_objects.labels(path).set(now[path])
        return generate_latest(self.registry)

    def _count(self, pods: Pods) -> None:
        queues, plugins = Tally[str](), Tally[str]()
        for entry in pods.entries.values():
            if entry.stage == "inactive" and entry.info.gates and not entry.node:
                queues["gated"] += 1
            elif entry.stage == "inactive" and entry.reasons:
                queues["unschedulable"] += 1
                plugins.update({reason.plugin for reason in entry.reasons})
            elif entry.stage in ("queued", "gang"):
                pending_in, gang = next(
                    ((one, one.gangs[entry.id]) for one in self._queues if entry.id in one.gangs), (None, None)
                )
                if pending_in is None or gang is None:
                    queues["active"] += 1
                elif pending_in.backing_off_until(entry.id):
                    queues["backoff"] += 1
                elif (refusal := pending_in.refusal_of(gang)) is not None:
                    queues["unschedulable"] += 1
                    plugins.update({verdict.reason.plugin for verdict in refusal.verdicts})
                else:
                    queues["active"] += 1
        for queue in ("active", "backoff", "unschedulable", "gated"):
            self._pending.labels(queue).set(queues[queue])
        self._plugins |= set(plugins)
        for plugin in self._plugins:
            self._unschedulable.labels(plugin, self._profile).set(plugins[plugin])
