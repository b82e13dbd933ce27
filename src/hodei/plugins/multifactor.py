"""A line by a sum of points: the job's own priority, what it has gained by waiting, its account's fair share, and the
priority of those who wait for it. Points are thousandths inside, so that every machine has the same.

`age_per_hour` and `age_max`: gained for each hour of waiting, and at most. `share`: what a whole fair share is worth
(nothing where nobody keeps account). Age is worth less than a share by default: a thousand old jobs of one project must not
keep back the first of another for longer than it takes to have the most of age, which is then the same for both.
"""

from __future__ import annotations

from hodei.engine.view import Gang, View
from hodei.model.errors import InvalidInput
from hodei.model.explanation import PriorityTerm
from hodei.plugins.queues import Priority

_HOUR_MS = 3_600_000
_MOST = 1_000_000
_EVER_MS = 1 << 62


class Multifactor(Priority):
    name = "multifactor"

    def __init__(self, age_per_hour: int = 10, age_max: int = 50, share: int = 200) -> None:
        for setting, points in (("age_per_hour", age_per_hour), ("age_max", age_max), ("share", share)):
            if isinstance(points, bool) or not isinstance(points, int) or not 0 <= points <= _MOST:
                raise InvalidInput(f"{setting} = {points!r}", hint=f"whole points, from 0 to {_MOST}")
        self._age_per_hour, self._age_max_milli, self._share = age_per_hour, age_max * 1000, share
        self.shared = share > 0

    def tenant(self, gang: Gang) -> str:
        return f"{gang.job.project}/{gang.job.user}" if self.shared else ""

    def charge(self, gang: Gang) -> int:
        return 0

    def rank_milli(self, gang: Gang, view: View) -> int:
        """The sum of the terms."""
        return gang.priority * 1000 + self._age_milli(gang, view) + self.share_milli(gang, view)

    def came_by(self, age_milli: int, now_ms: int) -> int:
        """Who has waited since this moment or longer has at least so many points of age; far in the past for nobody, far in
        the future for everybody."""
        if age_milli > self._age_max_milli or (not self._age_per_hour and age_milli > 0):
            return -_EVER_MS
        if not self._age_per_hour:
            return _EVER_MS
        return now_ms - -(-age_milli * _HOUR_MS // (self._age_per_hour * 1000))

    def grown_ms(self, gang: Gang) -> int | None:
        """When it has all the points that waiting can give; None if waiting gives none."""
        if not self._age_per_hour:
            return None
        return gang.queued_ms + -(-self._age_max_milli * _HOUR_MS // (self._age_per_hour * 1000))

    def terms(self, gang: Gang, view: View) -> tuple[PriorityTerm, ...]:
        own, waited = gang.job.priority * 1000, max(view.now_ms - gang.queued_ms, 0)
        age, share = self._age_milli(gang, view), self.share_milli(gang, view)
        out = [
            PriorityTerm("priority", own, "as submitted"),
            PriorityTerm(
                "age", age,
                f"{waited / _HOUR_MS:.2f} h of waiting at {self._age_per_hour} an hour, at most {self._age_max_milli // 1000}",
            ),
        ]  # fmt: skip
        inherited_priority = gang.priority * 1000 - own
        if inherited_priority:
            out.append(PriorityTerm("inherited", inherited_priority, "a more important job waits for it"))
        if self.shared:
            factor = self._factor_milli(gang, view)
            said = f"{factor / 1000:.3f} of {self._share}" if factor is not None else "nobody keeps account of shares"
            out.append(PriorityTerm("fair share", share, said))
        return tuple(out)

    def _age_milli(self, gang: Gang, view: View) -> int:
        # Below zero for one that came after the moment of the view: so ranks of one moment can be compared later.
        return min(self._age_per_hour * (view.now_ms - gang.queued_ms) * 1000 // _HOUR_MS, self._age_max_milli)

    def _factor_milli(self, gang: Gang, view: View) -> int | None:
        return view.shares.factor_milli(gang.job.project, gang.job.user) if view.shares is not None else None

    def share_milli(self, gang: Gang, view: View) -> int:
        """What the fair share of its account is worth."""
        return self._share * (self._factor_milli(gang, view) or 0) if self.shared else 0
