"""Enforces start reservations and reservations: nothing starts that would still occupy reserved capacity when it is
due.

A gang that ends in time may use it until then (backfill); others use what is left beside it (spill).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from hodei.engine.availability import FOREVER, Claim
from hodei.engine.nodes import Mask, Table
from hodei.engine.points import Layout, Layouts, Placed, Trigger
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason
from hodei.model.resources import Resources, format_time


class StartReservations:
    name = "start_reservations"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed", "job_ended")

    def key(self, member: Member) -> Hashable:
        # Rounded to a power of two: gangs of one group are tried one after another, so a shorter one still gets its
        # chance.
        return member.job.project, (member.job.estimate_ms or member.job.timeout_ms).bit_length()

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | Reason | None:
        """All nodes except those where a member would conflict with a claim."""
        availability = view.availability
        if availability is None or not availability.claimed:
            return None
        until_ms = _until(gang, view)
        closed: list[list[int]] = [[] for _ in gang.members]
        claim = None
        for member, its in zip(gang.members, closed, strict=True):
            request = member.needs
            for node in availability.claimed:
                row = table.row.get(node)
                if row is not None:
                    first_conflict = availability.first_conflict(
                        node, request, view.now_ms, until_ms, gang.id, gang.job.project
                    )
                    if first_conflict is not None:
                        its.append(row)
                        claim = first_conflict
        if claim is None and sum(map(len, (*gang.needed, *gang.extra))) == 1:
            return None
        if claim is None:
            # Members that fit one by one may conflict together.
            others = (
                claim for node in availability.claimed for claim in availability.claims(node, gang.id, gang.job.project)
            )
            claim = next(others, None)
        if claim is None:
            return None
        reason = self._reason(claim)
        rows = [_rows_except(its, table) for its in closed]
        options = [Layout(tuple(rows))]
        own = availability.start_reservations.get(gang.id)
        if own is not None and own.start_ms <= view.now_ms:
            # Its time has come: what was kept for it is free for it, wherever it would go otherwise.
            kept = np.zeros(len(table.names), dtype=np.bool_)
            kept[[table.row[node] for node, _ in own.places if node in table.row]] = True
            # First as each member alone may lie there: what one of them finds, another may stand in the way of.
            options[:0] = [Layout(tuple(kept & free for free in rows)), Layout((kept,) * len(rows))]
        elif any(not free.any() for free in rows):
            return reason
        return Layouts(options, reason)

    def remaining_rows(self, gang: Gang, member: Member, within: Mask, table: Table, view: View) -> Mask:
        """The same for one more member, when others of its gang are laid already."""
        availability = view.availability
        if availability is None:
            return within
        free = within.copy()
        for node in availability.claimed:
            row = table.row.get(node)
            if row is not None and free[row]:
                until_ms = _until(gang, view)
                free[row] = (
                    availability.first_conflict(node, member.needs, view.now_ms, until_ms, gang.id, gang.job.project)
                    is None
                )
        return free

    def permit(self, gang: Gang, placements: Sequence[Placed], view: View) -> Reason | None:
        """Several members on one node: together they may be too much, where each alone was not."""
        availability = view.availability
        if availability is None or not availability.claimed or len(placements) == 1:
            return None
        for node in sorted({placed.node.name for placed in placements} & set(availability.claimed)):
            together: Resources = {}
            for placed in placements:
                if placed.node.name == node:
                    together |= dict.fromkeys(placed.member.needs, 0)
            # They are in the table already, so nothing further may be missing.
            claim = availability.first_conflict(
                node, together, view.now_ms, _until(gang, view), gang.id, gang.job.project
            )
            if claim is not None:
                return self._reason(claim)
        return None

    def _reason(self, claim: Claim) -> Reason:
        if claim.job:
            return Reason(
                self.name,
                "START_RESERVED",
                f"it would delay job {claim.job}, which has a start reservation for this capacity",
                kind="reservation",
            )
        until = format_time(claim.end_ms)
        return Reason(
            self.name,
            "RESERVED",
            f"reservation {claim.name} of project {claim.project} has it until {until}",
            kind="reservation",
        )


def _rows_except(closed: list[int], table: Table) -> Mask:
    mask = np.zeros(len(table.names), dtype=np.bool_)
    mask[closed] = True
    return ~mask


def _until(gang: Gang, view: View) -> int:
    return view.now_ms + gang.estimate_ms if gang.estimate_ms else FOREVER
