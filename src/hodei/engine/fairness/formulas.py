"""Fair-share formulas of Slurm (classic and Fair Tree), and dominant-resource fairness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import groupby

from msgspec import Struct

from hodei.engine.fairness.tree import PARENT, Account, Path, Shares, level_shares, siblings, total_usage
from hodei.model.errors import InvalidInput
from hodei.model.resources import Resources

# F = 2^(-UE / S), where UE = UA + (UE of the parent - UA) * shares / sum of shares. S is the normalised share, UA the
# actual usage, UE the effective usage, which includes part of the siblings' usage. Directly below the root UE is UA. An
# account marked "parent" takes S and UE of its parent. Floats, as published.


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


def classic(tree: Account, usage: Mapping[Path, int], *, total: int | None = None) -> list[ClassicRow]:
    """A row per account below the root, depth first by name.

    `usage`: own usage per path, in any one unit (see `billing`). `total`: what counts as all usage; by default the
    sum.
    """
    used = total_usage(tree, usage)
    total_used = used[()] if total is None else total
    rows: list[ClassicRow] = []
    _below((), tree, _top(used[()], total_used), used, total_used, rows, level_shares(tree))
    return rows


def _below(
    path: Path, account: Account, above: ClassicRow, used: Mapping[Path, int], total_used: int, rows: list[ClassicRow],
    sibling_shares: int,
) -> None:  # fmt: skip
    """Rows of the accounts below `account`, whose siblings divide the share of `above`."""
    for child in account.children:
        at = (*path, child.name)
        row = _row(at, child, above, sibling_shares, used[at], total_used)
        rows.append(row)
        if child.dissolves:
            _below(at, child, above, used, total_used, rows, sibling_shares)
        elif child.children:
            _below(at, child, row, used, total_used, rows, level_shares(child))


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


Level = float | Fraction


# Users are ordered by LevelFS at the highest level where their accounts differ.
#
# In each sibling set LevelFS = (shares / sum of shares) / (usage / usage of the parent). The tree is walked from the
# highest LevelFS down and users are ranked as they are met, so all users of an account rank before all users of a
# sibling with a lower LevelFS. A user's factor is its rank over the number of users.
#
# Without usage LevelFS is infinite; without shares it is 0. Users marked "parent" have an infinite one; accounts marked
# "parent" dissolve into their sibling set (see `tree`). Ties: equal users share a rank; equal accounts are walked as
# one; a user equal to an account ranks as its best user.
#
# LevelFS is computed in IEEE doubles in the order above, so ranks equal Slurm's to the last bit. `exact=True` compares
# fractions instead and finds every tie.


class FairTreeRow(Struct, frozen=True):
    """All terms for one account. `parent`: the account of its sibling set; `level_shares` and `level_usage`: sums of
    that set. `level_fs`: infinite without usage, None for a dissolved account. `rank` counts down from `users`; an
    account has rank and factor of its best user."""

    path: Path
    parent: Path
    shares: Shares
    level_shares: int
    normalised_shares: float
    usage: int
    level_usage: int
    normalised_usage: float
    level_fs: float | None
    rank: int
    users: int
    factor: float


class _Sibling(Struct):
    """A member of a sibling set during ranking."""

    path: Path
    account: Account
    parent: Path
    level_shares: int
    level_usage: int
    level: Level


def fair_tree(tree: Account, usage: Mapping[Path, int], *, exact: bool = False) -> list[FairTreeRow]:
    """A row per account below the root, depth first by name. `usage`: own usage per path, in any one unit."""
    walk = _ranked(tree, usage, exact)
    return [walk.row(path, account) for path, account in walk.accounts if path]


def fair_tree_ranks(tree: Account, usage: Mapping[Path, int]) -> tuple[dict[Path, int], int]:
    """Ranks of all users and accounts, and the number of users: `fair_tree` without the terms."""
    walk = _ranked(tree, usage, exact=False)
    return walk.ranks, walk.users


def _ranked(tree: Account, usage: Mapping[Path, int], exact: bool) -> _Walk:
    walk = _Walk(tree, usage, exact)
    walk.rank_all(walk.set_of([((), tree)]), tied=False)
    walk.rank_accounts()
    return walk


class _Walk:
    def __init__(self, tree: Account, usage: Mapping[Path, int], exact: bool) -> None:
        self._used = total_usage(tree, usage)
        self._exact = exact
        self.accounts = list(tree.walk())
        self.users = sum(not account.children for _, account in self.accounts) if tree.children else 0
        self._rank = self._left = self.users
        self._siblings: dict[Path, _Sibling] = {}
        self.ranks: dict[Path, int] = {}

    def set_of(self, accounts: Iterable[tuple[Path, Account]]) -> list[_Sibling]:
        """The members of these accounts' sibling sets, each with its LevelFS."""
        found: list[_Sibling] = []
        for parent, account in accounts:
            members = siblings(parent, account)
            shares, used = level_shares(account), self._used[parent]
            for path, member in members:
                level = self._level(member, shares, self._used[path], used)
                sibling = _Sibling(path, member, parent, shares, used, level)
                self._siblings[path] = sibling
                found.append(sibling)
        return found

    def _level(self, account: Account, shares: int, used: int, level_usage: int) -> Level:
        if account.shares == PARENT:
            return math.inf
        if not account.shares:
            return 0.0
        if not used:
            return math.inf
        if self._exact:
            return Fraction(account.shares * level_usage, shares * used)
        return (account.shares / shares) / (used / level_usage)

    def rank_all(self, members: list[_Sibling], *, tied: bool) -> None:
        """Rank from the highest level down. `tied`: the first ones share the rank of the last ranked user."""
        members.sort(key=lambda member: (-member.level, not member.account.is_user, member.path))
        for _, group in groupby(members, key=lambda member: member.level):
            accounts: list[tuple[Path, Account]] = []
            for member in group:
                if not member.account.is_user:
                    accounts.append((member.path, member.account))
                    continue
                if not tied:
                    self._rank = self._left
                self.ranks[member.path] = self._rank
                self._left -= 1
                tied = True
            if accounts:
                self.rank_all(self.set_of(accounts), tied=tied)
            tied = False

    def rank_accounts(self) -> None:
        best: dict[Path, int] = {}
        for path, rank in self.ranks.items():
            above = path[:-1]
            if rank > best.get(above, 0):
                best[above] = rank
        for path, rank in best.items():
            for depth in range(1, len(path) + 1):
                above = path[:depth]
                self.ranks[above] = max(rank, self.ranks.get(above, 0))

    def row(self, path: Path, account: Account) -> FairTreeRow:
        rank = self.ranks[path]
        used = self._used[path]
        factor = rank / self.users
        member = self._siblings.get(path)
        if member is None:
            return FairTreeRow(path, path[:-1], account.shares, 0, 0.0, used, 0, 0.0, None, rank, self.users, factor)
        shares = account.shares
        normalised = 0.0 if shares == PARENT or not member.level_shares else shares / member.level_shares
        part = used / member.level_usage if member.level_usage else 0.0
        return FairTreeRow(
            path, member.parent, shares, member.level_shares, normalised, used, member.level_usage, part,
            float(member.level), rank, self.users, factor,
        )  # fmt: skip


# A tenant's share is its largest share of any resource. Exact fractions, in base units.


class DominantShare(Struct, frozen=True):
    """`resource`: "" without usage. `shares`: the term of every resource."""

    resource: str
    share: Fraction
    shares: dict[str, Fraction]


def dominant_share(
    used: Resources, totals: Resources, *, weight: int = 1, resource_weights: Mapping[str, int] | None = None
) -> DominantShare:
    """The largest of used / total * resource weight / tenant weight.

    A resource without capacity does not count (its last node may have been removed while runs still hold it). Ties go to the
    first name.
    """
    if weight < 1:
        raise InvalidInput(f"a weight of {weight}", hint="a whole number from 1")
    weights = resource_weights or {}
    shares = {
        name: Fraction(used[name] * weights.get(name, 1), totals[name] * weight)
        for name in sorted(used)
        if totals.get(name, 0) > 0
    }
    best = max(shares, key=lambda name: shares[name], default="")
    if not best or not shares[best]:
        return DominantShare("", Fraction(0), shares)
    return DominantShare(best, shares[best], shares)
