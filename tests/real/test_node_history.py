"""The runs of a node over time, and its utilisation."""

from __future__ import annotations

import pytest

from real.installation import Installation

pytestmark = pytest.mark.real

CONFIG = '[[nodes]]\nname = "a"\ncpu = "2"\nmemory = "1Gi"\n\n[[nodes]]\nname = "b"\ncpu = "2"\nmemory = "1Gi"\n'


def test_the_history_of_a_node_has_its_runs_and_its_utilisation_in_pages(installation: Installation) -> None:
    installation.configure(CONFIG).up()
    installation.ok("node", "label", "a", "which=a")
    installation.ok("node", "label", "b", "which=b")
    on_a = [
        installation.submit("sh", "-c", f"sleep 0.2; exit {n}", cpu=1, node_selector={"which": "a"}) for n in range(5)
    ]
    on_b = installation.submit("true", node_selector={"which": "b"})
    installation.ended(*on_a, on_b)
    running = installation.submit("sleep", "600", cpu=2, node_selector={"which": "a"})
    installation.until_state(running, "running")
    rows = installation.ok("node", "history", "a", "-o", "json").json
    assert [row["job"] for row in rows] == [running, *reversed(on_a)]
    assert [row["exit_code"] for row in rows] == [None, 4, 3, 2, 1, 0]
    assert rows[0]["finished_at"] == ""
    assert rows[1]["finished_at"] > rows[1]["placed_at"] > ""
    assert rows[0]["resources"]["cpu"] == "2"
    assert [row["job"] for row in installation.ok("node", "history", "b", "-o", "json").json] == [on_b]
    table = installation.ok("node", "history", "a")
    assert "NAME" in table.lines[0]
    assert len(table.lines) == 7
    assert "allocated on average" in table.err
    assert "cpu " in table.err
    # Pages contain the same runs, and their busy times add up to the whole.
    with installation.client() as client:
        whole = client.node_history("a", since="1h")
        assert whole.next == ""
        pages, after = [], ""
        while True:
            page = client.node_history("a", since=whole.since, until=whole.until, after=after, limit=2)
            pages.append(page)
            after = page.next
            if not after:
                break
        assert [run for page in pages for run in page.runs] == whole.runs
        assert sum(page.busy_ms.get("cpu", 0) for page in pages) == whole.busy_ms["cpu"]
        # Five jobs used half the node for at least 0.2 s each.
        assert whole.busy_ms["cpu"] >= 500
        assert client.node_history("a", since="2000-01-01", until="2000-01-02").runs == []
    refused = installation.hodei("node", "history", "c")
    assert (refused.code, "there is no node 'c'" in refused.err) == (3, True)
    assert installation.request("GET", "/api/v1/nodes/a/history?after=x.y.z").status == 422
    assert installation.request("GET", "/api/v1/nodes/a/history?since=1h&until=2h").status == 422
    installation.ok("cancel", str(running))
    installation.ended(running)
    # A node that is no longer offered keeps its history.
    installation.stop()
    installation.configure(CONFIG.replace('name = "a"', 'name = "z"')).up()
    assert len(installation.ok("node", "history", "a", "-o", "json").json) == 6
