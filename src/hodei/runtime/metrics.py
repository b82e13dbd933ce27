"""What the house counts about itself, in Prometheus' words. No label ever holds a job's name or id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hodei.control.accounting.accounts import Accounts
from hodei.control.controller import Controller, Step
from hodei.model.effects import Save, SaveEvent, SaveJob
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED
from hodei.model.outcome import failure_class

# ------------------------------------------------------------------------------------- sharing metrics
# Gauges about who has had how much and who may have how much. For as many projects as a person can look at.


# More than so many would be too many series: then there are none, and `hodei share` and `hodei quota` have them all.
_MAX_PROJECTS = 200


class SharingMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.factor = Gauge("hodei_share_factor", "Fair-share factor, 0 to 1", ["account"], registry=registry)
        self.quota = Gauge(
            "hodei_quota_used_ratio",
            "What a project holds of its hard quota",
            ["project", "resource"],
            registry=registry,
        )

    def read(self, accounts: Accounts) -> None:
        self.factor.clear()
        self.quota.clear()
        factors = accounts.sharing.account_factors() if accounts.sharing is not None and accounts.policy.shares else {}
        if len(factors) <= _MAX_PROJECTS:
            for account, milli in factors.items():
                self.factor.labels(account).set(milli / 1000)
        rows = accounts.quota_rows()
        if len({row.project for row in rows}) <= _MAX_PROJECTS:
            for row in rows:
                if row.hard:
                    self.quota.labels(row.project, row.resource).set(row.used / row.hard)


# ----------------------------------------------------------------------------------------------------


_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_ERROR_S = (1, 10, 60, 300, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400, 604_800)
_WAIT_MS = (10, 100, 1000, 5000, 30_000, 60_000, 300_000, 1_800_000, 7_200_000, 86_400_000)
# Per-node gauges are for clusters that a person can look at; larger ones get the sums per backend.
MAX_NODES = 200
_ESCALATION = {"job.moved": "moved", "job.relaxed": "relaxed", "job.promoted": "promoted"}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.latency = Histogram("hodei_scheduling_latency_ms", "Time of one scheduling step", buckets=_MS, registry=r)
        self.commit = Histogram("hodei_commit_duration_ms", "Time of one group commit", buckets=_MS, registry=r)
        self.wait = Histogram("hodei_queue_wait_time_ms", "From submission to placement", buckets=_WAIT_MS, registry=r)
        self.attempts = Counter("hodei_scheduling_attempts", "Gangs tried, by result", ["result"], registry=r)
        self.failures = Counter("hodei_scheduling_failures", "Refused attempts, by reason code", ["code"], registry=r)
        self.gangs = Counter("hodei_gangs_scheduled", "Gangs of more than one member placed whole", registry=r)
        self.retries = Counter("hodei_job_retries", "Jobs put back into the queue, by cause", ["code"], registry=r)
        self.job_failures = Counter(
            "hodei_job_failures", "Jobs that failed, tried again or not, by class", ["failure"], registry=r
        )
        self.submitted = Counter("hodei_jobs_submitted", "Jobs accepted", registry=r)
        self.ended = Counter("hodei_jobs_ended", "Jobs ended, by state", ["state"], registry=r)
        self.preemptions = Counter("hodei_preemptions", "Gangs told to go to make room for others", registry=r)
        self.starts = Counter(
            "hodei_starts", "Jobs of lines that promise starts, by how they came to theirs", ["kind"], registry=r
        )
        self.broken = Counter(
            "hodei_start_reservations_broken", "ReservedStart starts broken by the scheduler itself", registry=r
        )
        self.missed = Counter(
            "hodei_start_reservations_missed",
            "ReservedStart starts that came late for another cause",
            ["cause"],
            registry=r,
        )
        self.forecast_error = Histogram(
            "hodei_forecast_error_seconds", "How far from its P50 a job started", buckets=_ERROR_S, registry=r
        )
        self.forecast_graded = Counter("hodei_forecast_graded", "Forecasts whose job has started", registry=r)
        self.forecast_covered = Counter("hodei_forecast_covered", "Of those, started by its P90", registry=r)
        self.faults = Counter(
            "hodei_plugin_errors", "Plugin failures that were fenced", ["plugin", "point"], registry=r
        )
        self.backend_errors = Counter("hodei_backend_errors", "Failed calls to a backend", ["backend"], registry=r)
        self.backend_up = Gauge(
            "hodei_backend_up", "1 while a backend is well and not disabled", ["backend"], registry=r
        )
        self.depending = Gauge(
            "hodei_jobs_waiting_for_dependencies", "Jobs that wait for other jobs or data", registry=r
        )
        self.pending = Gauge("hodei_queue_length", "Jobs waiting, by profile", ["profile"], registry=r)
        self.breaker = Gauge(
            "hodei_retry_breaker_open",
            "1 while a full cluster makes a line be tried less often",
            ["profile"],
            registry=r,
        )
        self.escalation = Counter(
            "hodei_escalations",
            "Jobs helped because they waited too long: moved, relaxed, promoted",
            ["kind"],
            registry=r,
        )
        self.logins = Counter(
            "hodei_auth_failures", "Calls refused for want of a valid token, by what was wrong", ["reason"], registry=r
        )
        self.sharing = SharingMetrics(r)
        self.running = Gauge("hodei_runs_active", "Runs placed or running", registry=r)
        self.nodes = Gauge("hodei_nodes", "Nodes, by state", ["state"], registry=r)
        self.used = Gauge(
            "hodei_node_allocation_ratio", "Share of a node's resource in use", ["node", "resource"], registry=r
        )
        self.node_used = Gauge(
            "hodei_node_used", "What is used on a node as measured", ["backend", "node", "resource"], registry=r
        )
        self.allocated = Gauge("hodei_allocation_ratio", "Share of all capacity in use", ["resource"], registry=r)
        self.stuck = Gauge("hodei_fragmentation_ratio", "Share of free cpu on nodes that are nearly full", registry=r)
        self.pruned = Counter(
            "hodei_pruned", "Records forgotten because they are old: jobs, loose, audit", ["what"], registry=r
        )
        self.retention_held = Gauge(
            "hodei_retention_held", "1 while the clock is not believed and so forgets nothing", registry=r
        )
        self.damaged = Gauge("hodei_damaged_records", "Records that could not be read and were set aside", registry=r)
        self.beat = Gauge("hodei_last_step_timestamp_seconds", "When the scheduler last went round", registry=r)

    def decided(self, step: Step, seconds: float, commit_seconds: float) -> dict[JobId, int]:
        """How many members of which jobs were placed."""
        self.latency.observe(seconds * 1000)
        if step.saves:
            self.commit.observe(commit_seconds * 1000)
        placed: dict[JobId, int] = {}
        for bind in step.plan.binds:
            if bind.kind and bind.job not in placed:
                self.starts.labels(bind.kind).inc()
            placed[bind.job] = placed.get(bind.job, 0) + 1
        if placed:
            self.attempts.labels("scheduled").inc(len(placed))
            self.gangs.inc(sum(members > 1 for members in placed.values()))
        for refusal in step.plan.refusals:
            self.attempts.labels("refused").inc()
            self.failures.labels(refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES").inc()
        self.preemptions.inc(len(step.plan.evictions))
        for fault in step.plan.faults:
            self.faults.labels(fault.plugin, fault.point).inc()
        return placed

    def saved(self, saves: Sequence[Save], placed: Mapping[JobId, int]) -> None:
        new, ended = 0, dict[str, int]()
        for save in saves:
            if isinstance(save, SaveJob):
                job = save.job
                new += save.new
                if job.id in placed:
                    self.wait.observe(max(0, job.scheduled_ms - (job.queued_ms or job.submitted_ms)))
                if job.state in JOB_ENDED:
                    ended[job.state] = ended.get(job.state, 0) + 1
                    if job.failure:
                        self.job_failures.labels(job.failure).inc()
                elif job.state == "pending" and job.attempt and job.queued_ms == job.changed_ms:
                    self.retries.labels(job.reason_code).inc()
                    if failure_class(job.reason_code):
                        self.job_failures.labels(failure_class(job.reason_code)).inc()
            elif isinstance(save, SaveEvent):
                if save.event.kind == "start_reservation.missed":
                    cause = save.event.detail["cause"]
                    (self.broken if cause == "broken" else self.missed.labels(cause)).inc()
                elif save.event.kind in _ESCALATION:
                    self.escalation.labels(_ESCALATION[save.event.kind]).inc()
        self.submitted.inc(new)
        for state, jobs in ended.items():
            self.ended.labels(state).inc(jobs)

    def render(self, controller: Controller) -> bytes:
        """The gauges are read off the world when someone asks, not kept up all the time."""
        table = controller.cluster.table
        table.settle()
        self.depending.set(len(controller.dependencies))
        for name, count in controller.pending().items():
            self.pending.labels(name).set(count)
        for name in controller.queues:
            breaker = controller.profile_router.breakers.of.get(name)
            self.breaker.labels(name).set(breaker is not None and breaker.open)
        self.running.set(int(table.runs.sum()) if len(table.runs) else 0)
        states = [("ready" if node.ready and not node.cordoned else "cordoned" if node.ready else "not-ready")
                  for node in table.nodes]  # fmt: skip
        for state in ("ready", "cordoned", "not-ready"):
            self.nodes.labels(state).set(states.count(state))
        view = table.view()
        self.used.clear()
        for resource in table.column:
            capacity, used = view.capacity(resource), view.used(resource)
            total = int(capacity.sum())
            if total:
                self.allocated.labels(resource).set(int(used.sum()) / total)
                if len(table.names) <= MAX_NODES:
                    for row, node in enumerate(table.names):
                        if capacity[row]:
                            self.used.labels(node, resource).set(int(used[row]) / int(capacity[row]))
        free, whole = view.free("cpu"), view.capacity("cpu")
        scraps = int(free[(free > 0) & (free * 10 < whole)].sum())
        self.stuck.set(scraps / int(free.sum()) if int(free.sum()) > 0 else 0)
        self.sharing.read(controller.accounts)
        self.beat.set(controller.beat_ms / 1000)
        return generate_latest(self.registry)
