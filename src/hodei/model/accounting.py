"""Fair share as rows that anyone can add up: for each account every term of the sum that its factor is."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

Formula = Literal["fair_tree", "classic", "drf"]


class ShareRow(Struct, frozen=True, omit_defaults=True):
    """`account` is the path from the organisation down, separated by slashes; `user`: nobody is below it.

    `promised` is shares over `level_shares` (of everything for the classic formula, of the level for the tree), `used` the
    part of everything (or of the level's `level_usage`) that `usage` is. Classic: `effective` is what counts as used.
    Tree: `level_fs` is promised over used (None if nothing was used), `rank` the place among `ranked` users, counted down.
    DRF: `used` is the share of the `dominant` resource that it holds now.
    """

    account: str
    shares: int | str
    factor_milli: int
    user: bool = False
    level_shares: int = 0
    promised: float = 0.0
    usage: int = 0
    level_usage: int = 0
    used: float = 0.0
    effective: float | None = None
    level_fs: float | None = None
    rank: int = 0
    ranked: int = 0
    dominant: str = ""


class BudgetRow(Struct, frozen=True, omit_defaults=True):
    """`used` of `limit` since `since_ms`: hours of one whole resource, or money."""

    project: str
    name: str
    used: float
    limit: float
    since_ms: int


class ShareReport(Struct, frozen=True, omit_defaults=True):
    """`usage` of the rows is in millionths of the billing weights times milliseconds. `half_life_ms` or `window_ms` say how
    the past is forgotten."""

    formula: Formula
    at_ms: int
    rows: tuple[ShareRow, ...]
    half_life_ms: int = 0
    window_ms: int = 0
    budgets: tuple[BudgetRow, ...] = ()

    def about(self, name: str) -> ShareReport:
        """Only the accounts of that name with those above and below them, and the budgets of those."""
        paths = [tuple(row.account.split("/")) for row in self.rows]
        chosen = {path for path in paths if name in path}
        above = {path[:depth] for path in chosen for depth in range(1, len(path))}
        rows = tuple(row for row, path in zip(self.rows, paths, strict=True) if path in chosen or path in above)
        kept = {part for path in chosen for part in path}
        return structs.replace(self, rows=rows, budgets=tuple(row for row in self.budgets if row.project in kept))


# ----------------------------------------------------------------------------------------------- quota
# How a project stands with its quota: one row for each resource that has one.


class QuotaRow(Struct, frozen=True, omit_defaults=True):
    """Amounts in base units (`jobs`: how many run). `hard` may not be passed but by `borrowed`, of which at most
    `may_borrow` (None: all that the cohort lends). `more`: what could start now. `by`: the users that hold most."""

    project: str
    resource: str
    used: int
    hard: int | None = None
    soft: int | None = None
    cohort: str = ""
    borrowed: int = 0
    may_borrow: int | None = None
    more: int | None = None
    by: tuple[tuple[str, int], ...] = ()


class QuotaList(Struct, frozen=True):
    quotas: list[QuotaRow]


# ----------------------------------------------------------------------------------------------- usage
# What accounts have used, as a store keeps it.


AccountPath = tuple[str, ...]


class UsageRow(Struct, frozen=True):
    """What one account itself used in one bucket of time: one row for (path, resource, start_ms). `amount` is in base
    units times milliseconds and may be larger than 64 bits; 0 means that the row is gone."""

    path: AccountPath
    resource: str
    start_ms: int
    width_ms: int
    amount: int
