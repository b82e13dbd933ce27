"""Jobs that run once on every node that suits them (`per_node`), like a DaemonSet.

The first run is placed like any job's. From then on the job is looked at whenever something changes: a node that suits it and
has no run of it gets one, before anyone who waits in line. Each node is on its own: a run that fails is tried again there
within the job's `retries`, and the others go on; a run whose node is lost, drained or tainted is over. The job is over when
every node that suits it has had its run, so one that restarts always never is.

Which node has had what follows from the runs of the job alone, so that after a crash it is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

from hodei.control.gangs import SHRUNK, marked
from hodei.control.retry import RetryPolicy
from hodei.control.world import World
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.view import Gang, Member, View
from hodei.model.failure import class_of_run, code_of_run, may_retry
from hodei.model.ids import JobId, NodeName
from hodei.model.job import Job, Run
from hodei.model.lifecycle import RUN_ENDED
from hodei.model.node import Node

AT_ONCE = 200
_ALWAYS_PAUSE_MS = 1000


class Left(Struct):
    """What is left to do for a job. `open`: nodes that can take a run now; `full`: those that suit it and have no room;
    `later`: when each of those may be tried that pause; `failed`: the last runs of nodes that are given up; `done`: how many
    nodes have had their run."""

    open: list[NodeName] = []
    full: list[NodeName] = []
    later: dict[NodeName, int] = {}
    failed: list[Run] = []
    live: int = 0
    done: int = 0

    @property
    def over(self) -> bool:
        return not (self.open or self.full or self.later or self.live) and bool(self.failed or self.done)


class PerNode:
    def __init__(self, world: World, engine: Engine, retry: RetryPolicy) -> None:
        self._world, self._engine, self._retry = world, engine, retry
        self._jobs: dict[JobId, None] = {}
        self._fresh = False
        self._next_ms: int | None = None

    def take_settings(self, other: PerNode) -> None:
        self._retry = other._retry

    def look(self, job: JobId) -> None:
        """Something has become of the job: it is looked at in this step."""
        self._jobs[job] = None
        self._fresh = True

    def next_ms(self) -> int | None:
        return self._next_ms

    def turn(
        self,
        view: View,
        woken: bool,
        place: Callable[[Gang], bool],
        end: Callable[[Job, Literal["succeeded", "failed"], Run | None], None],
    ) -> bool:
        """Give runs to nodes that want one, and end the jobs that are over. Whether there is more to do at once."""
        if not self._jobs or not (woken or self._fresh or (self._next_ms or view.now_ms + 1) <= view.now_ms):
            return False
        self._fresh, self._next_ms, tries = False, None, AT_ONCE
        for id in sorted(self._jobs):
            job = self._world.jobs.get(id)
            if job is None or job.state not in ("scheduled", "running"):
                del self._jobs[id]
                continue
            if self._is_going(job):
                continue
            left = self._left(job, view)
            for node in left.open[:tries]:
                left.live += place(self._gang(job, node))
            tries -= min(len(left.open), tries)
            if left.later:
                self._next_ms = min([*left.later.values(), *([self._next_ms] if self._next_ms else [])])
            if left.over:
                failed = min(left.failed, key=lambda run: (run.finished_ms, run.member), default=None)
                end(self._world.jobs[id], "failed" if failed else "succeeded", failed)
            else:
                self._tell(self._world.jobs[id], left, view.now_ms)
        self._fresh = tries <= 0
        return self._fresh

    def _is_going(self, job: Job) -> bool:
        asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
        return asked or any(run.stop_requested and not marked(run, SHRUNK) for run in self._world.live_runs(job.id))

    def _left(self, job: Job, view: View) -> Left:
        spec, table = job.spec, self._world.table
        member, out = Member(spec, spec.tasks[0]), Left()
        profile = self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]
        found = objections(profile, self._engine.runner, member, table, view)
        shut = table.view().none()
        for mask, reason in found.pairs:
            if not reason.evictable:
                shut = shut | mask
        of_node: dict[NodeName, list[Run]] = {}
        for run in sorted(self._world.runs.get(job.id, {}).values(), key=lambda run: run.attempt):
            of_node.setdefault(run.node, []).append(run)
        ready = dict[NodeName, bool]()
        for name, runs in of_node.items():
            ready[name] = self._again(job, runs, out, view.now_ms)
        for row, name in enumerate(table.names):
            if not ready.get(name, True) or shut[row]:
                continue
            if not found.refused[row]:
                out.open.append(name)
            elif _large_enough(table.nodes[row], member):
                out.full.append(name)
        # A node that pauses and does not suit it any more is not waited for.
        known = {name for row, name in enumerate(table.names) if not shut[row]}
        out.later = {name: at_ms for name, at_ms in out.later.items() if name in known}
        return out

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
            wanted = may_retry(spec.retry_on, class_of_run(last.reason_code))
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
        runs = self._world.runs.get(job.id, {}).values()
        number = next((run.member for run in runs if run.node == node), -1)
        if number < 0:
            number = max((run.member for run in runs), default=-1) + 1
        spec = job.spec
        gang = Gang(
            job.id, spec, job.submitted_ms, (Member(spec, spec.tasks[0]),), ((number,),), ((),),
            queued_ms=job.submitted_ms, joins=True, goes_to=node,
            estimate_ms=self._world.estimates.get(job.id) or self._world.limit_ms(spec),
        )  # fmt: skip
        (self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]).admit(gang)
        return gang

    def _tell(self, job: Job, left: Left, now_ms: int) -> None:
        parts = []
        if left.full:
            parts.append(f"no room now on {_names(left.full)}")
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
            self._world.change_job(job, now_ms, reason_code=code, reason=text)


def end_of(failed: Run) -> tuple[str, str]:
    """The reason code and the text of a job that failed on a node."""
    said = failed.reason or f"exited with {failed.exit_code}"
    return code_of_run(failed.reason_code), f"on node {failed.node}: {said}"


def _large_enough(node: Node, member: Member) -> bool:
    return all(
        amount <= node.capacity.get(resource, 0) * node.overcommit_percent.get(resource, 100) // 100
        for resource, amount in member.task.request.items()
    )


def _names(names: Iterable[NodeName]) -> str:
    known = sorted(names)
    return ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
