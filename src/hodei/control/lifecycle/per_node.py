"""Jobs that run once on every node that suits them (`per_node`), like a DaemonSet.

The first run is placed like any job's. From then on the job is looked at whenever something changes: a node that suits it and
has no run of it is wanted, and the job takes its turn in the line of its profile, in the place that it would have if it
still waited there. Each node is on its own: a run that fails is tried again there within the job's `retries`, and the others
go on; a run that must leave its node (lost, drained, tainted, preempted) is over, and starts again when the node has room.
The job is over when every node that suits it has had its run, so one that restarts always never is.

Which node has had what follows from the runs of the job alone, so that after a crash it is found again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from hodei.control.admission.routing import ProfileAvailability
from hodei.control.lifecycle.gangs import gang_goes_on
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, JobSpec, Run
from hodei.model.node import Node
from hodei.model.outcome import job_code_of_run, may_retry, run_failure_class

AT_ONCE = 200
# So many runs of a node are kept in memory: enough for the longest pause between two tries.
ENDED_KEPT = 12
_ALWAYS_PAUSE_MS = 1000


class Left(Struct):
    """What is left to do for a job. `open`: nodes that can take a run now; `tried`: those of them that were tried in this
    step; `full`: those that suit it and have no room, and what they lack; `later`: when each of those may be tried that
    pause; `failed`: the last runs of nodes that are given up; `done`: how many nodes have had their run."""

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
        # Of one step: the jobs looked at, those of each profile that want a node by their place in line, and who said no.
        self._view: View | None = None
        self._looked: dict[JobId, Left] = {}
        self._waiting: dict[str, list[tuple[tuple[int, ...], JobId]]] = {}
        self._refused: dict[JobId, dict[NodeName, str]] = {}
        self._new: set[JobId] = set()
        self._tries = AT_ONCE

    def take_settings(self, other: PerNode) -> None:
        self._retry = other._retry

    def look(self, job: JobId) -> None:
        """Something has become of the job: it is looked at in this step."""
        self._jobs[job] = None
        if self._view is None:
            self._fresh = True
        elif job not in self._looked and not self._is_going(self._cluster.jobs[job]):
            # Its first run was placed just now: the others take their turn in this very step.
            self._new.add(job)
            self._offer(self._cluster.jobs[job], self._left(self._cluster.jobs[job], self._view))

    def next_ms(self) -> int | None:
        return self._next_ms

    # ------------------------------------------------------------------------------------------------ one step

    def begin(
        self,
        view: View,
        woken: bool,
        end: Callable[[Job, Literal["succeeded", "failed"], Run | None], None],
    ) -> None:
        """End the jobs that are over, and learn which nodes the others want. They get them in their turn (`take`)."""
        self._view, self._tries = view, AT_ONCE
        self._looked, self._waiting, self._refused, self._new = {}, {}, {}, set()
        if not self._jobs or not (woken or self._fresh or (self._next_ms or view.now_ms + 1) <= view.now_ms):
            return
        self._fresh, self._next_ms = False, None
        for id in sorted(self._jobs):
            job = self._cluster.jobs.get(id)
            if job is None or job.state not in ("scheduled", "running"):
                del self._jobs[id]
                continue
            if self._is_going(job):
                continue
            left = self._left(job, view)
            if left.over:
                failed = min(left.failed, key=lambda run: (run.finished_ms, run.member), default=None)
                end(job, "failed" if failed else "succeeded", failed)
            else:
                self._offer(job, left)

    def _offer(self, job: Job, left: Left) -> None:
        self._looked[job.id] = left
        if left.open:
            heap = self._waiting.setdefault(self._profile(job.spec).name, [])
            heapq.heappush(heap, (self._gang(job, left.open[0]).order, job.id))

    def first(self, profile: str) -> tuple[int, ...] | None:
        """The place in line of the first member that wants a node; None if none does."""
        heap = self._waiting.get(profile)
        return heap[0][0] if heap and self._tries > 0 else None

    def first_key(self, profile: str) -> tuple[int, int, int] | None:
        """The same among the lines of all profiles: by priority, then by who came first."""
        if self.first(profile) is None:
            return None
        job = self._cluster.jobs[self._waiting[profile][0][1]]
        return -job.spec.priority, job.submitted_ms, job.id

    def take(self, profile: str) -> Gang:
        """That member. It must be placed, or be said to be `refused`, before the next."""
        self._tries -= 1
        heap = self._waiting[profile]
        id = heap[0][1]
        left = self._looked[id]
        node = left.open.pop(0)
        left.tried.append(node)
        if not left.open:
            heapq.heappop(heap)
        return self._gang(self._cluster.jobs[id], node)

    def refused(self, gang: Gang, refusal: Refusal) -> None:
        said, left = self._refused.setdefault(gang.id, {}), self._looked[gang.id]
        whole = next((verdict.reason.text for verdict in refusal.verdicts if not verdict.count), "")
        said[gang.goes_to] = whole or _of_node(refusal, gang.goes_to)
        if whole and left.open:  # a quota, say: it is the same for every node
            said.update(dict.fromkeys(left.open, whole))
            left.tried += left.open
            left.open.clear()
            heap = self._waiting[self._profile(gang.job).name]
            heap.remove(next(entry for entry in heap if entry[1] == gang.id))
            heapq.heapify(heap)

    def finish(self, view: View, availability: ProfileAvailability) -> bool:
        """Say in each job's reason what it lacks. Whether there is more to do at once."""
        more = any(heap for name, heap in self._waiting.items() if name not in availability.paused)
        for id, left in self._looked.items():
            job = self._cluster.jobs.get(id)
            if job is None or job.state not in ("scheduled", "running") or self._is_going(job):
                continue
            if left.tried or id in self._new:
                left = self._left(job, view)
            more |= left.over
            if left.later:
                self._next_ms = min([*left.later.values(), *([self._next_ms] if self._next_ms else [])])
            why = self._refused.get(id, {})
            if (profile := self._profile(job.spec).name) in availability.paused:
                why = dict.fromkeys(left.open, availability.problem(profile))
            self._tell(job, left, why, view.now_ms)
        self._view, self._looked, self._waiting, self._refused = None, {}, {}, {}
        self._fresh |= more
        return more

    def _is_going(self, job: Job) -> bool:
        asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
        return asked or any(
            run.stop_reason is not None and gang_goes_on(run) != "shrink" for run in self._cluster.live_runs(job.id)
        )

    def _left(self, job: Job, view: View) -> Left:
        spec, table = job.spec, self._cluster.table
        member, out = Member(spec, spec.tasks[0]), Left()
        found = objections(self._profile(spec), self._engine.runner, member, table, view)
        shut = table.view().none()
        for mask, reason in found.pairs:
            if not reason.evictable:
                shut = shut | mask
        of_node: dict[NodeName, list[Run]] = {}
        for run in sorted(self._cluster.runs.get(job.id, {}).values(), key=lambda run: run.attempt):
            of_node.setdefault(run.node, []).append(run)
        for name, runs in of_node.items():
            if len(runs) > ENDED_KEPT:
                of_node[name] = self._fewer(spec, runs)
        ready = dict[NodeName, bool]()
        for name, runs in of_node.items():
            ready[name] = self._again(job, runs, out, view.now_ms)
        for row, name in enumerate(table.names):
            if not ready.get(name, True) or shut[row]:
                continue
            if not found.refused[row]:
                out.open.append(name)
            elif _large_enough(table.nodes[row], member):
                out.full[name] = ", ".join(reason.text for mask, reason in found.pairs if mask[row])
        # A node that pauses and does not suit it any more is not waited for.
        known = {name for row, name in enumerate(table.names) if not shut[row]}
        out.later = {name: at_ms for name, at_ms in out.later.items() if name in known}
        return out

    def _fewer(self, spec: JobSpec, runs: list[Run]) -> list[Run]:
        """Of a node whose run ended again and again only the latest are kept in memory. Those that failed are all kept
        where they are counted: there are no more of them than the job has retries."""
        counted = spec.restart != "always"
        older = [run for run in runs[:-ENDED_KEPT] if not (counted and run.state == "failed")]
        for run in older:
            self._cluster.drop_run(run)
        gone = {run.id for run in older}
        return [run for run in runs if run.id not in gone]

    def _again(self, job: Job, runs: list[Run], out: Left, now_ms: int) -> bool:
        """Whether a node that had these runs may have another now."""
        spec, last = job.spec, runs[-1]
        if last.state not in RUN_ENDED:
            out.live += 1
            return False
        pause_ms = 0
        if last.state == "succeeded":
            if spec.restart != "always":
                out.done += 1
                return False
            pause_ms = _ALWAYS_PAUSE_MS
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
        """One more member, for this node. It keeps its number there."""
        runs = self._cluster.runs.get(job.id, {}).values()
        number = next((run.member for run in runs if run.node == node), -1)
        if number < 0:
            number = max((run.member for run in runs), default=-1) + 1
        spec = job.spec
        gang = Gang(
            job.id, spec, job.submitted_ms, (Member(spec, spec.tasks[0]),), ((number,),), ((),),
            queued_ms=job.submitted_ms, joins=True, goes_to=node,
            estimate_ms=self._cluster.estimates.get(job.id) or self._cluster.limit_ms(spec),
        )  # fmt: skip
        self._profile(spec).admit(gang)
        return gang

    def _profile(self, spec: JobSpec) -> Profile:
        return self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]

    def _tell(self, job: Job, left: Left, refused: dict[NodeName, str], now_ms: int) -> None:
        """`refused`: nodes that have room for it, and what keeps it from them."""
        parts, lacking = [], dict[str, list[NodeName]]()
        for name, why in left.full.items():
            lacking.setdefault(why, []).append(name)
        parts += [f"no room now on {_names(names)} ({why})" for why, names in sorted(lacking.items())]
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
            code, text = "PARTIAL", "no node is there for it now; it starts on each that joins"
        if (job.reason_code, job.reason) != (code, text):
            self._cluster.change_job(job, now_ms, reason_code=code, reason=text)


def end_of(failed: Run) -> tuple[str, str]:
    """The reason code and the text of a job that failed on a node."""
    said = failed.reason or f"exited with {failed.exit_code}"
    return job_code_of_run(failed.reason_code), f"on node {failed.node}: {said}"


def _of_node(refusal: Refusal, node: NodeName) -> str:
    """What one node said."""
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
