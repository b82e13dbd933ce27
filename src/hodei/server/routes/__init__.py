"""The table: every route there is. What is not listed here cannot be reached."""

from __future__ import annotations

from hodei.server.route import PUBLIC, READ, Route
from hodei.server.routes import backends, config, cron, jobs, nodes, reservations, sharing, system


def table(*, metrics_public: bool = False) -> tuple[Route, ...]:
    """The busiest first: the router looks from the top."""
    return (
        *jobs.ROUTES,
        *jobs.ACTION_ROUTES,
        *jobs.GRAPH_ROUTES,
        *nodes.ROUTES,
        *reservations.ROUTES,
        *system.EVENT_ROUTES,
        *config.WHATIF_ROUTES,
        *jobs.ARRAY_ROUTES,
        *cron.ROUTES,
        *system.AUDIT_ROUTES,
        *backends.ROUTES,
        *config.ROUTES,
        *sharing.ROUTES,
        *system.ROUTES,
        system.metrics_route(PUBLIC if metrics_public else READ),
    )
