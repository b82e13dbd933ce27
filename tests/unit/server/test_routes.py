"""The routes: parameters, answers and errors of the service."""

from __future__ import annotations

import hashlib
import json

import pytest

from builders import NOW_MS, a_job, a_run
from hodei.model.errors import (
    BackendError,
    BackendRefused,
    Conflict,
    InvalidInput,
    NotFound,
    QueueFull,
    StaleEpoch,
    Unavailable,
    Unsupported,
)
from hodei.model.facts import NodeOverridden
from hodei.model.node import Taint

JOB = {"name": "train", "command": ["python", "train.py"], "cpu": 1}
JOBS = "/api/v1/jobs"


def body(value) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("document", "count"), [(JOB, 1), ([JOB, JOB], 2), ({"jobs": [JOB, JOB, JOB]}, 3)], ids=["one", "a list", "jobs"]
)
def test_jobs_are_submitted_in_each_json_form(ask, service, document, count):
    got = ask("POST", JOBS, body=body(document))
    assert got.status == 201
    assert got.json == {"ids": list(range(1, count + 1)), "repeated": False, "counts": []}
    specs, key, fingerprint = service.submitted[0]
    assert [spec.user for spec in specs] == ["user"] * count, "the user is whoever holds the token"
    assert key == ""
    assert fingerprint == hashlib.sha256(body(document)).hexdigest()


def test_jobs_are_submitted_as_yaml(ask, service):
    text = b"name: a\ncommand: [echo, hi]\n---\nname: b\ncommand: [echo, ho]\n"
    got = ask("POST", JOBS, body=text, headers={"content-type": "application/yaml; charset=utf-8"})
    assert got.status == 201
    assert [spec.name for spec in service.submitted[0][0]] == ["a", "b"]


def test_idempotency_keys_belong_to_whoever_uses_them(ask, service):
    for role in ("user", "admin"):
        ask("POST", JOBS, body=body(JOB), role=role, headers={"Idempotency-Key": "k1"})
    assert [key for _, key, _ in service.submitted] == ["user:k1", "admin:k1"]


@pytest.mark.parametrize("key", ["x" * 201, "a\tb"])
def test_an_absurd_idempotency_key_is_refused(ask, service, key):
    got = ask("POST", JOBS, body=body(JOB), headers={"Idempotency-Key": key})
    assert (got.status, got.code) == (422, "INVALID")
    assert not service.submitted


def test_nothing_to_submit_is_an_error(ask):
    assert ask("POST", JOBS, body=b"[]").status == 422


def test_a_form_is_not_a_job(ask):
    got = ask("POST", JOBS, body=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert (got.status, got.code) == (415, "UNKNOWN_MEDIA_TYPE")
    assert "Content-Type: application/json" in got.json["hint"]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (InvalidInput("bad", problems=(("cpu", "negative"),)), 422, "INVALID", False),
        (Conflict("key reused"), 409, "CONFLICT", False),
        (QueueFull("full"), 429, "QUEUE_FULL", True),
        (Unavailable("disk full"), 503, "UNAVAILABLE", True),
        (StaleEpoch("old"), 503, "STALE_EPOCH", True),
        (BackendError("agent away"), 503, "BACKEND_ERROR", True),
        (BackendRefused("no such image"), 502, "BACKEND_REFUSED", False),
        (Unsupported("no such ability"), 501, "BACKEND_CANNOT", False),
        (NotFound("gone", code="GONE"), 404, "GONE", False),
        (RuntimeError("secret path /srv/x"), 500, "INTERNAL", False),
    ],
)
def test_each_error_has_its_status(ask, service, error, status, code, retry):
    service.fail_with = error
    got = ask("POST", JOBS, body=body(JOB))
    assert (got.status, got.code) == (status, code)
    assert ("retry-after" in got.headers) == retry
    if status == 422:
        assert got.json["problems"] == [["cpu", "negative"]]


def test_an_unforeseen_error_tells_the_log_and_not_the_client(ask, service, caplog):
    service.fail_with = RuntimeError("secret path /srv/x")
    got = ask("POST", JOBS, body=body(JOB))
    assert "secret" not in got.body.decode()
    incident = got.json["message"].split("incident ")[1].rstrip(")")
    assert incident in caplog.text
    assert "secret path" in caplog.text


def test_a_page_of_jobs_is_asked_for_with_all_its_filters(ask, service):
    service.store.by_id = {n: a_job(n) for n in range(1, 6)}
    got = ask("GET", f"{JOBS}?state=pending,held&state=running&project=p&user=u&name=n&label=a%3Db&label=x+in+(y,z)"
                     f"&since=2023-11-14T22:13:20Z&after=5&limit=2")  # fmt: skip
    assert got.status == 200
    assert [job["id"] for job in got.json["jobs"]] == [4, 3]
    assert got.json["next_after"] == 3
    query = service.store.queries[0]
    assert query.states == ("pending", "held", "running")
    assert (query.project, query.user, query.name, query.since_ms) == ("p", "u", "n", NOW_MS)
    assert [str(label) for label in query.labels] == ["a=b", "x in (y, z)"]


def test_since_may_be_a_moment_an_age_or_a_number(service, tokens):
    from hodei.server.route import read_since_ms

    assert read_since_ms("2023-11-14T22:13:20Z", NOW_MS) == NOW_MS
    assert read_since_ms("2023-11-14T23:13:20+01:00", NOW_MS) == NOW_MS
    assert read_since_ms("90m", NOW_MS) == NOW_MS - 5_400_000
    assert read_since_ms(str(NOW_MS), 0) == NOW_MS
    assert read_since_ms("", NOW_MS) == 0
    with pytest.raises(InvalidInput, match="neither a time nor an age"):
        read_since_ms("yesterday", NOW_MS)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", "not between 1 and 1000"), ("limit=1001", "not between 1 and 1000"), ("limit=-1", "not a whole number"),
        ("limit=1e3", "not a whole number"), ("limit=%D9%A3", "not a whole number"), ("after=99999999999999999999", "whole number"),
        ("state=runing", "did you mean 'running'"), ("lmit=5", "unknown parameter"), ("limit=1&limit=2", "more than once"),
        ("label=((", "selector"), ("since=yesterday", "neither"), ("name=%00", "unprintable"), ("name=" + "x" * 2000, "longer"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(ask, query, says):
    got = ask("GET", f"{JOBS}?{query}")
    assert got.status == 422
    assert says in got.json["message"] + got.json["hint"]


@pytest.mark.parametrize("id", ["abc", "0", "-1", "1.0", "1e3", "99999999999999999999999", "%00", "1;drop table jobs"])
def test_a_job_id_is_a_small_whole_number(ask, id):
    got = ask("GET", f"{JOBS}/{id}")
    assert got.status == 422
    got.code  # noqa: B018


def test_a_job_is_shown_with_its_runs_and_current_nodes(ask, service):
    service.store.by_id[7] = a_job(7, attempt=2, state="running", nodes="new", env={"KEY": "s3cret"})
    service.store.run_list = [a_run(7, attempt=1, node="old"), a_run(7, attempt=2, node="new")]
    got = ask("GET", f"{JOBS}/7").json
    assert got["job"]["nodes"] == ["new"]
    assert [run["id"] for run in got["runs"]] == ["7.0.1", "7.0.2"]
    assert "s3cret" not in json.dumps(got["spec"])


@pytest.mark.parametrize("role", ["viewer", "user", "admin"])
def test_nobody_sees_what_looks_secret_unless_asked_for(ask, service, role):
    service.store.by_id[7] = a_job(7, user="user", env={"KEY": "s3cret", "db_password_file": "s3cret", "MODE": "plain"})
    got = ask("GET", f"{JOBS}/7", role=role)
    assert got.status == 200
    assert "s3cret" not in got.body.decode()
    assert "KEY" in got.body.decode()
    assert ("plain" in got.body.decode()) == (role != "viewer")


def test_the_owner_and_administrators_see_the_secrets_of_a_job_when_they_ask(ask, service):
    service.store.by_id[7] = a_job(7, user="user", env={"KEY": "s3cret"})
    service.store.by_id[8] = a_job(8, user="other", env={"KEY": "s3cret"})
    assert "s3cret" in ask("GET", f"{JOBS}/7?secrets=show").body.decode()
    assert "s3cret" in ask("GET", f"{JOBS}/8?secrets=show", role="admin").body.decode()
    for id, role in ((8, "user"), (7, "viewer")):
        refused = ask("GET", f"{JOBS}/{id}?secrets=show", role=role)
        assert refused.status == 403
        assert "s3cret" not in refused.body.decode()


@pytest.mark.parametrize("path", ["", "/why", "/wait?timeout_s=0", "/logs"])
def test_an_unknown_job_is_not_found(ask, path):
    got = ask("GET", f"{JOBS}/99{path}")
    assert (got.status, got.code) == (404, "NOT_FOUND")


def test_one_node_can_be_asked_about_a_job(ask, service):
    service.store.by_id[7] = a_job(7)
    assert ask("GET", f"{JOBS}/7/why").json["summary"] == "no node has room"
    assert ask("GET", f"{JOBS}/7/why?node=n1").json["summary"] == "n1 has room"


def test_changes_reach_the_service(ask, service):
    service.store.by_id[1] = a_job(1)
    assert ask("POST", f"{JOBS}/1/cancel", body=body({"reason": "enough"})).status == 200
    assert ask("POST", f"{JOBS}/1/cancel").status == 200
    assert ask("POST", f"{JOBS}/1/hold").json["id"] == 1
    assert ask("POST", f"{JOBS}/1/requeue").status == 200
    released = ask("POST", f"{JOBS}/1/release")
    assert (released.status, released.code) == (409, "CONFLICT")
    assert service.calls == [("cancel", 1, "enough"), ("cancel", 1, "cancelled by user"), ("hold", 1), ("requeue", 1)]


def test_a_wait_answers_when_the_time_is_over(ask, service):
    service.store.by_id[1] = a_job(1)
    assert ask("GET", f"{JOBS}/1/wait?timeout_s=0").json["state"] == "pending"
    assert ask("GET", f"{JOBS}/1/wait?timeout_s=61").status == 422


def test_logs_come_in_pieces_with_the_place_to_go_on(ask, service):
    service.store.by_id[1] = a_job(1, attempt=2, state="running")
    service.store.run_list = [a_run(1, attempt=1, state="failed"), a_run(1, attempt=2, state="running")]
    got = ask("GET", f"{JOBS}/1/logs?limit=6")
    assert got.body == b"hello\n"
    assert got.headers["content-type"] == "text/plain; charset=utf-8"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert {name: got.headers[name] for name in got.headers if name.startswith("hodei-")} == {
        "hodei-next-offset": "6", "hodei-run": "1.0.2", "hodei-run-state": "running", "hodei-job-state": "running",
    }  # fmt: skip
    assert ask("GET", f"{JOBS}/1/logs?offset=6&attempt=1&stream=stderr").headers["hodei-run"] == "1.0.1"
    assert service.calls[-1] == ("logs", "1.0.1", "stderr")


def test_the_log_of_a_job_that_has_not_run_is_empty(ask, service):
    service.store.by_id[1] = a_job(1)
    got = ask("GET", f"{JOBS}/1/logs?offset=3")
    assert (got.status, got.body) == (200, b"")
    assert (got.headers["hodei-run"], got.headers["hodei-next-offset"], got.headers["hodei-job-state"]) == (
        "",
        "3",
        "pending",
    )
    assert ask("GET", f"{JOBS}/1/logs?attempt=3").code == "NO_SUCH_ATTEMPT"
    assert ask("GET", f"{JOBS}/1/logs?member=1").code == "NO_SUCH_MEMBER"
    assert ask("GET", f"{JOBS}/1/logs?stream=../../etc/passwd").status == 422


def test_a_plan_answers_for_each_job(ask, service):
    got = ask("POST", "/api/v1/plan", body=body([JOB, JOB]), role="viewer")
    assert [plan["name"] for plan in got.json["plans"]] == ["train", "train"]
    assert not service.submitted


def test_nodes_are_listed_and_shown(ask):
    assert [node["name"] for node in ask("GET", "/api/v1/nodes").json["nodes"]] == ["n1"]
    assert ask("GET", "/api/v1/nodes/n1").json["name"] == "n1"
    missing = ask("GET", "/api/v1/nodes/n11")
    assert (missing.status, missing.json["hint"]) == (404, "did you mean 'n1'?")


def test_an_operator_marks_a_node(ask, service):
    patch = {"drain": True, "labels": {"a": "b", "c": None}, "add_taints": [{"key": "k", "effect": "NoExecute"}]}
    assert ask("PATCH", "/api/v1/nodes/n1", role="admin", body=body(patch)).status == 200
    assert service.calls == [
        (
            "mark",
            NodeOverridden(
                "n1", cordon=True, labels={"a": "b", "c": None}, add_taints=(Taint("k", "", "NoExecute"),), drain=True
            ),
        )
    ]


@pytest.mark.parametrize(
    ("patch", "status"),
    [({"cordn": True}, 422), ({"add_taints": [{"key": "k", "effect": "Never"}]}, 422), ({"add_taints": [{"key": ""}]}, 422),
     ({"labels": {"": "x"}}, 422), ({"labels": {"a": "x\n"}}, 422), (None, 422), ([], 422)],
)  # fmt: skip
def test_a_senseless_mark_is_refused(ask, service, patch, status):
    got = ask("PATCH", "/api/v1/nodes/n1", role="admin", body=body(patch))
    assert got.status == status
    got.code  # noqa: B018
    assert not service.calls


def test_events_come_in_pages(ask, service):
    service.publish(5)
    first = ask("GET", "/api/v1/events?limit=3").json
    assert ([event["seq"] for event in first["events"]], first["last"]) == ([1, 2, 3], 3)
    assert ask("GET", "/api/v1/events?after=5").json == {"events": [], "last": 5}


def test_the_server_says_what_it_is(ask):
    info = ask("GET", "/api/v1/info", headers={"host": "hodei.example:8080"}).json
    assert (info["installation"], info["address"], info["ready"]) == ("test", "http://hodei.example:8080", True)
    assert ask("GET", "/api/v1/checks").json["checks"][0]["level"] == "ok"
    assert ask("GET", "/", role="").body.startswith(b"Hodei ")
    assert ask("GET", "/metrics", role="viewer").body == b"hodei_jobs 1\n"
    assert ask("GET", "/api/v1/schema/job", role="").json["$schema"]


def test_readiness_has_a_reason(ask, service):
    assert ask("GET", "/readyz", role="").status == 200
    service.ready, service.not_ready_reason = False, "reading the store"
    got = ask("GET", "/readyz", role="")
    assert (got.status, got.code, got.json["message"]) == (503, "NOT_READY", "reading the store")
    assert ask("GET", "/livez", role="").status == 200


def test_readiness_names_the_unhealthy_backends_and_no_more(ask, service):
    assert ask("GET", "/readyz", role="").body == b"ok\n"
    service.errors = {"local": "", "lab": "no route to 10.0.0.7"}
    got = ask("GET", "/readyz", role="")
    assert (got.status, got.body) == (200, b"ok\nbackend lab is unhealthy\n")


def test_an_unknown_path_says_what_was_perhaps_meant(ask):
    got = ask("GET", "/api/v1/job")
    assert (got.status, got.code, got.json["hint"]) == (404, "NO_SUCH_PATH", "did you mean /api/v1/jobs?")
    assert ask("GET", "/wp-login.php").json["hint"] == "/api/v1/openapi.json lists every path"


def test_a_wrong_method_says_which_are_right(ask):
    got = ask("DELETE", "/api/v1/nodes/n1")
    assert (got.status, got.code) == (405, "METHOD_NOT_ALLOWED")
    assert got.headers["allow"] == "GET, HEAD, PATCH"


def test_what_if_takes_jobs_nodes_and_a_policy_from_a_viewer_and_submits_nothing(ask, service):
    policy = {"profiles": {"default": {"queue": "batch"}}}
    question = {"jobs": [JOB], "add_nodes": 2, "like": "n1", "remove_nodes": ["n2"], "policy": policy}
    got = ask("POST", "/api/v1/whatif", body=body(question), role="viewer")
    assert (got.status, [job["name"] for job in got.json["jobs"]]) == (200, ["train"])
    ((asked, tried),) = service.questions
    assert (asked.add_nodes, asked.like, asked.remove_nodes) == (2, "n1", ("n2",))
    assert tried.profiles["default"].queue == "batch"
    assert not service.submitted


@pytest.mark.parametrize(
    "question",
    [{}, {"add_node": 1}, {"jobs": [{"name": "x"}]}, {"policy": {"profile": {}}}, {"jobs": [JOB] * 1001}],
    ids=["nothing", "a misspelt key", "a job without a command", "a misspelt policy", "too many jobs"],
)
def test_a_what_if_that_makes_no_sense_is_refused(ask, service, question):
    assert ask("POST", "/api/v1/whatif", body=body(question)).status in (400, 422)
    assert not service.questions


@pytest.mark.parametrize(
    ("method", "path", "given", "words"),
    [
        ("GET", "/api/v1/nodes/n1/history?until=abc", None, "until: 'abc' is neither a time nor an age"),
        ("GET", "/api/v1/nodes/n1/history?since=abc", None, "since: 'abc' is neither a time nor an age"),
        ("POST", "/api/v1/jobs/requeue", {"arrays": [10**30]}, "arrays"),
        ("POST", "/api/v1/jobs/requeue", {"arrays": [2**63]}, "arrays"),
        ("POST", "/api/v1/jobs/requeue", {"jobs": [0]}, "jobs"),
        ("POST", "/api/v1/config/undo?to=0", None, "0 is not between 1 and"),
    ],
)
def test_a_number_or_a_time_that_can_not_be_meant_is_named(ask, method, path, given, words):
    got = ask(method, path, body=b"" if given is None else body(given), role="admin")
    assert got.status == 422, got.json
    assert words in json.dumps(got.json)
    assert "SQLite" not in json.dumps(got.json)
