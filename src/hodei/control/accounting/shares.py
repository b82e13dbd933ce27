"""Fair share: keeps account of what runs hold and for how long, and turns it into a factor for each account.

Accounts form a tree: organisations, projects, users. A project that nobody has given a place stands directly below the
root with one share, and so does every user within a project. Factors are worked out anew every `refresh_ms`, for the
accounts that have been seen; who is new stands as its account does until then. Dominant shares follow what is held at the
moment, and need no such round.
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

_MOST = 1000


class SharesPolicy(Struct, frozen=True):
    """`places`: for each organisation and project its path; `shares`: by path, users included; others have one."""

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
        self._seen: set[Path] = set(policy.shares)
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

    # ------------------------------------------------------------------------------------------ keeping account

    def opened(self, run: Run, spec: JobSpec) -> None:
        path, amounts = self.path_of(spec.project, spec.user), spec.task_of(run.member).request
        self.ledger.opened(run.id, path, self._with_bill(amounts), run.placed_ms)
        self._hold(spec.project, path, amounts, 1)
        self._see(path)

    def closed(self, run: Run, spec: JobSpec) -> None:
        self.ledger.closed(run.id, run.finished_ms or run.placed_ms)
        self._hold(spec.project, self.path_of(spec.project, spec.user), spec.task_of(run.member).request, -1)

    def _with_bill(self, amounts: Resources) -> Resources:
        return {**amounts, BILLING: bill(amounts, self._policy.rates, self._policy.mode).micro}

    def _hold(self, project: str, path: Path, amounts: Resources, sign: int) -> None:
        """Projects are compared by what they hold now, whoever of their users holds it."""
        if self._policy.formula == "drf":
            self.version += 1
            self._changed.pop(project, None)
            self._changed[project] = self.version
        held = self._held.setdefault(path[:-1], {})
        for resource, amount in amounts.items():
            held[resource] = held.get(resource, 0) + sign * amount

    def _see(self, path: Path) -> None:
        if path not in self._seen:
            self._seen.add(path)
            self._tree = None

    def restore(self, rows: Iterable[UsageRow]) -> None:
        kept = list(rows)
        self.ledger.restore(kept)
        self._refreshed_ms = None
        for row in kept:
            self._see(row.path)

    # ------------------------------------------------------------------------------------------------- factors

    def factor_milli(self, project: str, user: str) -> int:
        """1000 for an account that has had nothing, towards 0 for one that has had far too much."""
        path = self.path_of(project, user)
        if self._policy.formula == "drf":
            return self._dominant(path[:-1])[0]
        self._see(path)
        factors = self._factors
        if path in factors:
            return factors[path]
        # Someone new has used nothing, and until the next round stands as the best of its account.
        return next((factors[path[:d]] for d in range(len(path) - 1, 0, -1) if path[:d] in factors), _MOST)

    def changed_since(self, version: int) -> list[str] | None:
        """The projects whose factors may be others than they were at that version; None for all."""
        if self._policy.formula == "drf" and self._totals[0] != self._cluster.table.generation:
            self._all()
            self.version += 1
            return None  # a share of another whole
        out = []
        for project, changed in reversed(self._changed.items()):
            if changed <= version:
                break
            out.append(project)
        return out

    def refresh(self, now_ms: int) -> None:
        """To be called before factors are asked for; works them out anew if it is time."""
        if self._policy.formula == "drf":
            return
        if self._refreshed_ms is not None and now_ms - self._refreshed_ms < self._policy.refresh_ms:
            return
        self._refreshed_ms = now_ms
        self.ledger.fold(now_ms)
        before, self._factors = self._factors, self._worked_out(now_ms)
        self.version += 1
        for path in self._users:
            if before.get(path) != self._factors[path]:
                project = path[-2] if len(path) > 1 else path[0]
                self._changed.pop(project, None)
                self._changed[project] = self.version

    def _worked_out(self, now_ms: int) -> dict[Path, int]:
        """The factor of every account."""
        tree, usage = self._accounts(), self._usage(now_ms)
        if self._policy.formula == "classic":
            return {row.path: round(row.factor * _MOST) for row in classic(tree, usage)}
        ranks, ranked = fair_tree_ranks(tree, usage)
        return {path: round(rank / ranked * _MOST) for path, rank in ranks.items()}

    def account_factors(self) -> dict[str, int]:
        """As they were last worked out, of organisations and projects, by path."""
        if self._policy.formula == "drf":
            return {row.account: row.factor_milli for row in self._dominant_rows()}
        return {"/".join(path): factor for path, factor in self._factors.items() if path not in self._users}

    def rows(self, now_ms: int) -> list[ShareRow]:
        """Every account with every term, as of now; parents before children."""
        return self._dominant_rows() if self._policy.formula == "drf" else self._tree_rows(now_ms)

    def _tree_rows(self, now_ms: int) -> list[ShareRow]:
        tree, usage = self._accounts(), self._usage(now_ms)
        users = self._users
        if self._policy.formula == "classic":
            return [
                ShareRow(
                    "/".join(row.path), row.shares, round(row.factor * _MOST), row.path in users, row.level_shares,
                    row.normalised_shares, row.usage, 0, row.normalised_usage, row.effective_usage,
                )
                for row in classic(tree, usage)
            ]  # fmt: skip
        return [
            ShareRow(
                "/".join(row.path), row.shares, round(row.factor * _MOST), row.path in users, row.level_shares,
                row.normalised_shares, row.usage, row.level_usage, row.normalised_usage, None,
                None if row.level_fs in (None, float("inf")) else row.level_fs, row.rank, row.users,
            )
            for row in fair_tree(tree, usage)
        ]  # fmt: skip

    def _accounts(self) -> Account:
        if self._tree is None:
            self._tree = build_tree((path, self._policy.shares.get(path, 1)) for path in sorted(self._seen) if path)
            self._users = {path: None for path, account in self._tree.walk() if path and account.is_user}
        return self._tree

    def _usage(self, now_ms: int) -> dict[Path, int]:
        """What users used: what is told of the accounts above them is the sum of it."""
        usage: dict[Path, int] = {}
        for depth in sorted({len(path) for path in self._users}):
            found = self.ledger.usage_of(BILLING, now_ms, depth)
            usage |= {path: amount for path, amount in found.items() if path in self._users}
        return usage

    # --------------------------------------------------------------------------------------- dominant resources

    def _dominant(self, path: Path) -> tuple[int, ShareRow]:
        given = self._policy.shares.get(path, 1)
        weight = given if isinstance(given, int) and given > 0 else 1
        found = dominant_share(self._held.get(path, {}), self._all(), weight=weight)
        factor = _MOST - min(_MOST, int(found.share * _MOST))
        row = ShareRow("/".join(path), given, factor, used=float(found.share), dominant=found.resource)
        return factor, row

    def _dominant_rows(self) -> list[ShareRow]:
        projects = sorted({path[:-1] for path in self._seen if len(path) > 1} | self._held.keys())
        return [self._dominant(path)[1] for path in projects]

    def _all(self) -> Resources:
        """What all nodes have together."""
        table = self._cluster.table
        if self._totals[0] != table.generation:
            totals: Resources = {}
            for node in self._cluster.nodes.values():
                for resource, amount in node.capacity.items():
                    totals[resource] = totals.get(resource, 0) + amount
            self._totals = (table.generation, totals)
        return self._totals[1]
