"""NoExecute: work that does not tolerate a node's taint leaves it, at once or when its toleration runs out."""

from __future__ import annotations

import heapq

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.state import ClusterState
from hodei.model.ids import NodeName, RunId
from hodei.model.job import TaskSpec
from hodei.model.node import Node


class TaintEviction:
    def __init__(self, world: ClusterState, lives: JobLifecycle) -> None:
        self._world = world
        self._lives = lives
        # Off where somebody else sends work away for its node's taints (a cluster's own controller).
        self.enabled = True
        self._due: list[tuple[int, NodeName, RunId]] = []

    def look_at(self, name: NodeName, now_ms: int) -> None:
        """A node's taints may have changed: its runs leave now, later, or not at all."""
        node = self._world.table.node(name)
        if not self.enabled or node is None or not any(taint.effect == "NoExecute" for taint in node.taints):
            return
        for id in sorted(self._world.on_node.get(name, ())):
            run = self._world.run(id)
            if run is None or run.stop_requested:
                continue
            patience = tolerated_ms(node, self._world.jobs[run.job].spec.task_of(run.member))
            if patience == 0:
                self._lives.leave(run, "tainted", now_ms)
            elif patience is not None:
                heapq.heappush(self._due, (now_ms + patience, name, id))

    def run_out(self, now_ms: int) -> None:
        while self._due and self._due[0][0] <= now_ms:
            _, name, id = heapq.heappop(self._due)
            run, node = self._world.run(id), self._world.table.node(name)
            # The taint may have gone meanwhile, or the run.
            if run is not None and node is not None and id in self._world.on_node.get(name, ()):
                spec = self._world.jobs[run.job].spec
                if tolerated_ms(node, spec.task_of(run.member)) is not None:
                    self._lives.leave(run, "tainted", now_ms)

    def next_ms(self) -> int | None:
        return self._due[0][0] if self._due else None


def tolerated_ms(node: Node, task: TaskSpec) -> int | None:
    """How long a task may stay on a node: None for ever, 0 not at all, else until its shortest toleration runs out."""
    shortest: int | None = None
    for taint in node.taints:
        if taint.effect != "NoExecute":
            continue
        matching = [toleration for toleration in task.tolerations if toleration.tolerates(taint)]
        if not matching:
            return 0
        limits = [toleration.seconds for toleration in matching if toleration.seconds is not None]
        if limits:
            least = max(min(limits), 0) * 1000
            shortest = least if shortest is None else min(shortest, least)
    return shortest
