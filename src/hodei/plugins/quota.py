"""Nobody starts beyond the quota of its project. Who holds how much is kept by control; this only asks."""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.points import Trigger
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason


class Quota:
    name = "quota"
    # What others wait for counts too, and ends when they are placed.
    requeue_on: tuple[Trigger, ...] = ("run_ended", "job_ended", "run_placed")

    def key(self, member: Member) -> Hashable:
        return member.job.project, member.job.user

    def pre_filter(self, gang: Gang, view: View) -> Reason | None:
        return view.bounds.refusal(gang, view.now_ms) if view.bounds is not None else None
