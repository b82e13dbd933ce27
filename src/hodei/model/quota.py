"""How a project stands with its quota: one row for each resource that has one."""

from __future__ import annotations

from msgspec import Struct


class QuotaRow(Struct, frozen=True, omit_defaults=True):
    """Amounts in base units (`jobs`: how many run). `hard` may not be passed but by `borrowed`, of which at most
    `may_borrow` (None: all that the cohort lends). `more`: what could start now. `by`: the users that hold most."""

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
