"""The tree of accounts (organisation, project, user; any depth) and their shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from hodei.model.errors import InvalidInput

Path = tuple[str, ...]
Shares = int | Literal["parent"]

PARENT: Literal["parent"] = "parent"
# Deeper than any organisation, and far from Python's recursion limit.
MAX_LEVELS = 32


class Account(Struct, frozen=True):
    """An account; without children it is a user. Children are ordered by name.

    `shares`: its part among its siblings. "parent": no part of its own; a user then has the values of its account,
    and an account dissolves: its children compete with its siblings.
    """

    name: str
    shares: Shares = 1
    children: tuple[Account, ...] = ()

    @property
    def is_user(self) -> bool:
        return not self.children

    @property
    def dissolves(self) -> bool:
        return self.shares == PARENT and bool(self.children)

    def find(self, path: Path) -> Account | None:
        """The account at `path` below this one."""
        here: Account | None = self
        for name in path:
            here = next((child for child in here.children if child.name == name), None) if here else None
        return here

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, Account]]:
        """Every account with its path, parents first, siblings by name."""
        ahead = [(path, self)]
        while ahead:
            at, account = ahead.pop()
            yield at, account
            ahead.extend(((*at, child.name), child) for child in reversed(account.children))


def build_tree(rows: Iterable[tuple[Path, Shares]], *, root: str = "root") -> Account:
    """The tree of rows (path, shares) in any order. Unnamed ancestors have one share; the root is `()`."""
    shares: dict[Path, Shares] = {}
    for path, given in rows:
        _check(path, given)
        if path in shares:
            raise InvalidInput(f"the shares of {'/'.join(path)} are given twice", hint="keep one of them")
        shares[path] = given
    below: dict[Path, set[str]] = {(): set()}
    for path in shares:
        for depth in range(len(path)):
            below.setdefault(path[:depth], set()).add(path[depth])
    return _build(root, 1, (), shares, below)


def _build(
    name: str, own: Shares, path: Path, shares: Mapping[Path, Shares], below: Mapping[Path, set[str]]
) -> Account:
    children = [(child, (*path, child)) for child in sorted(below.get(path, ()))]
    return Account(name, own, tuple(_build(child, shares.get(at, 1), at, shares, below) for child, at in children))


def _check(path: Path, shares: Shares) -> None:
    if not path or not all(path):
        raise InvalidInput("an account without a name", hint="give the path from the organisation down")
    if len(path) > MAX_LEVELS:
        raise InvalidInput(f"{'/'.join(path)[:80]} is {len(path)} levels deep", hint=f"at most {MAX_LEVELS}")
    if shares != PARENT and (isinstance(shares, bool) or not isinstance(shares, int) or shares < 0):
        raise InvalidInput(f"{shares!r} shares for {'/'.join(path)}", hint='a whole number from 0, or "parent"')


def siblings(path: Path, account: Account) -> list[tuple[Path, Account]]:
    """The accounts that divide this account's part: its children, dissolved ones replaced by theirs."""
    found: list[tuple[Path, Account]] = []
    for child in account.children:
        at = (*path, child.name)
        if child.dissolves:
            found.extend(siblings(at, child))
        else:
            found.append((at, child))
    return found


def level_shares(account: Account) -> int:
    """The sum of shares in the sibling set below an account; "parent" counts as none."""
    total = 0
    for child in account.children:
        if child.shares != PARENT:
            total += child.shares
        elif child.children:
            total += level_shares(child)
    return total


def total_usage(tree: Account, usage: Mapping[Path, int]) -> dict[Path, int]:
    """Usage of every account with everything below it.

    `usage`: own usage per path. A path that is not in the tree counts for its nearest known ancestor, so that the
    root has the total.
    """
    totals = dict.fromkeys((path for path, _ in tree.walk()), 0)
    for path, amount in usage.items():
        if amount:
            for depth in range(len(path) + 1):
                prefix = path[:depth]
                if prefix not in totals:
                    break
                totals[prefix] += amount
    return totals
