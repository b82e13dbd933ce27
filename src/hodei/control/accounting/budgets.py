"""Budgets: what a project may use over time, on the same ledger as fair share, and never forgotten within the period."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct

from hodei.control.accounting.ledger import Ledger
from hodei.engine.fairness.billing import HOUR_MS, MICRO, Budget, Rate, Spent, spent
from hodei.engine.fairness.tree import Path
from hodei.engine.view import Gang
from hodei.model.accounting import BudgetRow
from hodei.model.job import Reason
from hodei.model.resources import Resources, scale_of

Period = Literal["", "day", "week", "month"]


class ProjectBudget(Struct, frozen=True):
    """`since_ms` is a fixed beginning, used if there is no `period`."""

    unit_hours: Resources = {}
    money_micro: int | None = None
    prices: Mapping[str, Rate] = {}
    period: Period = "month"
    since_ms: int = 0


class Budgets:
    """`path_of`: where a project stands among the accounts."""

    def __init__(self, budgets: Mapping[str, ProjectBudget], ledger: Ledger, path_of: Callable[[str], Path]) -> None:
        self._budgets, self._ledger, self._path_of = dict(budgets), ledger, path_of

    def refusal(self, gang: Gang, now_ms: int) -> Reason | None:
        """A budget that is used up starts nothing more; what runs goes on to its end."""
        mine = self._budgets.get(gang.job.project)
        if mine is None:
            return None
        for bound in self._spent(gang.job.project, mine, now_ms):
            if bound.exhausted:
                used, limit, unit = _in_units(bound)
                until = next_start_ms(mine.period, now_ms)
                again = f"; the next begins {datetime.fromtimestamp(until / 1000, UTC):%Y-%m-%d}" if until else ""
                text = f"project {gang.job.project} has used {used:g} of {limit:g} {unit} of its budget{again}"
                return Reason("quota", "BUDGET", text)
        return None

    def rows(self, now_ms: int) -> Iterator[BudgetRow]:
        for project, mine in sorted(self._budgets.items()):
            for bound in self._spent(project, mine, now_ms):
                used, limit, unit = _in_units(bound)
                yield BudgetRow(project, unit, used, limit, start_ms(mine, now_ms))

    def next_ms(self, now_ms: int) -> int | None:
        """When the next period begins, and with it someone may go on."""
        return min((at for b in self._budgets.values() if (at := next_start_ms(b.period, now_ms))), default=None)

    def _spent(self, project: str, mine: ProjectBudget, now_ms: int) -> list[Spent]:
        since_ms = start_ms(mine, now_ms)
        used = self._ledger.used_since(self._path_of(project), since_ms, now_ms)
        return spent(Budget(since_ms, mine.unit_hours, mine.money_micro, dict(mine.prices)), used)


def start_ms(budget: ProjectBudget, now_ms: int) -> int:
    return _start(budget.period, now_ms) if budget.period else budget.since_ms


def next_start_ms(period: Period, now_ms: int) -> int:
    """When the period after the present one begins; 0 if there is none."""
    if not period:
        return 0
    length = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=32)}[period]
    later = datetime.fromtimestamp(_start(period, now_ms) / 1000, UTC) + length
    return _start(period, round(later.timestamp() * 1000))


def _start(period: Period, now_ms: int) -> int:
    day = datetime.fromtimestamp(now_ms / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        day -= timedelta(days=day.weekday())
    elif period == "month":
        day = day.replace(day=1)
    return round(day.timestamp() * 1000)


def _in_units(bound: Spent) -> tuple[float, float, str]:
    if bound.name == "money":
        return bound.used / MICRO, bound.limit / MICRO, "money"
    whole = scale_of(bound.name) * HOUR_MS
    return bound.used / whole, bound.limit / whole, f"{bound.name}-hours"
