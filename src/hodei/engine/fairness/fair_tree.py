"""Slurm's Fair Tree: users are ordered by LevelFS at the highest level where their accounts differ.

In each sibling set LevelFS = (shares / sum of shares) / (usage / usage of the parent). The tree is walked from the
highest LevelFS down and users are ranked as they are met, so all users of an account rank before all users of a
sibling with a lower LevelFS. A user's factor is its rank over the number of users.

Without usage LevelFS is infinite; without shares it is 0. Users marked "parent" have an infinite one; accounts marked
"parent" dissolve into their sibling set (see `tree`). Ties: equal users share a rank; equal accounts are walked as
one; a user equal to an account ranks as its best user.

LevelFS is computed in IEEE doubles in the order above, so ranks equal Slurm's to the last bit. `exact=True` compares
fractions instead and finds every tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import groupby

from msgspec import Struct

from hodei.engine.fairness.tree import PARENT, Account, Path, Shares, level_shares, siblings, total_usage

Level = float | Fraction


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


class _Place(Struct):
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
        self._places: dict[Path, _Place] = {}
        self.ranks: dict[Path, int] = {}

    def set_of(self, accounts: Iterable[tuple[Path, Account]]) -> list[_Place]:
        """The members of these accounts' sibling sets, each with its LevelFS."""
        found: list[_Place] = []
        for parent, account in accounts:
            members = siblings(parent, account)
            shares, used = level_shares(account), self._used[parent]
            for path, member in members:
                place = _Place(path, member, parent, shares, used, self._level(member, shares, self._used[path], used))
                self._places[path] = place
                found.append(place)
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

    def rank_all(self, places: list[_Place], *, tied: bool) -> None:
        """Rank from the highest level down. `tied`: the first ones share the rank of the last ranked user."""
        places.sort(key=lambda place: (-place.level, not place.account.is_user, place.path))
        for _, group in groupby(places, key=lambda place: place.level):
            accounts: list[tuple[Path, Account]] = []
            for place in group:
                if not place.account.is_user:
                    accounts.append((place.path, place.account))
                    continue
                if not tied:
                    self._rank = self._left
                self.ranks[place.path] = self._rank
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
        place = self._places.get(path)
        if place is None:
            return FairTreeRow(path, path[:-1], account.shares, 0, 0.0, used, 0, 0.0, None, rank, self.users, factor)
        shares = account.shares
        normalised = 0.0 if shares == PARENT or not place.level_shares else shares / place.level_shares
        part = used / place.level_usage if place.level_usage else 0.0
        return FairTreeRow(
            path, place.parent, shares, place.level_shares, normalised, used, place.level_usage, part,
            float(place.level), rank, self.users, factor,
        )  # fmt: skip
