"""The parts of the pod scheduler with facts fed by hand: bindings succeed at once, the clock stands still.

It does not prove what an API server does or when, nor that reports arrive: none is sent.
"""

from __future__ import annotations

from typing import Any

from hodei.control.controller import Step
from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.run import Options, PodScheduler, build_scheduler
from hodei.model.effects import Start
from unit.kube.pod_factory import a_node, a_pod

NOW_MS = 1_790_000_000_000  # 2026-09-21T14:13:20Z


class FakeCluster:
    def __init__(self, options: Options | None = None) -> None:
        self.parts: PodScheduler = build_scheduler(options or Options())
        self.now_ms = NOW_MS
        self.parts.pods._now_ms = lambda: self.now_ms
        self.pods: dict[str, Pod] = {}

    def node(self, name: str, cpu: str = "4", **fields: Any) -> None:
        self.parts.pods.node_changed(
            name, None, a_node(name, allocatable={"cpu": cpu, "memory": "64Gi", "pods": "110"}, **fields)
        )

    def pod(self, name: str, cpu: str = "1", *, estimate: str = "", **fields: Any) -> str:
        """A pending pod, or one with a node (`nodeName`); returns its uid."""
        annotations = {**fields.pop("annotations", {}), **({"hodei.io/estimate": estimate} if estimate else {})}
        fields.setdefault("schedulerName", "hodei")
        pod = a_pod(name, requests={"cpu": cpu, "memory": "1Gi"}, annotations=annotations, **fields)
        self.update(pod)
        return pod.metadata.uid

    def update(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self.parts.pods.pod_changed(uid, self.pods.get(uid), pod)
        self.pods[uid] = pod

    def delete(self, name: str) -> None:
        self.parts.pods.pod_changed(f"uid-{name}", self.pods.pop(f"uid-{name}"), None)

    def step(self, *facts: Any) -> Step:
        """Step until nothing is left to decide, and bind what was placed."""
        self.parts.pods.add_facts(facts)
        while True:
            step = self.parts.controller.step(self.now_ms, self.parts.pods.take_facts())
            for entry in self.parts.pods.place([act for act in step.acts if isinstance(act, Start)], self.now_ms):
                self.parts.pods.mark_bound(entry.uid, entry.run)
            due = self.parts.controller.next_wakeup_ms(self.now_ms)
            if not self.parts.pods.has_work and (due is None or due > self.now_ms):
                return step

    def node_of(self, name: str) -> str:
        entry = self.parts.pods.entries[f"uid-{name}"]
        return entry.node if entry.assigned else ""

    def job(self, name: str) -> int:
        return self.parts.pods.entries[f"uid-{name}"].id
