"""Gauges about who has had how much and who may have how much. For as many projects as a person can look at."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from hodei.control.accounting.accounts import Accounts

# More than so many would be too many series: then there are none, and `hodei share` and `hodei quota` have them all.
_MAX_PROJECTS = 200


class SharingMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.factor = Gauge("hodei_share_factor", "Fair-share factor, 0 to 1", ["account"], registry=registry)
        self.quota = Gauge(
            "hodei_quota_used_ratio",
            "What a project holds of its hard quota",
            ["project", "resource"],
            registry=registry,
        )

    def read(self, accounts: Accounts) -> None:
        self.factor.clear()
        self.quota.clear()
        factors = accounts.sharing.account_factors() if accounts.sharing is not None and accounts.policy.shares else {}
        if len(factors) <= _MAX_PROJECTS:
            for account, milli in factors.items():
                self.factor.labels(account).set(milli / 1000)
        rows = accounts.quota_rows()
        if len({row.project for row in rows}) <= _MAX_PROJECTS:
            for row in rows:
                if row.hard:
                    self.quota.labels(row.project, row.resource).set(row.used / row.hard)
