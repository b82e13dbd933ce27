"""Fair share, quotas and usage as rows, with every term of the fair-share factor."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

Formula = Literal["fair_tree", "classic", "drf"]


class ShareRow(Struct, frozen=True, omit_defaults=True):
    """`account` is the path from the organisation down, separated by slashes; `user`: it is a leaf.

    `due` is shares over `level_shares` (of everything in the classic formula, of the level in the tree); `used` is
    `usage` as a part of everything (or of `level_usage`). Classic: `effective` is the usage that counts. Tree:
    `level_fs` is due over used (None without usage), `rank` the position among `ranked` users, counted down. DRF:
    `used` is the current share of the `dominant` resource.
    """

    account: str
    shares: int | str
    factor_milli: int
    user: bool = False
    level_shares: int = 0
    due: float = 0.0
    usage: int = 0
    level_usage: int = 0
    used: float = 0.0
    effective: float | None = None
    level_fs: float | None = None
    rank: int = 0
    ranked: int = 0
    dominant: str = ""


class CostRow(Struct, frozen=True, omit_defaults=True):
    """What the runs of a user in a project cost on a backend, by the prices of its nodes."""

    project: str
    user: str
    backend: str
    runs: int
    cost: float


class BudgetRow(Struct, frozen=True, omit_defaults=True):
    """`used` of `limit` since `since_ms`: hours of one unit of a resource, or money."""

    project: str
    name: str
    used: float
    limit: float
    since_ms: int


class ShareReport(Struct, frozen=True, omit_defaults=True):
    """`usage` is in millionths of billing weights times ms. `half_life_ms` or `window_ms`: how it decays."""

    formula: Formula
    at_ms: int
    rows: tuple[ShareRow, ...]
    half_life_ms: int = 0
    window_ms: int = 0
    budgets: tuple[BudgetRow, ...] = ()

    def about(self, name: str) -> ShareReport:
        """Only the accounts of that name, with their ancestors and descendants, and their budgets."""
        paths = [tuple(row.account.split("/")) for row in self.rows]
        chosen = {path for path in paths if name in path}
        above = {path[:depth] for path in chosen for depth in range(1, len(path))}
        rows = tuple(row for row, path in zip(self.rows, paths, strict=True) if path in chosen or path in above)
        kept = {part for path in chosen for part in path}
        return structs.replace(self, rows=rows, budgets=tuple(row for row in self.budgets if row.project in kept))


# One row for each project and resource with a quota.


class QuotaRow(Struct, frozen=True, omit_defaults=True):
    """Amounts in base units (`jobs`: number of running jobs). `used` exceeds `hard` only by `borrowed`, at most
    `may_borrow` (None: all that the cohort lends). `more`: what could start now. `by`: the users with the largest use.
    """

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


# Usage of accounts as stored.


AccountPath = tuple[str, ...]


class UsageRow(Struct, frozen=True):
    """Usage of one account in one time bucket: one row for (path, resource, start_ms). `amount` is in base units times
    milliseconds and may exceed 64 bits; 0 deletes the row."""

    path: AccountPath
    resource: str
    start_ms: int
    width_ms: int
    amount: int
