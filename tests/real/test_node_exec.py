"""Commands on a node, with a real server: they cannot escape the audit, and they end with the server or at their time."""

from __future__ import annotations

import http.client
import json

import pytest

from real.house import House

pytestmark = pytest.mark.real
EXECUTED = "SELECT target, code, detail FROM audit WHERE verb = 'nodes.execute'"


def the_node(house: House) -> str:
    (node,) = [node.name for node in house.client().nodes()]
    return node


def execute(house: House, node: str, *command: str, timeout_s: int = 30) -> None:
    """Ask for it, and expect that the server is killed before it answers."""
    body = json.dumps({"command": command, "timeout_s": timeout_s}).encode()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        house.request("POST", f"/api/v1/nodes/{node}/execute", body)


def test_a_command_that_kills_the_server_is_in_the_audit(house: House) -> None:
    house.up()
    node = the_node(house)
    assert house.server is not None
    script = f"kill -9 {house.server.pid}"
    execute(house, node, "sh", "-c", script)
    assert house.rows(EXECUTED) == [(node, "", f"sh -c '{script}'")]
