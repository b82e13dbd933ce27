"""Policies about accounts from what an operator wrote. InvalidInput says which section is wrong, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TypeVar

from hodei.control.accounting.accounts import AccountsPolicy
from hodei.control.accounting.budgets import ProjectBudget
from hodei.control.accounting.quotas import ProjectQuota
from hodei.control.accounting.ranges import Range
from hodei.control.accounting.shares import SharesPolicy
from hodei.engine.fairness.billing import MICRO, parse_rates
from hodei.engine.fairness.lending import quota_of
from hodei.engine.fairness.tree import Path, Shares
from hodei.model.config import (
    AccountConfig,
    Amount,
    BudgetConfig,
    QuotaConfig,
    RangeConfig,
    SchedulingConfig,
    SharesConfig,
)
from hodei.model.errors import InvalidInput
from hodei.model.job import PRIORITY_CLASSES
from hodei.model.resources import Resources, parse_duration_ms, parse_resources

_BUCKET_MS = 3_600_000
C = TypeVar("C")
P = TypeVar("P")
ROLES = ("viewer", "user", "admin")


def accounts_policy(config: SchedulingConfig) -> AccountsPolicy:
    return AccountsPolicy(
        shares=_told("scheduling.shares", _shares, config.shares) if config.shares.enabled else None,
        quotas={name: _told(f"scheduling.quotas.{name}", _quota, one) for name, one in config.quotas.items()},
        budgets={name: _told(f"scheduling.budgets.{name}", _budget, one) for name, one in config.budgets.items()},
        ranges={name: _told(f"scheduling.ranges.{name}", _range, one) for name, one in config.ranges.items()},
        max_priority=_told("scheduling.admission.max_priority", _priorities, config.admission.max_priority),
        project_users=config.admission.project_users,
    )


def _told(where: str, make: Callable[[C], P], config: C) -> P:
    try:
        return make(config)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}", hint=error.hint) from error


def _shares(config: SharesConfig) -> SharesPolicy:
    half_life_ms, window_ms = parse_duration_ms(config.half_life), parse_duration_ms(config.window or "0s")
    for name, span_ms in (("half_life", half_life_ms), ("window", window_ms)):
        if (name == "half_life" or config.window) and (span_ms < _BUCKET_MS or span_ms % _BUCKET_MS):
            raise InvalidInput(f"{name} = {getattr(config, name)!r}", hint="whole hours, at least one: 1h, 7d")
    places = _places(config.accounts)
    shares: dict[Path, Shares] = {places[account.name]: account.shares for account in config.accounts}
    for account in config.accounts:
        shares |= {(*places[account.name], user): given for user, given in account.users.items()}
    return SharesPolicy(
        config.formula, half_life_ms, window_ms, max(parse_duration_ms(config.refresh), 1),
        parse_rates(config.weights), config.mode, places, shares,
    )  # fmt: skip


def _places(accounts: tuple[AccountConfig, ...]) -> dict[str, Path]:
    by_name = {account.name: account for account in accounts}
    if len(by_name) < len(accounts):
        names = [account.name for account in accounts]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"account {twice!r} is given twice", hint="keep one of them")
    out: dict[str, Path] = {}
    for account in accounts:
        path: Path = (account.name,)
        above = account.under
        while above:
            if above not in by_name:
                raise InvalidInput(f"account {account.name!r} is under {above!r}, which is not an account")
            if above in path:
                raise InvalidInput(f"account {account.name!r} is under itself: {' < '.join((*path, above))}")
            path, above = (above, *path), by_name[above].under
        if any("/" in name or not name for name in path):
            raise InvalidInput(f"an account named {account.name!r}", hint="a name without slashes")
        out[account.name] = path
    return out


def _quota(config: QuotaConfig) -> ProjectQuota:
    if (config.lend or config.borrow) and not config.cohort:
        raise InvalidInput("lend and borrow need a cohort", hint='cohort = "lab", the same for all who share')
    if config.pending is not None and config.pending < 0:
        raise InvalidInput(f"pending = {config.pending}", hint="how many jobs may wait, from 0")
    quota = quota_of(config.hard, borrowing_limit=config.borrow, lending_limit=config.lend, weight=config.weight)
    return ProjectQuota(quota, _amounts(config.soft), _amounts(config.per_user), config.cohort, config.pending)


def _range(config: RangeConfig) -> Range:
    least, most, default = _amounts(config.min), _amounts(config.max), _amounts(config.default)
    for resource in sorted(least.keys() & most.keys()):
        if least[resource] > most[resource]:
            raise InvalidInput(f"the least {resource} is more than the most")
    for resource, amount in default.items():
        if amount < least.get(resource, 0) or amount > most.get(resource, amount):
            raise InvalidInput(f"the default {resource} is out of its own range")
    return Range(least, most, default)


def _budget(config: BudgetConfig) -> ProjectBudget:
    if config.money is not None and not config.prices:
        raise InvalidInput("money without prices", hint='prices = {gpu = "2.50", cpu = "0.04"}, for an hour of each')
    if config.money is not None and not 0 <= config.money <= 1e12:
        raise InvalidInput(f"money = {config.money}", hint="an amount from 0")
    if not config.hours and config.money is None:
        raise InvalidInput("a budget without a bound", hint="hours = {gpu = 500}, or money with prices")
    since_ms, period = 0, config.period
    if config.since:
        try:
            day = datetime.fromisoformat(config.since)
        except ValueError:
            raise InvalidInput(f"since = {config.since!r}", hint="a day such as 2026-01-31") from None
        since_ms, period = round(day.replace(tzinfo=day.tzinfo or UTC).timestamp() * 1000), ""
    if not period and not config.since:
        raise InvalidInput("neither a period nor a day since when", hint='period = "month", or since = "2026-01-31"')
    money = None if config.money is None else round(config.money * MICRO)
    return ProjectBudget(_amounts(config.hours), money, parse_rates(config.prices), period, since_ms)


def _amounts(given: Mapping[str, Amount]) -> Resources:
    amounts = parse_resources(given)
    if any(amount < 0 for amount in amounts.values()):
        raise InvalidInput("an amount below zero")
    return amounts


def _priorities(given: Mapping[str, int | str]) -> dict[str, int]:
    out = {}
    for role, most in given.items():
        if role not in ROLES:
            raise InvalidInput(f"there is no role {role!r}", hint=f"one of: {', '.join(ROLES)}")
        if isinstance(most, str) and most not in PRIORITY_CLASSES:
            raise InvalidInput(f"unknown priority {most!r}", hint=f"{', '.join(PRIORITY_CLASSES)} or a whole number")
        out[role] = PRIORITY_CLASSES[most] if isinstance(most, str) else most
    return out
