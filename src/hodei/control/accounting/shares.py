"""Fair share: from the usage of accounts to a factor for each account.

Accounts form a tree: organisations, projects, users. A project without a configured place is directly below the root with
one share, as is every user within a project. Factors are computed every `refresh_ms`, for all known accounts; until then a
new account has the factor of its parent. Dominant shares follow what is held now, and need no refresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from hodei.control.accounting.ledger import Ledger
from hodei.control.accounting.quotas import NO_USER
from hodei.control.state import ClusterState
from hodei.engine.fairness.billing import BILLING, Mode, Rate, bill
from hodei.engine.fairness.formulas import classic, dominant_share, fair_tree, fair_tree_ranks
from hodei.engine.fairness.tree import Account, Path, Shares, build_tree
from hodei.model.accounting import Formula, ShareRow, UsageRow
from hodei.model.job import JobSpec, Run
from hodei.model.resources import Resources

_MAX_FACTOR = 1000


class SharesPolicy(Struct, frozen=True):
    """`places`: the path of each organisation and project. `shares`: by path, users included; the default is one."""

    formula: Formula = "fair_tree"
    half_life_ms: int = 7 * 86_400_000
    window_ms: int = 0
    refresh_ms: int = 30_000
    rates: Mapping[str, Rate] = {}
    mode: Mode = "sum"
    places: Mapping[str, Path] = {}
    shares: Mapping[Path, Shares] = {}


class FairShare:
    def __init__(self, policy: SharesPolicy, cluster: ClusterState) -> None:
        self._policy, self._cluster = policy, cluster
        self.ledger = Ledger(half_life_ms=policy.half_life_ms, window_ms=policy.window_ms)
        self.version = 0
        self._changed: dict[str, int] = {}
        self._known: set[Path] = set(policy.shares)
        self._tree: Account | None = None
        self._users: dict[Path, None] = {}
        self._factors: dict[Path, int] = {}
        self._refreshed_ms: int | None = None
        self._held: dict[Path, Resources] = {}
        self._totals: tuple[int, Resources] = (-1, {})

    def path_of(self, project: str, user: str) -> Path:
        return (*self._policy.places.get(project, (project,)), user or NO_USER)

    def path_of_project(self, project: str) -> Path:
        return self.path_of(project, "")[:-1]

    def opened(self, run: Run, spec: JobSpec) -> None:
        path, amounts = self.path_of(spec.project, spec.user), spec.task_of(run.member).request
        billing = bill(amounts, self._policy.rates, self._policy.mode).micro
        self.ledger.opened(run.id, path, {**amounts, BILLING: billing}, run.placed_ms)
        self._hold(spec.project, path, amounts, 1)
        self._add_account(path)

    def closed(self, run: Run, spec: JobSpec) -> None:
        self.ledger.closed(run.id, run.finished_ms or run.placed_ms)
        self._hold(spec.project, self.path_of(spec.project, spec.user), spec.task_of(run.member).request, -1)

    def _hold(self, project: str, path: Path, amounts: Resources, sign: int) -> None:
        """Track what a project holds now, for dominant shares."""
        if self._policy.formula == "drf":
            self.version += 1
            self._changed.pop(project, None)
            self._changed[project] = self.version
        held = self._held.setdefault(path[:-1], {})
        for resource, amount in amounts.items():
            held[resource] = held.get(resource, 0) + sign * amount

    def _add_account(self, path: Path) -> None:
        if path not in self._known:
            self._known.add(path)
            self._tree = None

    def restore(self, rows: Iterable[UsageRow]) -> None:
        kept = list(rows)
        self.ledger.restore(kept)
        self._refreshed_ms = None
        for row in kept:
            self._add_account(row.path)

    def factor_milli(self, project: str, user: str) -> int:
        """1000 for no past use, towards 0 for far too much."""
        path = self.path_of(project, user)
        if self._policy.formula == "drf":
            return self._dominant(path[:-1])[0]
        self._add_account(path)
        factors = self._factors
        if path in factors:
            return factors[path]
        # A new user has the factor of its account until the next refresh.
        return next((factors[path[:d]] for d in range(len(path) - 1, 0, -1) if path[:d] in factors), _MAX_FACTOR)

    def changed_since(self, version: int) -> list[str] | None:
        """The projects whose factors may have changed since that version; None for all."""
        if self._policy.formula == "drf" and self._totals[0] != self._cluster.table.generation:
            self._total_capacity()
            self.version += 1
            return None  # the total capacity has changed
        out = []
        for project, changed in reversed(self._changed.items()):
            if changed <= version:
                break
            out.append(project)
        return out

    def refresh(self, now_ms: int) -> None:
        """Compute factors if a refresh is due; called before they are read."""
        if self._policy.formula == "drf":
            return
        if self._refreshed_ms is not None and now_ms - self._refreshed_ms < self._policy.refresh_ms:
            return
        self._refreshed_ms = now_ms
        self.ledger.fold(now_ms)
        before, self._factors = self._factors, self._compute_factors(now_ms)
        self.version += 1
        for path in self._users:
            if before.get(path) != self._factors[path]:
                project = path[-2] if len(path) > 1 else path[0]
                self._changed.pop(project, None)
                self._changed[project] = self.version

    def _compute_factors(self, now_ms: int) -> dict[Path, int]:
        """The factor of every account."""
        tree, usage = self._accounts(), self._usage(now_ms)
        if self._policy.formula == "classic":
            return {row.path: round(row.factor * _MAX_FACTOR) for row in classic(tree, usage)}
        ranks, ranked = fair_tree_ranks(tree, usage)
        return {path: round(rank / ranked * _MAX_FACTOR) for path, rank in ranks.items()}

    def account_factors(self) -> dict[str, int]:
        """The latest factors of organisations and projects, by path."""
        if self._policy.formula == "drf":
            return {row.account: row.factor_milli for row in self._dominant_rows()}
        return {"/".join(path): factor for path, factor in self._factors.items() if path not in self._users}

    def rows(self, now_ms: int) -> list[ShareRow]:
        """All accounts with all terms of their factors, as of now; parents before children."""
        return self._dominant_rows() if self._policy.formula == "drf" else self._tree_rows(now_ms)

    def _tree_rows(self, now_ms: int) -> list[ShareRow]:
        tree, usage = self._accounts(), self._usage(now_ms)
        users = self._users
        if self._policy.formula == "classic":
            return [
                ShareRow(
                    "/".join(row.path), row.shares, round(row.factor * _MAX_FACTOR), row.path in users, row.level_shares,
                    row.normalised_shares, row.usage, 0, row.normalised_usage, row.effective_usage,
                )
                for row in classic(tree, usage)
            ]  # fmt: skip
        return [
            ShareRow(
                "/".join(row.path), row.shares, round(row.factor * _MAX_FACTOR), row.path in users, row.level_shares,
                row.normalised_shares, row.usage, row.level_usage, row.normalised_usage, None,
                None if row.level_fs in (None, float("inf")) else row.level_fs, row.rank, row.users,
            )
            for row in fair_tree(tree, usage)
        ]  # fmt: skip

    def _accounts(self) -> Account:
        if self._tree is None:
            self._tree = build_tree((path, self._policy.shares.get(path, 1)) for path in sorted(self._known) if path)
            self._users = {path: None for path, account in self._tree.walk() if path and account.is_user}
        return self._tree

    def _usage(self, now_ms: int) -> dict[Path, int]:
        """The usage of users; that of the accounts above is the sum."""
        usage: dict[Path, int] = {}
        for depth in sorted({len(path) for path in self._users}):
            found = self.ledger.usage_of(BILLING, now_ms, depth)
            usage |= {path: amount for path, amount in found.items() if path in self._users}
        return usage

    def _dominant(self, path: Path) -> tuple[int, ShareRow]:
        given = self._policy.shares.get(path, 1)
        weight = given if isinstance(given, int) and given > 0 else 1
        found = dominant_share(self._held.get(path, {}), self._total_capacity(), weight=weight)
        factor = _MAX_FACTOR - min(_MAX_FACTOR, int(found.share * _MAX_FACTOR))
        row = ShareRow("/".join(path), given, factor, used=float(found.share), dominant=found.resource)
        return factor, row

    def _dominant_rows(self) -> list[ShareRow]:
        projects = sorted({path[:-1] for path in self._known if len(path) > 1} | self._held.keys())
        return [self._dominant(path)[1] for path in projects]

    def _total_capacity(self) -> Resources:
        table = self._cluster.table
        if self._totals[0] != table.generation:
            totals: Resources = {}
            for node in self._cluster.nodes.values():
                for resource, amount in node.capacity.items():
                    totals[resource] = totals.get(resource, 0) + amount
            self._totals = (table.generation, totals)
        return self._totals[1]
