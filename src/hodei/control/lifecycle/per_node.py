"""Per-node jobs: one run on every matching node (`per_node`), like a DaemonSet.

The first run is placed like any other. From then on the job is checked whenever something changes: for each matching
node without a run of it, a member takes its turn in the queue of its profile, at the position that the job would have.
Nodes are independent: a failed run is retried on its node within the `retries` of the job; a run that was stopped there
(lost, drained, tainted, preempted) starts again when the node has capacity. The job ends when every matching node has
had its run, so one with `restart: always` never ends.

All of this follows from the runs of the job alone, so that it is the same after a restart.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from msgspec import Struct

from hodei.control.admission.routing import ProfileAvailability
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.lifecycle.runs import gang_action
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, JobSpec, Move, Run
from hodei.model.node import Node
from hodei.model.outcome import job_code_of_run, may_retry, run_failure_class

# Members that are tried in one step.
MAX_TRIES = 200
# Ended runs of a node that are kept in memory: enough for the longest backoff.
ENDED_KEPT = 12
_RESTART_PAUSE_MS = 1000


class Remaining(Struct):
    """What is left to do for a job. `open`: nodes that can take a run now; `tried`: those that were tried in this step;
    `full`: matching nodes without capacity, with the shortage; `later`: nodes that back off, with the end of the pause;
    `failed`: the last runs on nodes without retries left; `done`: the number of nodes that have had their run."""

    open: list[NodeName] = []
    tried: list[NodeName] = []
    full: dict[NodeName, str] = {}
    later: dict[NodeName, int] = {}
    failed: list[Run] = []
    live: int = 0
    done: int = 0

    @property
    def over(self) -> bool:
        return not (self.open or self.full or self.later or self.live) and bool(self.failed or self.done)


class PerNode:
    def __init__(self, cluster: ClusterState, engine: Engine, retry: RetryPolicy) -> None:
        self._cluster, self._engine, self._retry = cluster, engine, retry
        self._jobs: dict[JobId, None] = {}
        self._fresh = False
        self._next_ms: int | None = None
        # Within a step: what is left to do for each job, the jobs of each profile with open nodes in queue order, and
        # the refusals by node.
        self._view: View | None = None
        self._remaining: dict[JobId, Remaining] = {}
        self._waiting: dict[str, list[tuple[tuple[int, ...], JobId]]] = {}
        self._refused: dict[JobId, dict[NodeName, str]] = {}
        self._new: set[JobId] = set()
        self._tries_left = MAX_TRIES

    def take_settings(self, other: PerNode) -> None:
        self._retry = other._retry

    def update(self, job: JobId) -> None:
        """A run of the job has changed: check it in this step."""
        self._jobs[job] = None
        if self._view is None:
            self._fresh = True
        elif job not in self._remaining and not self._is_stopping(self._cluster.jobs[job]):
            # Its first run was placed just now: the other nodes take their turn in the same step.
            self._new.add(job)
            self._offer(self._cluster.jobs[job], self._remaining_for(self._cluster.jobs[job], self._view))

    def next_ms(self) -> int | None:
        return self._next_ms

    def begin(self, view: View, woken: bool) -> list[tuple[Job, Run | None]]:
        """Find the open nodes of all jobs; members for them are tried in their turn (`take`). Returns the jobs that are
        over, each with the run that failed first, if any."""
        self._view, self._tries_left = view, MAX_TRIES
        self._remaining, self._waiting, self._refused, self._new = {}, {}, {}, set()
        over: list[tuple[Job, Run | None]] = []
        if not self._jobs or not (woken or self._fresh or (self._next_ms or view.now_ms + 1) <= view.now_ms):
            return over
        self._fresh, self._next_ms = False, None
        for id in sorted(self._jobs):
            job = self._cluster.jobs.get(id)
            if job is None or job.state not in ("scheduled", "running"):
                del self._jobs[id]
                continue
            if self._is_stopping(job):
                continue
            left = self._remaining_for(job, view)
            if left.over:
                over.append((job, min(left.failed, key=lambda run: (run.finished_ms, run.member), default=None)))
            else:
                self._offer(job, left)
        return over

    def _offer(self, job: Job, left: Remaining) -> None:
        self._remaining[job.id] = left
        if left.open:
            heap = self._waiting.setdefault(self._profile(job.spec).name, [])
            heapq.heappush(heap, (self._gang(job, left.open[0]).order, job.id))

    def first(self, profile: str) -> tuple[int, ...] | None:
        """The queue order of the first member to try; None if there is none."""
        heap = self._waiting.get(profile)
        return heap[0][0] if heap and self._tries_left > 0 else None

    def first_key(self, profile: str) -> tuple[int, int, int] | None:
        """The same for the order over the queues of all profiles: by priority, then by submission."""
        if self.first(profile) is None:
            return None
        job = self._cluster.jobs[self._waiting[profile][0][1]]
        return -job.spec.priority, job.submitted_ms, job.id

    def take(self, profile: str) -> Gang:
        """The first member. The caller must place it or call `refused` before it takes the next."""
        self._tries_left -= 1
        heap = self._waiting[profile]
        id = heap[0][1]
        left = self._remaining[id]
        node = left.open.pop(0)
        left.tried.append(node)
        if not left.open:
            heapq.heappop(heap)
        return self._gang(self._cluster.jobs[id], node)

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        assert gang.move is not None, "a member of a per-node job is tried on one node"
        refused, left, node = self._refused.setdefault(gang.id, {}), self._remaining[gang.id], gang.move.to
        everywhere = next((verdict.reason.text for verdict in refusal.verdicts if not verdict.count), "")
        refused[node] = everywhere or _node_refusal(refusal, node)
        if everywhere and left.open:  # such as a quota: the same for every node
            refused.update(dict.fromkeys(left.open, everywhere))
            left.tried += left.open
            left.open.clear()
            heap = self._waiting[self._profile(gang.job).name]
            heap.remove(next(entry for entry in heap if entry[1] == gang.id))
            heapq.heapify(heap)

    def finish(self, view: View, availability: ProfileAvailability) -> bool:
        """Set the reason of each job to what it lacks. Returns whether another step has to follow at once."""
        more = any(heap for name, heap in self._waiting.items() if name not in availability.paused)
        for id, left in self._remaining.items():
            job = self._cluster.jobs.get(id)
            if job is None or job.state not in ("scheduled", "running") or self._is_stopping(job):
                continue
            if left.tried or id in self._new:
                left = self._remaining_for(job, view)
            more |= left.over
            if left.later:
                self._next_ms = min([*left.later.values(), *([self._next_ms] if self._next_ms else [])])
            why = self._refused.get(id, {})
            if (profile := self._profile(job.spec).name) in availability.paused:
                why = dict.fromkeys(left.open, availability.problem(profile))
            self._set_reason(job, left, why, view.now_ms)
        self._view, self._remaining, self._waiting, self._refused = None, {}, {}, {}
        self._fresh |= more
        return more

    def _is_stopping(self, job: Job) -> bool:
        return job.stop_requested or any(
            run.stop_reason is not None and gang_action(run) != "shrink" for run in self._cluster.live_runs(job.id)
        )

    def _remaining_for(self, job: Job, view: View) -> Remaining:
        spec, table = job.spec, self._cluster.table
        member, out = Member(spec, spec.tasks[0]), Remaining()
        found = objections(self._profile(spec), self._engine.runner, member, table, view)
        unsuitable = table.view().none()
        for mask, reason in found.pairs:
            if not reason.evictable:
                unsuitable = unsuitable | mask
        of_node: dict[NodeName, list[Run]] = {}
        for run in sorted(self._cluster.runs.get(job.id, {}).values(), key=lambda run: run.attempt):
            of_node.setdefault(run.node, []).append(run)
        for name, runs in of_node.items():
            if len(runs) > ENDED_KEPT:
                of_node[name] = self._drop_old_runs(spec, runs)
        ready = dict[NodeName, bool]()
        for name, runs in of_node.items():
            ready[name] = self._may_run_again(job, runs, out, view.now_ms)
        for row, name in enumerate(table.names):
            if not ready.get(name, True) or unsuitable[row]:
                continue
            if not found.refused[row]:
                out.open.append(name)
            elif _large_enough(table.nodes[row], member):
                out.full[name] = ", ".join(reason.text for mask, reason in found.pairs if mask[row])
        # A node that backs off is not waited for if it does not match any more.
        suitable = {name for row, name in enumerate(table.names) if not unsuitable[row]}
        out.later = {name: at_ms for name, at_ms in out.later.items() if name in suitable}
        return out

    def _drop_old_runs(self, spec: JobSpec, runs: list[Run]) -> list[Run]:
        """Keep the latest runs of a node in memory, and all failed ones if they count; the retries limit these."""
        counted = spec.restart != "always"
        older = [run for run in runs[:-ENDED_KEPT] if not (counted and run.state == "failed")]
        for run in older:
            self._cluster.drop_run(run)
        dropped = {run.id for run in older}
        return [run for run in runs if run.id not in dropped]

    def _may_run_again(self, job: Job, runs: list[Run], out: Remaining, now_ms: int) -> bool:
        """Whether a node that has had these runs may have another one now."""
        spec, last = job.spec, runs[-1]
        if last.state not in RUN_ENDED:
            out.live += 1
            return False
        pause_ms = 0
        if last.state == "succeeded":
            if spec.restart != "always":
                out.done += 1
                return False
            pause_ms = _RESTART_PAUSE_MS
        elif last.state == "failed":
            failures = sum(run.state == "failed" for run in runs)
            again = spec.restart == "always" or (spec.restart == "on_failure" and failures <= spec.retries)
            wanted = may_retry(spec.retry_on, run_failure_class(last.reason_code))
            if not again or not wanted or last.reason_code == "permanent":
                out.failed.append(last)
                return False
            pause_ms = self._retry.failed_run.pause_ms(job.id, failures)
        elif last.state == "lost":
            pause_ms = self._retry.failed_start.pause_ms(job.id, sum(run.state == "lost" for run in runs))
        if last.finished_ms + pause_ms > now_ms:
            out.later[last.node] = last.finished_ms + pause_ms
            return False
        return True

    def _gang(self, job: Job, node: NodeName) -> Gang:
        """A member for this node. A node keeps its member number."""
        runs = self._cluster.runs.get(job.id, {}).values()
        number = next((run.member for run in runs if run.node == node), -1)
        if number < 0:
            number = max((run.member for run in runs), default=-1) + 1
        spec = job.spec
        gang = Gang(
            job.id, spec, job.submitted_ms, (Member(spec, spec.tasks[0]),), ((number,),), ((),),
            queued_ms=job.submitted_ms, is_joining=True, move=Move(node),
            estimate_ms=self._cluster.estimates.get(job.id) or self._cluster.limit_ms(spec),
        )  # fmt: skip
        self._profile(spec).admit(gang)
        return gang

    def _profile(self, spec: JobSpec) -> Profile:
        return self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]

    def _set_reason(self, job: Job, left: Remaining, refused: dict[NodeName, str], now_ms: int) -> None:
        """`refused`: nodes with capacity for it, and what prevents the run there."""
        parts, lacking = [], dict[str, list[NodeName]]()
        for name, why in left.full.items():
            lacking.setdefault(why, []).append(name)
        parts += [f"no capacity now on {_names(names)} ({why})" for why, names in sorted(lacking.items())]
        lacking = {}
        for name in left.open:
            if why := refused.get(name, ""):
                lacking.setdefault(why, []).append(name)
        parts += [f"not on {_names(names)} ({why})" for why, names in sorted(lacking.items())]
        if left.later:
            parts.append(f"{len(left.later)} to be tried again after a pause")
        if left.failed:
            parts.append(f"failed on {_names(run.node for run in left.failed)}")
        if left.done:
            parts.append(f"done on {left.done}")
        code, text = "", ""
        if parts:
            code, text = "PARTIAL", f"runs on {left.live} node{'' if left.live == 1 else 's'}; {'; '.join(parts)}"
        elif not left.live:
            code, text = "PARTIAL", "no node matches now; it starts on each matching node that joins"
        self._cluster.set_reason(job, code, text, now_ms)


def failure_of(failed: Run) -> tuple[str, str]:
    """The reason code and the text of a job that failed on a node."""
    text = failed.reason or f"exited with {failed.exit_code}"
    return job_code_of_run(failed.reason_code), f"on node {failed.node}: {text}"


def _node_refusal(refusal: Refusal, node: NodeName) -> str:
    here = [verdict.reason.text for verdict in refusal.verdicts if node in verdict.nodes]
    return ", ".join(here or [verdict.reason.text for verdict in refusal.verdicts])


def _large_enough(node: Node, member: Member) -> bool:
    return all(
        amount <= node.capacity.get(resource, 0) * node.overcommit_percent.get(resource, 100) // 100
        for resource, amount in member.task.request.items()
    )


def _names(names: Iterable[NodeName]) -> str:
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
