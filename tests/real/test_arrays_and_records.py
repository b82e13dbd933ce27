"""Arrays, periodic jobs, the audit and the history on a real server; and a planted secret that must not come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hodei.server.auth import add_token
from real.house import House, until

pytestmark = pytest.mark.real

CANARY = "canary-5f2e9c"


def test_an_array_runs_so_many_at_once_and_is_one_row(house: House) -> None:
    house.configure('[[nodes]]\nname = "a"\ncpu = "4"\n').up()
    go = house.home.parent / "go"
    script = f"echo $HODEI_ARRAY_INDEX/$HODEI_ARRAY_COUNT/$HODEI_ARRAY_JOB; until [ -e {go} ]; do sleep 0.05; done"
    said = house.ok("submit", "--name", "sweep", "--array", "10-18:2%2", "--cpu", "10m", "--", "sh", "-c", script)
    assert said.out == "array 1[] (sweep) submitted: 5 elements\n"

    def two_run() -> bool:
        (row,) = house.ok("jobs", "-o", "json").json
        return row["array"]["states"] == {"pending": 3, "running": 2}

    until(two_run, "two elements run")
    assert "5 elements: 2 running, 3 pending" in house.ok("jobs").out
    assert house.ok("jobs", "-o", "name").out == "1[]\n"
    assert len(house.ok("jobs", "--elements", "-o", "json").json) == 5
    assert house.ok("why", "1[18]", "-o", "json").json["code"] == "ARRAY_LIMIT"
    house.ok("hold", "1[14-18:2]")
    house.kill()
    house.up()
    assert "at most 2" in house.ok("job", "show", "1[]").out
    house.ok("release", "1[]")
    go.touch()
    assert house.hodei("wait", "sweep[]").code == 0
    assert house.ok("logs", "1[14]").out == "14/5/1\n"
    assert house.hodei("job", "show", "1[11]").code == 3
    assert "5 elements: 5 succeeded" in house.ok("jobs", "-a").out


def test_one_cancel_ends_a_whole_array(house: House) -> None:
    house.configure('[[nodes]]\nname = "a"\ncpu = "2"\n').up()
    house.ok("submit", "--array", "40", "--cpu", "1", "--", "sleep", "100")
    assert "cancel requested" in house.ok("cancel", "1[]", "--reason", "enough").out
    assert house.hodei("wait", "1[]").code == 10
    (row,) = house.ok("jobs", "-a", "-o", "json").json
    assert row["array"]["states"] == {"cancelled": 40}


def test_a_periodic_job_is_made_listed_run_paused_and_removed(house: House) -> None:
    house.up()
    file = house.home.parent / "job.yaml"
    file.write_text("name: report\ncommand: 'echo due $HODEI_DUE_TIME'\ncpu: 10m\nmemory: 1Mi\n")
    house.ok("cron", "add", "nightly", "--schedule", "0 3 * * *", "--timezone", "Europe/Madrid", "-f", str(file))
    assert house.hodei("cron", "add", "nightly", "--schedule", "@daily", "-f", str(file)).code == 8
    assert house.hodei("cron", "add", "x", "--schedule", "61 * * * *", "-f", str(file)).code != 0
    made = house.ok("cron", "run", "nightly", "-o", "json").json["id"]
    assert house.ended(made)[0].job.labels == {"hodei/periodic": "nightly"}
    assert house.log_of(made).startswith("due 20")
    house.ok("cron", "pause", "nightly")
    house.kill()
    house.up()
    (row,) = house.ok("cron", "list", "-o", "json").json
    assert (row["paused"], row["next_at"], row["last_job"], row["last_state"]) == (True, "", made, "succeeded")
    house.ok("cron", "resume", "nightly")
    shown = house.ok("cron", "show", "nightly", "-o", "json").json
    assert shown["next_at"][11:16] in ("01:00", "02:00")
    assert shown["job"]["metadata"]["name"] == "report"
    house.ok("cron", "remove", "nightly")
    assert house.ok("cron", "list", "-o", "json").json == []


def test_every_verb_is_on_record_with_its_caller_and_what_came_of_it(house: House) -> None:
    house.configure('[[nodes]]\nname = "a"\ncpu = "2"\n').up()
    ann = add_token(house.home / "tokens", "ann", "user")

    def as_ann(method: str, path: str, body: object = None) -> int:
        data = None if body is None else json.dumps(body).encode()
        return house.request(
            method, f"/api/v1{path}", data, token=ann, headers={"Content-Type": "application/json"}
        ).status

    until(lambda: as_ann("GET", "/jobs") == 200, "the new token is known")
    assert as_ann("POST", "/jobs", {"command": ["sleep", "100"], "cpu": 99}) == 422
    house.ok("node", "cordon", "a")
    assert as_ann("POST", "/jobs", {"command": ["true"]}) == 201
    for verb in ("hold", "release"):
        assert as_ann("POST", f"/jobs/1/{verb}") == 200
    assert as_ann("PATCH", "/nodes/a", {"cordon": False}) == 403
    assert as_ann("POST", "/jobs/1/cancel", {}) == 200
    assert as_ann("POST", "/jobs/1/cancel", {}) == 409
    assert as_ann("GET", "/audit") == 403
    # Asked with before it was known, the token may have failed once.
    rows = [row for row in house.ok("audit", "-o", "json").json if row["verb"] != "login.failed"]
    assert [(row["who"], row["verb"], row["target"], row["code"]) for row in rows[::-1]] == [
        ("ann", "jobs.submit", "", rows[-1]["code"]),
        ("admin", "nodes.change", "a", ""),
        ("ann", "jobs.submit", "1", ""),
        ("ann", "jobs.hold", "1", ""),
        ("ann", "jobs.release", "1", ""),
        ("ann", "nodes.change", "a", "FORBIDDEN"),
        ("ann", "jobs.cancel", "1", ""),
        ("ann", "jobs.cancel", "1", "CONFLICT"),
    ]
    assert rows[-1]["code"]
    assert {row["remote"] for row in rows} == {"127.0.0.1"}
    house.kill()
    house.up()
    assert len(house.ok("audit", "--who", "ann", "--what", "cancel", "-o", "json").json) == 2
    history = house.ok("job", "history", "1").out
    for line in ("submitted, by ann", "held, by ann", "released, by ann", "cancel requested: cancelled by ann, by ann"):
        assert line in history


def test_a_planted_secret_comes_out_nowhere_but_in_the_job_itself(house: House, tmp_path: Path) -> None:
    house.configure('[server]\ndecision_log = "decisions.jsonl"\n').up()
    document = {
        "name": "spy", "command": ["sh", "-c", "test \"$DB_PASSWORD\" = " + "$(echo $HODEI_JOB_ID | sed s/.*//)x || exit 3"],
        "cpu": "10m", "memory": "1Mi", "env": {"DB_PASSWORD": CANARY, "MODE": "plain-value"},
    }  # fmt: skip
    file = tmp_path / "spy.json"
    file.write_text(json.dumps(document))
    house.ok("submit", str(file))
    house.ended(1)
    house.ok("requeue", "1")
    house.ended(1)
    house.ok("cron", "add", "spy", "--schedule", "@yearly", "-f", str(file))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(document | {"env": {"DB_PASSWORD": CANARY + "\0"}}))
    said = [house.hodei("submit", str(wrong)), house.hodei("plan", str(file))]
    said += [
        house.ok(*command.split(), "-o", output)
        for command in (
            "jobs -a", "job show 1", "job history 1", "events", "audit", "why 1", "cron list", "cron show spy", "nodes",
        )
        for output in ("table", "wide", "json", "yaml")
    ]  # fmt: skip
    told = "".join(one.out + one.err for one in said) + house.said()
    assert CANARY not in told
    assert "plain-value" in told
    for path in ("/events", "/jobs", "/jobs/1", "/jobs/1/why", "/audit", "/periodic", "/periodic/spy"):
        assert CANARY.encode() not in house.request("GET", f"/api/v1{path}").body, path
    assert CANARY.encode() not in house.request("GET", "/metrics").body
    house.stop()
    decisions = (house.home / "decisions.jsonl").read_text()
    assert "plain-value" not in decisions, "no value of a variable, however plain it looks"
    assert "MODE" in decisions
    assert CANARY not in decisions
    for table in ("audit", "event", "note"):
        assert CANARY not in str(house.rows(f"SELECT * FROM {table}"))  # noqa: S608 (constants)
    house.up()
    assert CANARY in house.ok("job", "show", "1", "--show-secrets", "-o", "json").out
    other = add_token(house.home / "tokens", "other", "user")
    until(lambda: house.request("GET", "/api/v1/jobs", token=other).status == 200, "the new token is known")
    refused = house.request("GET", "/api/v1/jobs/1?secrets=show", token=other)
    assert refused.status == 403
    assert CANARY.encode() not in refused.body
