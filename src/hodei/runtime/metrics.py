"""Prometheus metrics of the server. No label holds the name or id of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hodei.control.accounting.accounts import Accounts
from hodei.control.controller import Controller, Step
from hodei.model.effects import Save, SaveEvent, SaveJob, SaveRun
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.outcome import failure_class
from hodei.model.resources import CPU, MEMORY

# With more projects there would be too many series; `hodei share` and `hodei quota` show all of them.
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

    def update(self, accounts: Accounts) -> None:
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


_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
_ERROR_S = (1, 10, 60, 300, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400, 604_800)
_WAIT_MS = (10, 100, 1000, 5000, 30_000, 60_000, 300_000, 1_800_000, 7_200_000, 86_400_000)
# Larger clusters have no gauges per node, only totals.
MAX_NODES = 200
_SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.5, 2)
_ESCALATION = {"job.moved": "moved", "job.relaxed": "relaxed", "job.promoted": "promoted"}


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.latency = histogram("hodei_scheduling_latency_ms", "Time of one scheduling step", buckets=_MS)
        self.commit = histogram("hodei_commit_duration_ms", "Time of one group commit", buckets=_MS)
        self.wait = histogram("hodei_queue_wait_time_ms", "From submission to placement", buckets=_WAIT_MS)
        self.attempts = counter("hodei_scheduling_attempts", "Gangs tried, by result", ["result"])
        self.failures = counter("hodei_scheduling_failures", "Refused attempts, by reason code", ["code"])
        self.gangs = counter("hodei_gangs_scheduled", "Gangs of more than one member placed whole")
        self.retries = counter("hodei_job_retries", "Jobs put back into the queue, by cause", ["code"])
        self.job_failures = counter("hodei_job_failures", "Jobs that failed, tried again or not, by class", ["failure"])
        self.submitted = counter("hodei_jobs_submitted", "Jobs accepted")
        self.ended = counter("hodei_jobs_ended", "Jobs ended, by state", ["state"])
        self.preemptions = counter("hodei_preemptions", "Gangs preempted for others")
        self.starts = counter(
            "hodei_starts", "Jobs started from queues with start reservations, by kind of start", ["kind"]
        )
        self.broken = counter("hodei_start_reservations_broken", "Start reservations broken by the scheduler itself")
        self.missed = counter(
            "hodei_start_reservations_missed", "Start reservations missed for another cause", ["cause"]
        )
        self.forecast_error = histogram(
            "hodei_forecast_error_seconds", "How far from its P50 a job started", buckets=_ERROR_S
        )
        self.forecast_graded = counter("hodei_forecast_graded", "Forecasts whose job has started")
        self.forecast_covered = counter("hodei_forecast_covered", "Forecasts whose job started by its P90")
        self.plugin_errors = counter("hodei_plugin_errors", "Plugin failures that were contained", ["plugin", "point"])
        self.backend_errors = counter("hodei_backend_errors", "Failed calls to a backend", ["backend"])
        self.backend_up = gauge("hodei_backend_up", "1 while a backend is healthy and not disabled", ["backend"])
        self.depending = gauge("hodei_jobs_waiting_for_dependencies", "Jobs that wait for other jobs or data")
        self.pending = gauge("hodei_queue_length", "Jobs waiting, by profile", ["profile"])
        self.breaker = gauge(
            "hodei_retry_breaker_open", "1 while a queue is retried less often because the cluster is full", ["profile"]
        )
        self.escalation = counter(
            "hodei_escalations", "Escalations of jobs that waited too long: moved, relaxed, promoted", ["kind"]
        )
        self.auth_failures = counter(
            "hodei_auth_failures", "Requests refused for lack of a valid token, by reason", ["reason"]
        )
        self.sharing = SharingMetrics(self.registry)
        self.running = gauge("hodei_runs_active", "Runs placed or running")
        self.nodes = gauge("hodei_nodes", "Nodes, by state", ["state"])
        self.used = gauge("hodei_node_allocation_ratio", "Share of a node's resource in use", ["node", "resource"])
        self.node_used = gauge("hodei_node_used", "Measured usage of a node", ["backend", "node", "resource"])
        self.allocated = gauge("hodei_allocation_ratio", "Share of all capacity in use", ["resource"])
        self.fragmentation = gauge("hodei_fragmentation_ratio", "Share of free cpu on nodes that are nearly full")
        self.pruned = counter("hodei_pruned", "Records pruned because of their age: jobs, loose, audit", ["what"])
        self.retention_held = gauge(
            "hodei_retention_held", "1 while retention does not trust the clock and prunes less"
        )
        self.damaged = gauge("hodei_damaged_records", "Records that could not be read and were quarantined")
        self.last_step = gauge("hodei_last_step_timestamp_seconds", "Time of the last scheduling step")
        self.cpu_requested = counter(
            "hodei_cpu_requested_seconds", "Cores requested by ended runs, times their run time", ["project"]
        )
        self.cpu_used = counter("hodei_cpu_used_seconds", "CPU time used by ended runs", ["project"])
        self.cpu_share = histogram(
            "hodei_run_cpu_used_ratio", "Used share of the cpu request of ended runs", buckets=_SHARES
        )
        self.memory_share = histogram(
            "hodei_run_memory_used_ratio", "Peak memory of ended runs over their request", buckets=_SHARES
        )
        self._projects: set[str] = set()

    def decided(self, step: Step, seconds: float, commit_seconds: float) -> dict[JobId, int]:
        """Counts one step; returns the number of placed members by job."""
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
            self.plugin_errors.labels(fault.plugin, fault.point).inc()
        return placed

    def saved(self, saves: Sequence[Save], placed: Mapping[JobId, int]) -> None:
        new, ended = 0, dict[str, int]()
        for save in saves:
            if isinstance(save, SaveJob):
                job = save.job
                new += save.new
                if job.id in placed:
                    self.wait.observe(max(0, job.scheduled_ms - job.waiting_since_ms))
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

    def runs_ended(self, saves: Sequence[Save], jobs: Mapping[JobId, Job]) -> None:
        """Counts the usage of the runs that ended in a step. `jobs`: those that are still active."""
        measured = [save.run for save in saves if isinstance(save, SaveRun) and save.run.usage is not None]
        if not measured:
            return
        saved = {save.job.id: save.job for save in saves if isinstance(save, SaveJob)}
        for run in measured:
            job, usage = saved.get(run.job) or jobs.get(run.job), run.usage
            if job is None or usage is None or not job.spec.has_member(run.member):
                continue
            request, ran_ms = job.spec.task_of(run.member).request, max(run.finished_ms - run.started_ms, 0)
            if usage.cpu_ms is not None:
                project = self._project_label(job.spec.project)
                wanted_s = request.get(CPU, 0) * ran_ms / 1_000_000
                self.cpu_requested.labels(project).inc(wanted_s)
                self.cpu_used.labels(project).inc(usage.cpu_ms / 1000)
                if wanted_s:
                    self.cpu_share.observe(usage.cpu_ms / 1000 / wanted_s)
            if usage.peak_memory is not None and request.get(MEMORY):
                self.memory_share.observe(usage.peak_memory / request[MEMORY])

    def _project_label(self, project: str) -> str:
        """The first 200 projects have series of their own, all others share one."""
        if project not in self._projects:
            if len(self._projects) >= _MAX_PROJECTS:
                return "other"
            self._projects.add(project)
        return project

    def render(self, controller: Controller) -> bytes:
        """Sets the gauges from the current state: they are computed only for a scrape."""
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
        free, capacity = view.free("cpu"), view.capacity("cpu")
        fragments = int(free[(free > 0) & (free * 10 < capacity)].sum())
        self.fragmentation.set(fragments / int(free.sum()) if int(free.sum()) > 0 else 0)
        self.sharing.update(controller.accounts)
        self.last_step.set(controller.beat_ms / 1000)
        return generate_latest(self.registry)
