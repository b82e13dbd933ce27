"""Quota: refuses gangs beyond the quota or budget of their project. `control.accounting` keeps the usage."""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.points import Trigger
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason


class Quota:
    name = "quota"
    # A soft quota depends on whether others wait, which changes when they are placed.
    requeue_on: tuple[Trigger, ...] = ("run_ended", "job_ended", "run_placed")

    def key(self, member: Member) -> Hashable:
        return member.job.project, member.job.user

    def pre_filter(self, gang: Gang, view: View) -> Reason | None:
        return view.bounds.refusal(gang, view.now_ms) if view.bounds is not None else None
