"""The HTTP API. The route table (`routes/`) is the source of the app, its policy checks and its OpenAPI document.

A handler parses its parameters, calls the service (`runtime`) and renders the answer (`api`, `jobfile`); it decides nothing
about jobs. A request passes `serving` (connection), `guard` (host, origin, size), `app` (route, policy, parameters, body),
`routes` and `errors` (status codes).
"""
