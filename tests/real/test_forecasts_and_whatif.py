"""Forecasts and what-if queries on a real server. Queries change nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from real.installation import Installation, until

pytestmark = pytest.mark.real

ONE_NODE = """
[scheduling.forecast]
every = "1s"
[[nodes]]
name = "a"
cpu = 2
memory = "2Gi"
"""


def fill_node(installation: Installation, **fields: Any) -> int:
    """Run a job that fills the node, with an estimate of an hour."""
    id = installation.submit("sleep", "600", cpu=2, estimate="1h", **fields)
    installation.until_state(id, "running")
    return id


def state_of(installation: Installation) -> str:
    """A fingerprint of all jobs, runs, nodes and events in the store."""
    tables = ("job", "run", "event", "mark", "reservation", "key")
    rows = [installation.rows(f"SELECT * FROM {table} ORDER BY 1") for table in tables]  # noqa: S608 (names of our own)
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def whatif(installation: Installation, *args: str) -> Any:
    return installation.ok("whatif", "-o", "json", *args).json


@pytest.fixture
def busy(installation: Installation) -> Installation:
    """A server with one job that runs for an hour, and another that is pending."""
    installation.configure(ONE_NODE).up()
    fill_node(installation)
    installation.submit("true", name="next", cpu=2, estimate="10m")
    return installation


def test_a_what_if_job_starts_after_the_jobs_before_it(busy, tmp_path):
    (tmp_path / "job.yaml").write_text("name: mine\ncommand: ['true']\ncpu: 2\nestimate: 5m\n")
    before = state_of(busy)
    answer = whatif(busy, str(tmp_path / "job.yaml"))
    (mine,) = answer["jobs"]
    assert mine["nodes"] == ["a"]
    minutes = (mine["start_ms"] - answer["at_ms"]) / 60_000
    assert 60 < minutes <= 70, "after the running job (1 h) and the pending one (10 min)"
    assert answer["same"] == 1
    assert state_of(busy) == before
    text = busy.ok("whatif", str(tmp_path / "job.yaml")).out
    assert "mine would start at " in text
    assert "1 pending job would start at the same time" in text


def test_what_if_lists_the_victims_of_a_critical_job(busy):
    urgent = ("--priority", "critical", "--cpu", "2", "--timeout", "5m", "--", "true")
    answer = whatif(busy, *urgent)
    assert answer["jobs"][0]["start_ms"] == answer["at_ms"]
    (victim,) = answer["evicted"]
    assert (victim["job"], victim["by_name"]) == (1, "true")
    assert victim["again_ms"] > answer["at_ms"]
    assert "would be stopped" in busy.ok("whatif", *urgent).out


def test_what_if_reports_changed_starts_for_other_nodes_and_policies(busy, tmp_path):
    more = whatif(busy, "--add-nodes", "1", "--like", "a")
    assert [(job["job"], job["nodes"]) for job in more["sooner"]] == [(2, ["a-new-1"])]
    assert more["sooner"][0]["start_ms"] == more["at_ms"]
    fewer = whatif(busy, "--remove-node", "a")
    assert [victim["job"] for victim in fewer["evicted"]] == [1]
    assert [job["job"] for job in fewer["later"]] == [2]
    assert "start_ms" not in fewer["later"][0], "no job starts without a node"
    (tmp_path / "easy.toml").write_text(
        '[scheduling.profiles.default]\nqueue = "batch"\n[scheduling.profiles.default.options.batch]\nbackfill = "easy"\n'
    )
    same = whatif(busy, "--policy", str(tmp_path / "easy.toml"))
    assert same["same"] == 1
    assert busy.client().job(2).job.state == "pending"


@pytest.mark.parametrize(
    ("args", "words", "code"),
    [
        ((), "there is no change to assume", 2),
        (("--like", "a"), "--like", 2),
        (("--remove-node", "b"), "no node 'b'", 3),
        (("--add-nodes", "0"), "0", 2),
        (("--cpu", "64", "--", "true"), "can never run here", 5),
        (("--policy", "/nowhere.toml"), "no file", 2),
    ],
    ids=[
        "no change",
        "like without nodes",
        "an unknown node",
        "no nodes",
        "too large for any node",
        "no such file",
    ],
)
def test_an_invalid_what_if_query_is_refused_with_a_clear_error(busy, args, words, code):
    result = busy.hodei("whatif", *args)
    assert (result.code, words in result.err) == (code, True), result


@pytest.mark.parametrize(
    "line",
    [
        'plugins = ["{}"]',
        'queue = "{}"\noptions = {{"{}" = {{command = "{}"}}}}',
        'queue = "fifo"\nsecondary = "{}"\noptions = {{"{}" = {{command = "{}"}}}}',
        'score_plugins = ["{}"]\noptions = {{"{}" = {{command = "{}"}}}}',
    ],
    ids=["as a plugin", "as a queue", "as a second order", "as a score"],
)
def test_a_what_if_policy_cannot_load_code(busy, tmp_path, line):
    command = f"touch {tmp_path / 'ran'}"
    (tmp_path / "evil.toml").write_text("[profiles.default]\n" + line.format("os:system", "os:system", command) + "\n")
    refused = busy.hodei("whatif", "--policy", str(tmp_path / "evil.toml"))
    assert refused.code == 1
    assert "not in use on this server" in refused.err
    assert not (tmp_path / "ran").exists()


def test_why_shows_the_forecast_and_forecasts_are_graded_and_stored(busy):
    def forecast() -> Any:
        return busy.ok("why", "2", "-o", "json").json.get("forecast")

    first = until(forecast, "there is a forecast")
    assert first["p50_ms"] <= first["p90_ms"]
    assert 50 < (first["p50_ms"] - first["made_ms"]) / 60_000 <= 60
    assert "at the latest in 9 of 10 cases" in busy.ok("why", "2").out
    view = busy.ok("job", "show", "2", "-o", "json").json
    assert json.dumps(view).count("start_p90") == 1
    until(lambda: "forecasts" in _notes(busy), "the forecast is stored")
    busy.kill()
    busy.up()
    until(forecast, "there is a forecast after a restart")
    busy.ok("cancel", "1")
    busy.ended(2)
    until(lambda: _metric(busy, "hodei_forecast_graded_total") >= 1, "the forecast was graded")
    assert _metric(busy, "hodei_forecast_covered_total") >= 1


def _notes(installation: Installation) -> list[str]:
    return [name for (name,) in installation.rows("SELECT name FROM note")]


def _metric(installation: Installation, name: str) -> float:
    text = installation.request("GET", "/metrics").body.decode()
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)
