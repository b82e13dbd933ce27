"""Slurm's classic fair share: F = 2^(-UE / S), where UE = UA + (UE of the parent - UA) * shares / sum of shares.

S is the normalised share, UA the actual usage, UE the effective usage, which includes part of the siblings' usage.
Directly below the root UE is UA. An account marked "parent" takes S and UE of its parent. Floats, as published;
decisions use `factor_micro`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from hodei.engine.fairness.tree import PARENT, Account, Path, Shares, level_shares, total_usage
from hodei.model.errors import NotFound

MICRO = 1_000_000


class ClassicRow(Struct, frozen=True):
    """All terms for one account. `parent`: the account whose share the sibling set divides (dissolved accounts are
    skipped); `level_shares`: the sum of shares in that set."""

    path: Path
    parent: Path
    shares: Shares
    level_shares: int
    normalised_shares: float
    usage: int
    normalised_usage: float
    effective_usage: float
    factor: float

    @property
    def factor_micro(self) -> int:
        """Whole millionths, 0 to 1,000,000."""
        return round(self.factor * MICRO)


def classic(tree: Account, usage: Mapping[Path, int], *, total: int | None = None) -> list[ClassicRow]:
    """A row per account below the root, depth first by name.

    `usage`: own usage per path, in any one unit (see `billing`). `total`: what counts as all usage; by default the
    sum.
    """
    used = total_usage(tree, usage)
    total_used = used[()] if total is None else total
    rows: list[ClassicRow] = []
    _below((), tree, _top(used[()], total_used), lambda path: used[path], total_used, rows)
    return rows


def classic_path(
    tree: Account, path: Path, used: Callable[[Path], int], *, total: int | None = None
) -> list[ClassicRow]:
    """Only the rows on the way to `path`; `used` returns the usage of a path with everything below it. Cost is
    independent of the size of the tree."""
    total_used = used(()) if total is None else total
    here, at, rows = tree, Path(), list[ClassicRow]()
    shared, sibling_shares = _top(used(()), total_used), level_shares(tree)
    for name in path:
        found = here.find((name,))
        if found is None:
            raise NotFound(f"there is no account {'/'.join(path)}", hint="`hodei share` lists them")
        here, at = found, (*at, name)
        row = _row(at, here, shared, sibling_shares, used(at), total_used)
        rows.append(row)
        if not here.dissolves:
            shared, sibling_shares = row, level_shares(here)
    return rows


def _below(
    path: Path, account: Account, above: ClassicRow, used: Callable[[Path], int], total_used: int, rows: list[ClassicRow],
    sibling_shares: int | None = None,
) -> None:  # fmt: skip
    """Rows of the accounts below `account`, whose siblings divide the share of `above`."""
    if sibling_shares is None:
        sibling_shares = level_shares(account)
    for child in account.children:
        at = (*path, child.name)
        row = _row(at, child, above, sibling_shares, used(at), total_used)
        rows.append(row)
        if child.dissolves:
            _below(at, child, above, used, total_used, rows, sibling_shares)
        elif child.children:
            _below(at, child, row, used, total_used, rows)


def _row(
    path: Path, account: Account, above: ClassicRow, sibling_shares: int, used: int, total_used: int
) -> ClassicRow:
    part = used / total_used if total_used else 0.0
    shares = account.shares
    if shares == PARENT:
        normalised, effective = above.normalised_shares, above.effective_usage if above.path else part
    else:
        fraction = shares / sibling_shares if sibling_shares else 0.0
        normalised = above.normalised_shares * fraction
        effective = part + (above.effective_usage - part) * fraction if above.path else part
    factor = 2.0 ** (-effective / normalised) if normalised else 0.0
    return ClassicRow(path, above.path, shares, sibling_shares, normalised, used, part, effective, factor)


def _top(used: int, total_used: int) -> ClassicRow:
    part = used / total_used if total_used else 0.0
    return ClassicRow((), (), 1, 1, 1.0, used, part, part, 0.0)
