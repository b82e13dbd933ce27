"""The table of all routes. A path that is not in it cannot be reached."""

from __future__ import annotations

from hodei.server.route import PUBLIC, READ, Route
from hodei.server.routes import agents, cluster, explain, jobs, system, usage


def route_table(*, metrics_public: bool = False) -> tuple[Route, ...]:
    """The busiest routes first: the router tries them in order."""
    return (
        *jobs.ROUTES,
        *jobs.ACTION_ROUTES,
        *agents.EXCHANGE_ROUTES,
        *explain.ROUTES,
        *cluster.NODE_ROUTES,
        *system.EVENT_ROUTES,
        *jobs.ARRAY_ROUTES,
        *jobs.PERIODIC_ROUTES,
        *cluster.RESERVATION_ROUTES,
        *cluster.BACKEND_ROUTES,
        *cluster.EXEC_ROUTES,
        *cluster.SHARING_ROUTES,
        *usage.ROUTES,
        *agents.ROUTES,
        *system.AUDIT_ROUTES,
        *system.CONFIG_ROUTES,
        *system.ROUTES,
        system.metrics_route(PUBLIC if metrics_public else READ),
    )
