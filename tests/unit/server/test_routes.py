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
def test_jobs_are_submitted_in_each_json_form(call, service, document, count):
    response = call("POST", JOBS, body=body(document))
    assert response.status == 201
    assert response.json == {"ids": list(range(1, count + 1)), "repeated": False, "counts": []}
    specs, key, fingerprint = service.submitted[0]
    assert [spec.user for spec in specs] == ["user"] * count, "the user is the owner of the token"
    assert key == ""
    assert fingerprint == hashlib.sha256(body(document)).hexdigest()


def test_jobs_are_submitted_as_yaml(call, service):
    text = b"name: a\ncommand: [echo, hi]\n---\nname: b\ncommand: [echo, ho]\n"
    response = call("POST", JOBS, body=text, headers={"content-type": "application/yaml; charset=utf-8"})
    assert response.status == 201
    assert [spec.name for spec in service.submitted[0][0]] == ["a", "b"]


def test_idempotency_keys_are_separate_per_user(call, service):
    for role in ("user", "admin"):
        call("POST", JOBS, body=body(JOB), role=role, headers={"Idempotency-Key": "k1"})
    assert [key for _, key, _ in service.submitted] == ["user:k1", "admin:k1"]


@pytest.mark.parametrize("key", ["x" * 201, "a\tb"])
def test_an_invalid_idempotency_key_is_refused(call, service, key):
    response = call("POST", JOBS, body=body(JOB), headers={"Idempotency-Key": key})
    assert (response.status, response.code) == (422, "INVALID")
    assert not service.submitted


def test_an_empty_submission_is_refused(call):
    assert call("POST", JOBS, body=b"[]").status == 422


def test_a_form_is_not_a_job(call):
    response = call("POST", JOBS, body=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert (response.status, response.code) == (415, "UNKNOWN_MEDIA_TYPE")
    assert "Content-Type: application/json" in response.json["hint"]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (InvalidInput("bad", problems=(("cpu", "negative"),)), 422, "INVALID", False),
        (Conflict("key reused"), 409, "CONFLICT", False),
        (QueueFull("full"), 429, "QUEUE_FULL", True),
        (Unavailable("disk full"), 503, "UNAVAILABLE", True),
        (StaleEpoch("old"), 503, "STALE_EPOCH", True),
        (BackendError("agent unreachable"), 503, "BACKEND_ERROR", True),
        (BackendRefused("no such image"), 502, "BACKEND_REFUSED", False),
        (Unsupported("not supported"), 501, "BACKEND_CANNOT", False),
        (NotFound("no such node", code="NO_NODE"), 404, "NO_NODE", False),
        (RuntimeError("secret path /srv/x"), 500, "INTERNAL", False),
    ],
)
def test_each_error_has_its_status(call, service, error, status, code, retry):
    service.fail_with = error
    response = call("POST", JOBS, body=body(JOB))
    assert (response.status, response.code) == (status, code)
    assert ("retry-after" in response.headers) == retry
    if status == 422:
        assert response.json["problems"] == [["cpu", "negative"]]


def test_an_unexpected_error_is_logged_and_hidden_from_the_client(call, service, caplog):
    service.fail_with = RuntimeError("secret path /srv/x")
    response = call("POST", JOBS, body=body(JOB))
    assert "secret" not in response.body.decode()
    incident = response.json["message"].split("incident ")[1].rstrip(")")
    assert incident in caplog.text
    assert "secret path" in caplog.text


def test_jobs_are_listed_with_all_filters(call, service):
    service.store.by_id = {n: a_job(n) for n in range(1, 6)}
    response = call("GET", f"{JOBS}?state=pending,held&state=running&project=p&user=u&name=n&label=a%3Db&label=x+in+(y,z)"
                     f"&since=2023-11-14T22:13:20Z&after=5&limit=2")  # fmt: skip
    assert response.status == 200
    assert [job["id"] for job in response.json["jobs"]] == [4, 3]
    assert response.json["next_after"] == 3
    query = service.store.queries[0]
    assert query.states == ("pending", "held", "running")
    assert (query.project, query.user, query.name, query.since_ms) == ("p", "u", "n", NOW_MS)
    assert [str(label) for label in query.labels] == ["a=b", "x in (y, z)"]


def test_since_may_be_a_time_an_age_or_a_number(service, tokens):
    from hodei.server.route import read_since_ms

    assert read_since_ms("2023-11-14T22:13:20Z", NOW_MS) == NOW_MS
    assert read_since_ms("2023-11-14T23:13:20+01:00", NOW_MS) == NOW_MS
    assert read_since_ms("90m", NOW_MS) == NOW_MS - 5_400_000
    assert read_since_ms(str(NOW_MS), 0) == NOW_MS
    assert read_since_ms("", NOW_MS) == 0
    with pytest.raises(InvalidInput, match="neither a time nor an age"):
        read_since_ms("yesterday", NOW_MS)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "not between 1 and 1000"), ("limit=1001", "not between 1 and 1000"), ("limit=-1", "not a whole number"),
        ("limit=1e3", "not a whole number"), ("limit=%D9%A3", "not a whole number"), ("after=99999999999999999999", "is not between"),
        ("state=runing", "did you mean 'running'"), ("lmit=5", "unknown parameter"), ("limit=1&limit=2", "more than once"),
        ("label=((", "selector"), ("since=yesterday", "neither"), ("name=%00", "unprintable"), ("name=" + "x" * 2000, "longer"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(call, query, message):
    response = call("GET", f"{JOBS}?{query}")
    assert response.status == 422
    assert message in response.json["message"] + response.json["hint"]


@pytest.mark.parametrize("id", ["abc", "0", "-1", "1.0", "1e3", "99999999999999999999999", "%00", "1;drop table jobs"])
def test_a_job_id_is_a_small_whole_number(call, id):
    response = call("GET", f"{JOBS}/{id}")
    assert response.status == 422
    response.code  # noqa: B018


def test_a_job_is_shown_with_its_runs_and_current_nodes(call, service):
    service.store.by_id[7] = a_job(7, attempt=2, state="running", nodes="new", env={"KEY": "s3cret"})
    service.store.run_list = [a_run(7, attempt=1, node="old"), a_run(7, attempt=2, node="new")]
    response = call("GET", f"{JOBS}/7").json
    assert response["job"]["nodes"] == ["new"]
    assert [run["id"] for run in response["runs"]] == ["7.0.1", "7.0.2"]
    assert "s3cret" not in json.dumps(response["spec"])


@pytest.mark.parametrize("role", ["viewer", "user", "admin"])
def test_secrets_are_hidden_by_default(call, service, role):
    service.store.by_id[7] = a_job(7, user="user", env={"KEY": "s3cret", "db_password_file": "s3cret", "MODE": "plain"})
    response = call("GET", f"{JOBS}/7", role=role)
    assert response.status == 200
    assert "s3cret" not in response.body.decode()
    assert "KEY" in response.body.decode()
    assert ("plain" in response.body.decode()) == (role != "viewer")


def test_only_the_owner_and_administrators_can_show_secrets(call, service):
    service.store.by_id[7] = a_job(7, user="user", env={"KEY": "s3cret"})
    service.store.by_id[8] = a_job(8, user="other", env={"KEY": "s3cret"})
    assert "s3cret" in call("GET", f"{JOBS}/7?secrets=show").body.decode()
    assert "s3cret" in call("GET", f"{JOBS}/8?secrets=show", role="admin").body.decode()
    for id, role in ((8, "user"), (7, "viewer")):
        refused = call("GET", f"{JOBS}/{id}?secrets=show", role=role)
        assert refused.status == 403
        assert "s3cret" not in refused.body.decode()


@pytest.mark.parametrize("path", ["", "/why", "/wait?timeout_s=0", "/logs"])
def test_an_unknown_job_is_not_found(call, path):
    response = call("GET", f"{JOBS}/99{path}")
    assert (response.status, response.code) == (404, "NOT_FOUND")


def test_why_can_be_limited_to_one_node(call, service):
    service.store.by_id[7] = a_job(7)
    assert call("GET", f"{JOBS}/7/why").json["summary"] == "no node has capacity"
    assert call("GET", f"{JOBS}/7/why?node=n1").json["summary"] == "n1 has capacity"


def test_commands_are_passed_to_the_service(call, service):
    service.store.by_id[1] = a_job(1)
    assert call("POST", f"{JOBS}/1/cancel", body=body({"reason": "enough"})).status == 200
    assert call("POST", f"{JOBS}/1/cancel").status == 200
    assert call("POST", f"{JOBS}/1/hold").json["id"] == 1
    assert call("POST", f"{JOBS}/1/requeue").status == 200
    released = call("POST", f"{JOBS}/1/release")
    assert (released.status, released.code) == (409, "CONFLICT")
    assert service.calls == [("cancel", 1, "enough"), ("cancel", 1, "cancelled by user"), ("hold", 1), ("requeue", 1)]


def test_a_wait_returns_at_its_timeout(call, service):
    service.store.by_id[1] = a_job(1)
    assert call("GET", f"{JOBS}/1/wait?timeout_s=0").json["state"] == "pending"
    assert call("GET", f"{JOBS}/1/wait?timeout_s=61").status == 422


def test_logs_are_paged_with_the_next_offset(call, service):
    service.store.by_id[1] = a_job(1, attempt=2, state="running")
    service.store.run_list = [a_run(1, attempt=1, state="failed"), a_run(1, attempt=2, state="running")]
    response = call("GET", f"{JOBS}/1/logs?limit=6")
    assert response.body == b"hello\n"
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert {name: response.headers[name] for name in response.headers if name.startswith("hodei-")} == {
        "hodei-next-offset": "6", "hodei-run": "1.0.2", "hodei-run-state": "running", "hodei-job-state": "running",
    }  # fmt: skip
    assert call("GET", f"{JOBS}/1/logs?offset=6&attempt=1&stream=stderr").headers["hodei-run"] == "1.0.1"
    assert service.calls[-1] == ("logs", "1.0.1", "stderr")


def test_the_log_of_a_job_that_has_not_run_is_empty(call, service):
    service.store.by_id[1] = a_job(1)
    response = call("GET", f"{JOBS}/1/logs?offset=3")
    assert (response.status, response.body) == (200, b"")
    assert (
        response.headers["hodei-run"],
        response.headers["hodei-next-offset"],
        response.headers["hodei-job-state"],
    ) == (
        "",
        "3",
        "pending",
    )
    assert call("GET", f"{JOBS}/1/logs?attempt=3").code == "NO_SUCH_ATTEMPT"
    assert call("GET", f"{JOBS}/1/logs?member=1").code == "NO_SUCH_MEMBER"
    assert call("GET", f"{JOBS}/1/logs?stream=../../etc/passwd").status == 422


def test_a_plan_answers_for_each_job(call, service):
    response = call("POST", "/api/v1/plan", body=body([JOB, JOB]), role="viewer")
    assert [plan["name"] for plan in response.json["plans"]] == ["train", "train"]
    assert not service.submitted


def test_nodes_are_listed_and_shown(call):
    assert [node["name"] for node in call("GET", "/api/v1/nodes").json["nodes"]] == ["n1"]
    assert call("GET", "/api/v1/nodes/n1").json["name"] == "n1"
    missing = call("GET", "/api/v1/nodes/n11")
    assert (missing.status, missing.json["hint"]) == (404, "did you mean 'n1'?")


def test_an_operator_overrides_a_node(call, service):
    patch = {"drain": True, "labels": {"a": "b", "c": None}, "add_taints": [{"key": "k", "effect": "NoExecute"}]}
    assert call("PATCH", "/api/v1/nodes/n1", role="admin", body=body(patch)).status == 200
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
     ({"labels": {"": "x"}}, 422), ({"labels": {"a": "x\n"}}, 422), ({"labels": {"a b": "x"}}, 422),
     ({"labels": {"a": "b c"}}, 422), ({"add_taints": [{"key": "a/b/c", "effect": "NoExecute"}]}, 422), (None, 422), ([], 422)],
)  # fmt: skip
def test_an_invalid_node_override_is_refused(call, service, patch, status):
    response = call("PATCH", "/api/v1/nodes/n1", role="admin", body=body(patch))
    assert response.status == status
    response.code  # noqa: B018
    assert not service.calls


def test_events_are_paged(call, service):
    service.publish(5)
    first = call("GET", "/api/v1/events?limit=3").json
    assert ([event["seq"] for event in first["events"]], first["last"]) == ([1, 2, 3], 3)
    assert call("GET", "/api/v1/events?after=5").json == {"events": [], "last": 5}


def test_info_checks_metrics_and_schema_are_served(call):
    info = call("GET", "/api/v1/info", headers={"host": "hodei.example:8080"}).json
    assert (info["installation"], info["address"], info["ready"]) == ("test", "http://hodei.example:8080", True)
    assert call("GET", "/api/v1/checks").json["checks"][0]["level"] == "ok"
    assert call("GET", "/", role="").body.startswith(b"Hodei ")
    assert call("GET", "/metrics", role="viewer").body == b"hodei_jobs 1\n"
    assert call("GET", "/api/v1/schema/job", role="").json["$schema"]


def test_readiness_has_a_reason(call, service):
    assert call("GET", "/readyz", role="").status == 200
    service.ready, service.not_ready_reason = False, "reading the store"
    response = call("GET", "/readyz", role="")
    assert (response.status, response.code, response.json["message"]) == (503, "NOT_READY", "reading the store")
    assert call("GET", "/livez", role="").status == 200


def test_readiness_names_the_unhealthy_backends_and_no_more(call, service):
    assert call("GET", "/readyz", role="").body == b"ok\n"
    service.errors = {"local": "", "lab": "no route to 10.0.0.7"}
    response = call("GET", "/readyz", role="")
    assert (response.status, response.body) == (200, b"ok\nbackend lab is unhealthy\n")


def test_an_unknown_path_gets_a_suggestion(call):
    response = call("GET", "/api/v1/job")
    assert (response.status, response.code, response.json["hint"]) == (
        404,
        "NO_SUCH_PATH",
        "did you mean /api/v1/jobs?",
    )
    assert call("GET", "/wp-login.php").json["hint"] == "/api/v1/openapi.json lists every path"


def test_a_wrong_method_names_the_allowed_ones(call):
    response = call("DELETE", "/api/v1/nodes/n1")
    assert (response.status, response.code) == (405, "METHOD_NOT_ALLOWED")
    assert response.headers["allow"] == "GET, HEAD, PATCH"


def test_a_viewer_may_send_a_what_if_and_it_submits_nothing(call, service):
    policy = {"profiles": {"default": {"queue": "batch"}}}
    question = {"jobs": [JOB], "add_nodes": 2, "like": "n1", "remove_nodes": ["n2"], "policy": policy}
    response = call("POST", "/api/v1/whatif", body=body(question), role="viewer")
    assert (response.status, [job["name"] for job in response.json["jobs"]]) == (200, ["train"])
    ((parsed, policy_config),) = service.questions
    assert (parsed.add_nodes, parsed.like, parsed.remove_nodes) == (2, "n1", ("n2",))
    assert policy_config.profiles["default"].queue == "batch"
    assert not service.submitted


@pytest.mark.parametrize(
    "question",
    [{}, {"add_node": 1}, {"jobs": [{"name": "x"}]}, {"policy": {"profile": {}}}, {"jobs": [JOB] * 1001}],
    ids=["nothing", "a misspelt key", "a job without a command", "a misspelt policy", "too many jobs"],
)
def test_an_invalid_what_if_is_refused(call, service, question):
    assert call("POST", "/api/v1/whatif", body=body(question)).status in (400, 422)
    assert not service.questions


@pytest.mark.parametrize(
    ("method", "path", "document", "message"),
    [
        ("GET", "/api/v1/nodes/n1/history?until=abc", None, "until: 'abc' is neither a time nor an age"),
        ("GET", "/api/v1/nodes/n1/history?since=abc", None, "since: 'abc' is neither a time nor an age"),
        ("POST", "/api/v1/jobs/requeue", {"arrays": [10**30]}, "arrays"),
        ("POST", "/api/v1/jobs/requeue", {"arrays": [2**63]}, "arrays"),
        ("POST", "/api/v1/jobs/requeue", {"jobs": [0]}, "jobs"),
        ("POST", "/api/v1/config/undo?to=0", None, "0 is not between 1 and"),
    ],
)
def test_a_number_or_time_out_of_range_is_named(call, method, path, document, message):
    response = call(method, path, body=b"" if document is None else body(document), role="admin")
    assert response.status == 422, response.json
    assert message in json.dumps(response.json)
    assert "SQLite" not in json.dumps(response.json)
