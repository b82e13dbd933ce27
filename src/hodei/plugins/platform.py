"""Platform: processor architecture, GPU type, and the backends of the job and the task."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from hodei.engine.explain import Change, sole_refusals
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import BackendChoice, Reason
from hodei.model.node import architecture


class Platform:
    name = "platform"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return (member.task.arch, member.task.gpu_type, member.task.backends, member.job.backend)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        task, choice = member.task, member.job.backend
        out: list[tuple[Mask, Reason]] = []
        if task.arch:
            wanted = architecture(task.arch)
            other = nodes.by("arch", lambda node: architecture(node.arch)).where(lambda arch: arch != wanted)
            out.append((other, Reason(self.name, "WRONG_ARCHITECTURE", f"architecture is not {wanted}")))
        if task.gpu_type:
            model = task.gpu_type.lower()
            other = nodes.by("gpu_type", lambda node: node.gpu_type.lower()).where(lambda gpu: gpu != model)
            out.append((other, Reason(self.name, "WRONG_GPU_TYPE", f"gpu type is not {task.gpu_type}")))
        if choice.mode == "specific":
            other = nodes.by("backend", lambda node: node.backend).where(lambda name: name not in choice.names)
            out.append((other, Reason(self.name, "OTHER_BACKEND", f"not on backend {' or '.join(choice.names)}")))
        if task.backends:
            other = nodes.by("backend", lambda node: node.backend).where(lambda name: name not in task.backends)
            text = f"not on a backend of the task: {' or '.join(task.backends)}"
            out.append((other, Reason(self.name, "OTHER_BACKEND", text)))
        return out

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        task, choice = member.task, member.job.backend
        changes = []  # one for each refusal of the filter, in its order
        if task.arch:
            changes.append(Change("drop", f"drop arch {task.arch}", {"arch": ""}))
        if task.gpu_type:
            changes.append(Change("drop", f"drop gpu type {task.gpu_type}", {"gpu_type": ""}))
        if choice.mode == "specific":
            text = f"drop backend {' or '.join(choice.names)}"
            changes.append(Change("drop", text, {"backend": BackendChoice()}, whole_job=True))
        if task.backends:
            changes.append(Change("drop", f"drop backends {' or '.join(task.backends)}", {"backends": ()}))
        for change, helps in zip(changes, sole_refusals(self.filter(member, nodes, view)), strict=True):
            if helps:
                yield change

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """Preferred backends by order or weight; avoided ones below all others."""
        choice = member.job.backend
        if choice.mode != "preferred" and not choice.avoid:
            return None
        wanted = _preferences(choice) if choice.mode == "preferred" else {}
        column = nodes.by("backend", lambda node: node.backend)
        if not choice.avoid:
            return column.numbers(lambda name: wanted.get(name, 0))
        half = MAX_SCORE // 2
        return column.numbers(lambda name: 0 if name in choice.avoid else half + wanted.get(name, 0) // 2)


def _preferences(choice: BackendChoice) -> dict[str, int]:
    """Score per preferred backend; the best has MAX_SCORE."""
    if choice.weights:
        most = max(*choice.weights, 1)
        return {name: MAX_SCORE * weight // most for name, weight in zip(choice.names, choice.weights, strict=True)}
    steps = max(len(choice.names), 1)
    return {name: MAX_SCORE * (steps - place) // steps for place, name in reversed(list(enumerate(choice.names)))}
