"""The table: every route there is. What is not listed here cannot be reached."""

from __future__ import annotations

from hodei.server.route import PUBLIC, READ, Route
from hodei.server.routes import (
    arrays,
    audit,
    backends,
    config,
    cron,
    events,
    graph,
    job_actions,
    jobs,
    nodes,
    reservations,
    sharing,
    system,
    whatif,
)


def table(*, metrics_public: bool = False) -> tuple[Route, ...]:
    """The busiest first: the router looks from the top."""
    return (
        *jobs.ROUTES,
        *job_actions.ROUTES,
        *graph.ROUTES,
        *nodes.ROUTES,
        *reservations.ROUTES,
        *events.ROUTES,
        *whatif.ROUTES,
        *arrays.ROUTES,
        *cron.ROUTES,
        *audit.ROUTES,
        *backends.ROUTES,
        *config.ROUTES,
        *sharing.ROUTES,
        *system.ROUTES,
        system.metrics_route(PUBLIC if metrics_public else READ),
    )
