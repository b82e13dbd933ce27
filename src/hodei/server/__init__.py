"""HTTP: one table of routes (`routes/`), and what is made from it: the app, its policy checks, its OpenAPI document.

Nothing here decides about jobs: a handler reads its parameters, asks the service (`runtime`) and renders the answer
(`api`, `jobfile`). The way of a request: `serving` (the socket) -> `guard` (is it for us, and of a sane size) -> `app` (route,
policy, parameters, body) -> `routes` -> `errors` (the only place that knows statuses).
"""
