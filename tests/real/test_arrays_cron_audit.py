"""Arrays, periodic jobs and the audit log on a real server; and a secret value that must not leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hodei.server.auth import add_token
from real.installation import Installation, until

pytestmark = pytest.mark.real

CANARY = "canary-5f2e9c"


def test_an_array_respects_its_concurrency_limit_and_is_one_row(installation: Installation) -> None:
    installation.configure('[[nodes]]\nname = "a"\ncpu = "4"\n').up()
    go = installation.home.parent / "go"
    script = f"echo $HODEI_ARRAY_INDEX/$HODEI_ARRAY_COUNT/$HODEI_ARRAY_JOB; until [ -e {go} ]; do sleep 0.05; done"
    submitted = installation.ok(
        "submit", "--name", "sweep", "--array", "10-18:2%2", "--cpu", "10m", "--", "sh", "-c", script
    )
    assert submitted.out == "array 1[] (sweep) submitted: 5 elements\n"

    def two_run() -> bool:
        (row,) = installation.ok("jobs", "-o", "json").json
        return row["array"]["states"] == {"pending": 3, "running": 2}

    until(two_run, "two elements run")
    assert "5 elements: 2 running, 3 pending" in installation.ok("jobs").out
    assert installation.ok("jobs", "-o", "name").out == "1[]\n"
    assert len(installation.ok("jobs", "--elements", "-o", "json").json) == 5
    assert installation.ok("why", "1[18]", "-o", "json").json["code"] == "ARRAY_LIMIT"
    installation.ok("hold", "1[14-18:2]")
    installation.kill()
    installation.up()
    assert "at most 2" in installation.ok("job", "show", "1[]").out
    installation.ok("release", "1[]")
    go.touch()
    assert installation.hodei("wait", "sweep[]").code == 0
    assert installation.ok("logs", "1[14]").out == "14/5/1\n"
    assert installation.hodei("job", "show", "1[11]").code == 3
    assert "5 elements: 5 succeeded" in installation.ok("jobs", "-a").out


def test_one_cancel_ends_a_whole_array(installation: Installation) -> None:
    installation.configure('[[nodes]]\nname = "a"\ncpu = "2"\n').up()
    installation.ok("submit", "--array", "40", "--cpu", "1", "--", "sleep", "100")
    assert "cancel requested" in installation.ok("cancel", "1[]", "--reason", "enough").out
    assert installation.hodei("wait", "1[]").code == 10
    (row,) = installation.ok("jobs", "-a", "-o", "json").json
    assert row["array"]["states"] == {"cancelled": 40}


def test_a_periodic_job_is_created_listed_run_paused_and_removed(installation: Installation) -> None:
    installation.up()
    file = installation.home.parent / "job.yaml"
    file.write_text("name: report\ncommand: 'echo due $HODEI_DUE_TIME'\ncpu: 10m\nmemory: 1Mi\n")
    installation.ok("cron", "create", "nightly", str(file), "--schedule", "0 3 * * *", "--timezone", "Europe/Madrid")
    assert installation.hodei("cron", "create", "nightly", str(file), "--schedule", "@daily").code == 8
    assert installation.hodei("cron", "create", "x", str(file), "--schedule", "61 * * * *").code != 0
    made = installation.ok("cron", "run", "nightly", "-o", "json").json["id"]
    assert installation.ended(made)[0].job.labels == {"hodei/periodic": "nightly"}
    assert installation.log_of(made).startswith("due 20")
    installation.ok("cron", "pause", "nightly")
    installation.kill()
    installation.up()
    (row,) = installation.ok("cron", "list", "-o", "json").json
    assert (row["paused"], row["next_at"], row["last_job"], row["last_state"]) == (True, "", made, "succeeded")
    installation.ok("cron", "resume", "nightly")
    shown = installation.ok("cron", "show", "nightly", "-o", "json").json
    assert shown["next_at"][11:16] in ("01:00", "02:00")
    assert shown["job"]["metadata"]["name"] == "report"
    installation.ok("cron", "delete", "nightly")
    assert installation.ok("cron", "list", "-o", "json").json == []


def test_every_verb_is_audited_with_its_caller_and_result(installation: Installation) -> None:
    installation.configure('[[nodes]]\nname = "a"\ncpu = "2"\n').up()
    ann = add_token(installation.home / "tokens", "ann", "user")

    def as_ann(method: str, path: str, body: object = None) -> int:
        data = None if body is None else json.dumps(body).encode()
        return installation.request(
            method, f"/api/v1{path}", data, token=ann, headers={"Content-Type": "application/json"}
        ).status

    until(lambda: as_ann("GET", "/jobs") == 200, "the new token is known")
    assert as_ann("POST", "/jobs", {"command": ["sleep", "100"], "cpu": 99}) == 422
    installation.ok("node", "cordon", "a")
    assert as_ann("POST", "/jobs", {"command": ["true"]}) == 201
    for verb in ("hold", "release"):
        assert as_ann("POST", f"/jobs/1/{verb}") == 200
    assert as_ann("PATCH", "/nodes/a", {"cordon": False}) == 403
    assert as_ann("POST", "/jobs/1/cancel", {}) == 200
    assert as_ann("POST", "/jobs/1/cancel", {}) == 409
    assert as_ann("GET", "/audit") == 403
    # The first request may have been sent before the server read the new token.
    rows = [row for row in installation.ok("audit", "-o", "json").json if row["verb"] != "login.failed"]
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
    installation.kill()
    installation.up()
    assert len(installation.ok("audit", "--who", "ann", "--what", "cancel", "-o", "json").json) == 2
    history = installation.ok("job", "history", "1").out
    for line in ("submitted, by ann", "held, by ann", "released, by ann", "cancel requested: cancelled by ann, by ann"):
        assert line in history


def test_a_secret_value_is_visible_only_in_the_job_itself(installation: Installation, tmp_path: Path) -> None:
    installation.configure('[server]\ndecision_log = "decisions.jsonl"\n').up()
    document = {
        "name": "spy", "command": ["sh", "-c", "test \"$DB_PASSWORD\" = " + "$(echo $HODEI_JOB_ID | sed s/.*//)x || exit 3"],
        "cpu": "10m", "memory": "1Mi", "env": {"DB_PASSWORD": CANARY, "MODE": "plain-value"},
    }  # fmt: skip
    file = tmp_path / "spy.json"
    file.write_text(json.dumps(document))
    installation.ok("submit", str(file))
    installation.ended(1)
    installation.ok("requeue", "1")
    installation.ended(1)
    installation.ok("cron", "create", "spy", str(file), "--schedule", "@yearly")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(document | {"env": {"DB_PASSWORD": CANARY + "\0"}}))
    results = [installation.hodei("submit", str(wrong)), installation.hodei("plan", str(file))]
    results += [
        installation.ok(*command.split(), "-o", output)
        for command in (
            "jobs -a", "job show 1", "job history 1", "events", "audit", "why 1", "cron list", "cron show spy", "nodes",
        )
        for output in ("table", "wide", "json", "yaml")
    ]  # fmt: skip
    outputs = "".join(result.out + result.err for result in results) + installation.server_output()
    assert CANARY not in outputs
    assert "plain-value" in outputs
    for path in ("/events", "/jobs", "/jobs/1", "/jobs/1/why", "/audit", "/periodic", "/periodic/spy"):
        assert CANARY.encode() not in installation.request("GET", f"/api/v1{path}").body, path
    assert CANARY.encode() not in installation.request("GET", "/metrics").body
    installation.stop()
    decisions = (installation.home / "decisions.jsonl").read_text()
    assert "plain-value" not in decisions, "no value of a variable is logged, also none that does not look secret"
    assert "MODE" in decisions
    assert CANARY not in decisions
    for table in ("audit", "event", "note"):
        assert CANARY not in str(installation.rows(f"SELECT * FROM {table}"))  # noqa: S608 (constants)
    installation.up()
    assert CANARY in installation.ok("job", "show", "1", "--show-secrets", "-o", "json").out
    other = add_token(installation.home / "tokens", "other", "user")
    until(lambda: installation.request("GET", "/api/v1/jobs", token=other).status == 200, "the new token is known")
    refused = installation.request("GET", "/api/v1/jobs/1?secrets=show", token=other)
    assert refused.status == 403
    assert CANARY.encode() not in refused.body
