"""Slurm's classic fair share: F = 2^(-UE / S), where UE = UA + (UE of the parent - UA) * shares / sum of shares.

S is the part of everything that the account was promised, UA the part of everything that it used, UE what it is held to
have used: partly its own doing, partly its siblings'. Directly below the root UE is UA. An account marked "parent" takes
S and UE of the account above it. Floats on purpose: this is the published sum; decisions take `factor_micro`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from hodei.engine.fairness.tree import PARENT, Account, Path, Shares, level_shares, total_usage
from hodei.model.errors import NotFound

MICRO = 1_000_000


class ClassicRow(Struct, frozen=True):
    """All terms for one account. `parent` is the account whose part its sibling set shares (accounts that dissolve are
    passed over), `level_shares` the sum of shares in that set."""

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
        """The factor as decisions use it: whole millionths, 0 to 1,000,000."""
        return round(self.factor * MICRO)


def classic(tree: Account, usage: Mapping[Path, int], *, total: int | None = None) -> list[ClassicRow]:
    """A row for every account below the root, in order of a depth-first walk by name.

    `usage` is what each path itself used (any one unit; see `billing`). `total` is what counts as everything; by default
    the sum of all usage.
    """
    used = total_usage(tree, usage)
    whole = used[()] if total is None else total
    rows: list[ClassicRow] = []
    _below((), tree, _top(used[()], whole), lambda path: used[path], whole, rows)
    return rows


def classic_path(
    tree: Account, path: Path, used: Callable[[Path], int], *, total: int | None = None
) -> list[ClassicRow]:
    """The rows from the organisation down to `path` only; `used` tells what a path and all below it used.

    The same numbers as `classic`, for a price that does not grow with the rest of the tree.
    """
    whole = used(()) if total is None else total
    here, at, rows = tree, Path(), list[ClassicRow]()
    shared, rivals_shares = _top(used(()), whole), level_shares(tree)
    for name in path:
        found = here.find((name,))
        if found is None:
            raise NotFound(f"there is no account {'/'.join(path)}", hint="`hodei share` lists them")
        here, at = found, (*at, name)
        row = _row(at, here, shared, rivals_shares, used(at), whole)
        rows.append(row)
        if not here.dissolves:
            shared, rivals_shares = row, level_shares(here)
    return rows


def _below(
    path: Path, account: Account, above: ClassicRow, used: Callable[[Path], int], whole: int, rows: list[ClassicRow],
    rivals_shares: int | None = None,
) -> None:  # fmt: skip
    """Rows of the accounts below `account`, whose sibling set shares the part of `above`."""
    if rivals_shares is None:
        rivals_shares = level_shares(account)
    for child in account.children:
        at = (*path, child.name)
        row = _row(at, child, above, rivals_shares, used(at), whole)
        rows.append(row)
        if child.dissolves:
            _below(at, child, above, used, whole, rows, rivals_shares)
        elif child.children:
            _below(at, child, row, used, whole, rows)


def _row(path: Path, account: Account, above: ClassicRow, rivals_shares: int, used: int, whole: int) -> ClassicRow:
    part = used / whole if whole else 0.0
    shares = account.shares
    if shares == PARENT:
        promised, effective = above.normalised_shares, above.effective_usage if above.path else part
    else:
        fraction = shares / rivals_shares if rivals_shares else 0.0
        promised = above.normalised_shares * fraction
        effective = part + (above.effective_usage - part) * fraction if above.path else part
    factor = 2.0 ** (-effective / promised) if promised else 0.0
    return ClassicRow(path, above.path, shares, rivals_shares, promised, used, part, effective, factor)


def _top(used: int, whole: int) -> ClassicRow:
    part = used / whole if whole else 0.0
    return ClassicRow((), (), 1, 1, 1.0, used, part, part, 0.0)
