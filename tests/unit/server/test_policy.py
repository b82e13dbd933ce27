"""Every route has a policy, and the app enforces it."""

from __future__ import annotations

import re

import pytest
from starlette.routing import Route as StarletteRoute

from hodei.server.app import Endpoint, make_app
from hodei.server.route import ADMIN, API, ENROLMENT, NODE, PUBLIC, READ, WRITE, Policy
from hodei.server.routes import route_table

TABLE = route_table()
GUARDED = [route for route in TABLE if route.policy is not PUBLIC]


def filled(path: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda part: "1" if part[1] == "id" else "n1", path)


def route_id(route) -> str:
    return f"{route.method} {route.path}"


def test_the_app_serves_exactly_the_table(app):
    mounted = []
    for route in app.router.routes:
        assert isinstance(route, StarletteRoute)
        assert isinstance(route.app, Endpoint)
        assert route.methods - {"HEAD"} == {route.app.route.method}
        assert route.path == route.app.route.path
        mounted.append(route.app.route)
    assert mounted == list(app.table) == list(TABLE)
    assert len({route_id(route) for route in TABLE}) == len(TABLE)
    assert all(isinstance(route.policy, Policy) for route in TABLE)


def test_the_public_routes_are_these():
    public = {route.path for route in TABLE if route.policy is PUBLIC}
    assert public == {"/", "/livez", "/readyz", f"{API}/schema/job", f"{API}/openapi.json"}


@pytest.mark.parametrize("route", GUARDED, ids=route_id)
def test_a_request_without_a_valid_token_is_refused(call, route):
    path = filled(route.path)
    anonymous = call(route.method, path, role="")
    assert (anonymous.status, anonymous.code) == (401, "UNAUTHORIZED")
    assert "Authorization: Bearer" in anonymous.json["hint"]
    assert anonymous.headers["www-authenticate"].startswith("Bearer")
    for wrong in ("Bearer nonsense", "Bearer ", "Basic dXNlcjp0b2tlbg==", "user-token", "Bearer user-token-x"):
        assert call(route.method, path, role="", headers={"authorization": wrong}).status == 401


@pytest.mark.parametrize("route", GUARDED, ids=route_id)
def test_each_role_can_do_what_the_policy_allows_and_no_more(call, route):
    for role, rank in (("viewer", 1), ("user", 2), ("admin", 3)):
        if route.path.endswith("/stream") and rank >= route.policy.rank:
            continue  # admitted streams do not end by themselves; test_stream_real tests them
        response = call(route.method, filled(route.path), role=role)
        if rank < route.policy.rank:
            assert (response.status, response.code) == (403, "FORBIDDEN")
        else:
            assert response.status not in (401, 403)


def test_changes_need_write_rights_and_changes_of_nodes_admin_rights():
    for route in TABLE:
        if route.method != "GET" and not route.path.endswith(("/plan", "/whatif")):
            assert route.policy in (WRITE, ADMIN, ENROLMENT, NODE)
    assert all(route.policy is ADMIN for route in TABLE if "/nodes" in route.path and route.method != "GET")


def test_routes_of_agents_are_open_to_no_role():
    own = {route.path.removeprefix(API): route.policy for route in TABLE if route.policy in (ENROLMENT, NODE)}
    assert own == {"/agent/enrol": ENROLMENT, "/agent/exchange": NODE, "/agent/rotate": NODE}


@pytest.mark.parametrize("name", ["livez", "readyz", "metrics", "health", "openapi.json"])
def test_a_resource_named_like_a_public_path_is_not_public(call, name):
    for path in (f"{API}/nodes/{name}", f"{API}/jobs/{name}", f"{API}/jobs/{name}/why"):
        assert call("GET", path, role="").status == 401


@pytest.mark.parametrize(
    "path", ["//livez", "/livez/", "/x/livez", "/livez/..", f"{API}/livez", f"{API}/nodes/../livez"]
)
def test_a_path_that_only_ends_like_a_public_one_is_not_served(call, path):
    assert call("GET", path, role="").status in (401, 404)


def test_a_token_in_the_url_is_not_a_token(call):
    assert call("GET", f"{API}/jobs?token=user-token", role="").status == 401
    response = call("GET", f"{API}/jobs?token=user-token")
    assert response.status == 422
    assert "must not contain a token" in response.json["message"]


def test_metrics_are_public_only_if_configured(service, tokens):
    policies = {
        open: {r.path: r.policy for r in make_app(service, tokens, metrics_public=open).table} for open in (0, 1)
    }
    assert policies[0]["/metrics"] is READ
    assert policies[1]["/metrics"] is PUBLIC
