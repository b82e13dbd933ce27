"""A cluster without a cluster: the parts of the pod scheduler fed by hand, bindings that succeed at once, a clock that stands.

It does not prove what an API server does or when it does it, nor that reports arrive: none is sent.
"""

from __future__ import annotations

from typing import Any

from hodei.control.controller import Step
from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.build import Options, PodSchedulerParts, build_scheduler
from hodei.model.effects import Start
from unit.kube.podding import a_node, a_pod

NOW_MS = 1_790_000_000_000  # 2026-09-21T14:13:20Z


class Town:
    def __init__(self, options: Options | None = None) -> None:
        self.harness: PodSchedulerParts = build_scheduler(options or Options())
        self.now_ms = NOW_MS
        self.harness.pods._now_ms = lambda: self.now_ms
        self.pods: dict[str, Pod] = {}

    def node(self, name: str, cpu: str = "4", **fields: Any) -> None:
        self.harness.pods.node_moved(
            name, None, a_node(name, allocatable={"cpu": cpu, "memory": "64Gi", "pods": "110"}, **fields)
        )

    def pod(self, name: str, cpu: str = "1", *, estimate: str = "", **fields: Any) -> str:
        """One that wants a node, or has one (`nodeName`); its uid."""
        said = {**fields.pop("annotations", {}), **({"hodei.io/estimate": estimate} if estimate else {})}
        fields.setdefault("schedulerName", "hodei")
        made = a_pod(name, requests={"cpu": cpu, "memory": "1Gi"}, annotations=said, **fields)
        self.move(made)
        return made.metadata.uid

    def move(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        self.harness.pods.moved(uid, self.pods.get(uid), pod)
        self.pods[uid] = pod

    def gone(self, name: str) -> None:
        self.harness.pods.moved(f"uid-{name}", self.pods.pop(f"uid-{name}"), None)

    def step(self, *facts: Any) -> Step:
        """Until nothing is left to decide; what was placed is bound."""
        self.harness.pods.give(facts)
        while True:
            step = self.harness.controller.step(self.now_ms, self.harness.pods.take_facts())
            for entry in self.harness.pods.placed([act for act in step.acts if isinstance(act, Start)], self.now_ms):
                self.harness.pods.bound(entry.uid, entry.run)
            due = self.harness.controller.next_wakeup_ms(self.now_ms)
            if not self.harness.pods.stirred and (due is None or due > self.now_ms):
                return step

    def where(self, name: str) -> str:
        entry = self.harness.pods.entries[f"uid-{name}"]
        return entry.node if entry.holds else ""

    def job(self, name: str) -> int:
        return self.harness.pods.entries[f"uid-{name}"].id
