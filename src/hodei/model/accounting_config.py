"""What an operator can set about who may have how much: shares, quotas, budgets, and the least and most of one job."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

Amount = str | int | float


class AccountConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An organisation or a project. `under` names the account that it is part of (none: it stands at the top), `shares`
    what it is due beside its siblings (or "parent": it dissolves into the account above), `users` what its users are."""

    name: str
    under: str = ""
    shares: int | Literal["parent"] = 1
    users: dict[str, int | Literal["parent"]] = {}


class SharesConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fair share. `half_life`: after so long use counts half; `window`: instead, only the last so long counts, in full.
    `weights`: what one core, one byte (`0.25/Gi`), one GPU is worth, added up (`sum`) or only the dearest (`max`).
    `refresh`: how often factors are worked out anew. Accounts that are not named have one share."""

    enabled: bool = False
    formula: Literal["fair_tree", "classic", "drf"] = "fair_tree"
    half_life: str = "7d"
    window: str = ""
    refresh: str = "1m"
    weights: dict[str, Amount] = field(default_factory=lambda: {"cpu": "1.0", "memory": "0.25/Gi", "gpu": "8.0"})
    mode: Literal["sum", "max"] = "sum"
    accounts: tuple[AccountConfig, ...] = ()


class QuotaConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the jobs of a project may hold at once. `jobs` is a resource too: how many run. `hard` is never passed but by
    borrowing within the `cohort`: at most `borrow` more, of what its members do not use and, by `lend`, give. `soft` may
    be passed while nobody else waits for room. `per_user`: the same as hard for each user. `pending`: how many may wait.
    """

    hard: dict[str, Amount] = {}
    soft: dict[str, Amount] = {}
    per_user: dict[str, Amount] = {}
    cohort: str = ""
    lend: dict[str, Amount] = {}
    borrow: dict[str, Amount] = {}
    weight: int = 1
    pending: int | None = None


class RangeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one member of a job of the project may ask for, at least and at most, and what it gets that does not say."""

    min: dict[str, Amount] = {}
    max: dict[str, Amount] = {}
    default: dict[str, Amount] = {}


class BudgetConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a project may use over time: `hours` of whole resources (GPU-hours, core-hours) and `money` at `prices` an hour.
    `period` starts it anew every day, week or month (UTC); `since` is a fixed day (2026-01-31) instead."""

    hours: dict[str, Amount] = {}
    money: float | None = None
    prices: dict[str, Amount] = {}
    period: Literal["", "day", "week", "month"] = "month"
    since: str = ""
