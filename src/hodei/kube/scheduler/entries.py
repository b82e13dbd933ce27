"""What is known of one pod, and of the waiting pods of one group, between the watches and the controller."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.gangs import Membership
from hodei.kube.scheduler.translate import Wanted
from hodei.model.decision import Reason
from hodei.model.ids import JobId, NodeName, RunId

GroupKey = tuple[str, str, str]
# aside: nothing to do about it (it is held back, cannot be read, or is on a node that has gone). gang: it waits with others.
Stage = Literal["aside", "gang", "queued", "placed", "bound"]


class Entry(Struct):
    """A pod and its job. `reasons`: why it is aside, if it is ours and somebody should know."""

    uid: str
    pod: Pod
    wanted: Wanted
    stage: Stage = "aside"
    id: JobId = 0
    run: RunId = ""
    node: NodeName = ""
    group: Membership | None = None
    leaving: bool = False
    reasons: tuple[Reason, ...] = ()
    told: str | None = None  # the last that it was told, with which reason, and when
    told_reason: str = ""
    told_ms: int = 0
    tries: int = 0
    seen: int = 0  # how many newcomers had come anywhere when it was placed

    @property
    def holds(self) -> bool:
        return self.stage in ("placed", "bound")

    @property
    def name(self) -> str:
        return f"{self.pod.metadata.namespace}/{self.pod.metadata.name}"


class WaitingGang(Struct):
    """The job that the waiting pods of a group are: `order` says which pod each of its members is."""

    id: JobId
    uids: tuple[str, ...]
    order: tuple[str, ...]
    needed: int
    first: bool = False
