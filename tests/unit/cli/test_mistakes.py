"""Mistakes on the command line, against a stub server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from hodei.api.views import ArrayView, RefusedJob, RequeueReply
from hodei.cli import serve
from hodei.cli.documents import document_of
from hodei.client import Client
from hodei.model.errors import InvalidInput
from hodei.model.explanation import Explanation
from unit.cli.stub import detail, job, problem

API = "/api/v1"


def an_array(**states: int):
    state = next(iter(states))
    return structs.replace(job(4, state, name="arr"), array=ArrayView(4, 0, 3, states=states))


def test_a_job_file_in_toml_is_refused_with_the_supported_formats(hodei, stub, tmp_path: Path):
    path = tmp_path / "j.toml"
    path.write_text('command = ["true"]\n')
    result = hodei("submit", str(path))
    assert result.exit_code == 2
    assert f"error: {path} is TOML, but job files are YAML or JSON\n" in result.stderr
    with Client() as client, pytest.raises(InvalidInput, match="job files are YAML or JSON"):
        client.submit(str(path))
    assert stub.requests == []


def test_requeue_failed_all_means_every_job_that_has_failed(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(7, "failed"), job(5, "failed")], "next_after": 0})
    refusals = [RefusedJob(id, "NOT_OWNER", f"job {id} belongs to ann; bob may change only their own") for id in (8, 9)]
    stub.on("POST", f"{API}/jobs/requeue", RequeueReply([5, 7], [], refusals))
    for id in (5, 7):
        stub.on("GET", f"{API}/jobs/{id}", detail(job(id, "pending")))
    refused = hodei("requeue", "--failed", "all")
    assert (refused.exit_code, "requeue 2 failed jobs?" in refused.stderr) == (2, True)
    assert not [request for request in stub.requests if request.method == "POST"]
    result = hodei("requeue", "--failed", "all", "--yes")
    assert (result.exit_code, result.stdout) == (0, "job 5 (job-5) requeued\njob 7 (job-7) requeued\n")
    (sent,) = [request for request in stub.requests if request.method == "POST"]
    assert sent.json() == {"jobs": [5, 7], "arrays": [], "failed": True, "permitted": True}
    skipped = "skipped 2 jobs: job 8 belongs to ann; bob may change only their own (and 1 more) [NOT_OWNER]\n"
    assert result.stderr == skipped
    assert "failed" in stub.sent("GET", f"{API}/jobs")[0].query["state"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "99999 is not in the range 0<=x<=65535"),
        (["--port", "http"], "'http' is not a valid integer"),
        (["extra"], "unexpected extra argument (extra)"),
        (["--prot", "1"], "did you mean --port"),
    ],
)
def test_up_refuses_invalid_options_even_while_a_server_runs(
    hodei, tmp_path: Path, monkeypatch, words: list[str], message: str
):
    (tmp_path / "server.json").write_text(json.dumps({"address": "http://127.0.0.1:1", "pid": os.getpid()}))
    monkeypatch.setattr(serve, "is_server_process", lambda pid: True)
    monkeypatch.setattr(serve, "run_program", lambda *_: pytest.fail("it was started"))
    result = hodei("up", "-d", "--home", str(tmp_path), *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "already running" in hodei("up", "-d", "--home", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("failed", "has failed"),
        ("succeeded", "has succeeded"),
        ("cancelled", "was cancelled"),
        ("running", "is running"),
    ],
)
def test_why_shows_the_outcome_of_an_array(hodei, stub, state: str, outcome: str):
    array = an_array(**{state: 3})
    stub.on("GET", f"{API}/arrays/4", array)
    stub.on("GET", f"{API}/jobs", {"jobs": [], "next_after": 0})
    stub.on("GET", f"{API}/jobs/4/why", Explanation("ended", "X", "over", job=4, state=state))
    assert hodei("why", "4").stdout.startswith(f"array 4[] (arr) {outcome}: 3 {state}\n")


def test_an_attempt_that_no_element_has_is_not_found(hodei, stub):
    stub.on("GET", f"{API}/arrays/4", an_array(succeeded=3))
    elements = [structs.replace(job(4 + n, name="arr"), array=ArrayView(4, n, 3)) for n in range(3)]
    stub.on("GET", f"{API}/jobs", {"jobs": elements, "next_after": 0})
    for n in range(3):
        stub.on("GET", f"{API}/jobs/{4 + n}", detail(elements[n]))
        stub.on("GET", f"{API}/jobs/{4 + n}/logs", problem(404, "NO_SUCH_ATTEMPT", "no attempt 2"))
    result = hodei("logs", "4", "--attempt", "2")
    assert result.exit_code == 3, result.stderr
    assert "no element of array 4[] has an attempt 2" in result.stderr
    assert "[NO_SUCH_ATTEMPT]" in result.stderr


@pytest.mark.parametrize(("text", "index"), [("1,1", 1), ("1-3,2", 2), ("0,4-8:2,6", 6)])
def test_a_repeated_index_is_refused(hodei, stub, text: str, index: int):
    result = hodei("submit", "--array", text, "--", "true")
    assert result.exit_code == 2
    assert f"index {index} is listed twice" in result.stderr
    assert stub.sent("POST", f"{API}/jobs") == []


def test_distinct_indices_are_accepted():
    for text in ("1,3", "1-3,5", "0-8:2,1", "7"):
        assert document_of(("true",), {"array": text}, local=False)["array"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wait", "mix[a]"], "'mix[a]': 'a' is not a range of indices"),
        (["cancel", "17[3-1]"], "names no index"),
        (["wait", "--timeout", "banana", "1"], "--timeout: "),
        (["exec", "--timeout", "banana", "1", "--", "ps"], "--timeout: "),
    ],
)
def test_an_invalid_value_is_a_usage_error(hodei, stub, words: list[str], message: str):
    result = hodei(*words)
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["why", "0"], "there is no job 0"),
        (["config", "show", "99"], "there is no configuration 99"),
        (["share", "show", "nope"], "there is no account 'nope'"),
        (["quota", "show", "nope"], "project 'nope' has no quota"),
    ],
)
def test_what_does_not_exist_is_not_found(hodei, stub, words: list[str], message: str):
    stub.on("GET", f"{API}/config/history", {"configurations": []})
    stub.on("GET", f"{API}/quotas", {"quotas": []})
    stub.on("GET", f"{API}/shares", {"formula": "fair_tree", "at_ms": 1, "rows": [], "budgets": []})
    result = hodei(*words)
    assert (result.exit_code, result.stderr.splitlines()[0]) == (3, f"error: {message}")


@pytest.mark.parametrize(
    "words", [["sim", "-h"], ["bench", "--help"], ["replay", "-h"], ["test", "-h"], ["kube", "-h"]]
)
def test_help_works_with_only_the_client_installed(hodei, monkeypatch, words: list[str]):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    monkeypatch.setattr(serve, "run_program", lambda *_: pytest.fail("it was started"))
    result = hodei(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: hodei {words[0]} ")
    assert "pip install 'hodei[server" in result.stdout


def test_the_nearest_option_is_suggested_first(hodei):
    stderr = hodei("submit", "--memroy", "1Gi", "--", "true").stderr
    assert "; did you mean --memory or --mem" in stderr
