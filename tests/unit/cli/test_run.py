"""`hodei run` and `hodei logs`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from hodei.cli import submit as run_module
from hodei.cli.logs import last_lines
from unit.cli.stub import Answer, Request, detail, job

API = "/api/v1"
OUTPUT = {"stdout": b"out\x00\xff\x1b[1m\n", "stderr": b"err\n"}


def log_of(request: Request, state: str = "succeeded", job_state: str = "succeeded") -> Answer:
    offset = int(request.query["offset"])
    data = OUTPUT[request.query["stream"]][offset:]
    headers = {"Hodei-Run": "1.0.1", "Hodei-Run-State": state, "Hodei-Job-State": job_state}
    return Answer(data, headers=headers | {"Hodei-Next-Offset": str(offset + len(data))})


@pytest.fixture
def ended(stub):
    """A job that runs at once and ends with the given state."""

    def end(**fields):
        stub.on("POST", f"{API}/jobs", Answer({"ids": [1]}, 201))
        stub.on("GET", f"{API}/jobs/1/logs", log_of)
        stub.on("GET", f"{API}/jobs/1/wait", job(1, **fields))
        stub.on("GET", f"{API}/jobs/1", detail(job(1, **fields)))
        return stub

    return end


def test_run_copies_both_streams_byte_for_byte_and_succeeds(hodei, ended):
    ended(state="succeeded")
    result = hodei("run", "--", "python", "-c", "print(6*7)")
    assert result.exit_code == 0
    assert result.stdout_bytes == OUTPUT["stdout"]
    assert result.stderr_bytes == OUTPUT["stderr"]


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"state": "failed", "exit_code": 3, "reason_code": "EXIT_CODE", "reason": "exit code 3"}, 3, "exit code 3"),
        ({"state": "failed", "exit_code": 137, "reason_code": "oom", "reason": "out of memory"}, 137, "out of memory"),
        ({"state": "failed", "reason_code": "lost", "reason": "node lost"}, 10, "job 1 (job-1) failed: node lost"),
        ({"state": "cancelled", "reason": "by admin"}, 10, "job 1 (job-1) cancelled: by admin"),
    ],
    ids=["its own code", "a signal", "no code", "cancelled by a user"],
)
def test_run_exits_with_the_code_of_the_job(hodei, ended, fields, code: int, message: str):
    ended(**fields)
    result = hodei("run", "false")
    assert result.exit_code == code
    assert result.stderr.startswith("err\njob 1 (job-1) ")
    assert message in result.stderr


def test_options_after_the_command_belong_to_the_command(hodei, ended):
    stub = ended(state="succeeded")
    hodei("run", "--cpu", "2", "ls", "--name", "-d")
    document = stub.sent("POST", f"{API}/jobs")[0].json()["jobs"][0]
    assert (document["command"], document["cpu"]) == (["ls", "--name", "-d"], "2")
    assert "name" not in document


def test_detached_prints_the_id_and_nothing_else(hodei, ended):
    stub = ended(state="succeeded")
    result = hodei("run", "-d", "--", "sleep", "9")
    assert (result.stdout, result.stderr) == ("1\n", "")
    assert len(stub.requests) == 1


def test_a_job_that_does_not_start_is_explained_once(hodei, ended, monkeypatch):
    stub = ended(state="succeeded")
    monkeypatch.setattr(run_module, "EXPLAIN_AFTER_S", 0.0)
    requests = []

    def logs(request: Request) -> Answer:
        requests.append(1)
        if len(requests) > 6:
            return log_of(request)
        return Answer(b"", headers={"Hodei-Run": "", "Hodei-Run-State": "", "Hodei-Job-State": "pending"})

    stub.on("GET", f"{API}/jobs/1/logs", logs)
    why = {"status": "waiting", "code": "INSUFFICIENT_CPU", "summary": "1 node lacks cpu", "hint": "ask for less"}
    stub.on("GET", f"{API}/jobs/1/why", why)
    result = hodei("run", "true")
    assert result.stderr == "job 1 is waiting: 1 node lacks cpu [INSUFFICIENT_CPU]\n  next: ask for less\nerr\n"
    assert len(stub.sent("GET", f"{API}/jobs/1/why")) == 1


@pytest.mark.real
def test_ctrl_c_cancels_the_job(stub):
    stub.on("POST", f"{API}/jobs", Answer({"ids": [1]}, 201))

    def logs(request: Request) -> Answer:
        cancelled = stub.sent("POST", f"{API}/jobs/1/cancel")
        return log_of(request, *(("stopped", "cancelled") if cancelled else ("running", "running")))

    stub.on("GET", f"{API}/jobs/1/logs", logs)
    stub.on("GET", f"{API}/jobs/1", detail(job(1, "running")))
    stub.on("POST", f"{API}/jobs/1/cancel", job(1, "running"))
    stub.on("GET", f"{API}/jobs/1/wait", job(1, "cancelled"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hodei.cli.main", "run", "sleep", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while len(stub.sent("GET", f"{API}/jobs/1/logs")) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"cancelling job 1" in errors
    assert b"Traceback" not in errors
    assert stub.sent("POST", f"{API}/jobs/1/cancel")[0].json() == {"reason": "interrupted at the terminal"}


def test_logs_are_raw_and_an_empty_log_is_reported(hodei, ended):
    ended(state="succeeded")
    for follow in ((), ("-f",)):
        both = hodei("logs", *follow, "1")
        assert (both.stdout_bytes, both.stderr_bytes) == (OUTPUT["stdout"], OUTPUT["stderr"])
        for stream in ("stdout", "stderr"):
            result = hodei("logs", *follow, "1", f"--{stream}")
            assert (result.stdout_bytes, result.stderr_bytes) == (OUTPUT[stream], b"")


def test_an_empty_log_is_explained_on_stderr(hodei, stub):
    stub.on("GET", f"{API}/jobs/1/logs", Answer(b"", headers={"Hodei-Job-State": "pending"}))
    stub.on("GET", f"{API}/jobs/1", detail(job(1, "pending")))
    result = hodei("logs", "1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "job 1 (pending) has written nothing\n"
    assert hodei("logs", "1", "--stderr").stderr == "job 1 (pending) has written nothing to stderr\n"


def test_options_select_member_attempt_and_stream(hodei, ended):
    stub = ended(state="succeeded")
    hodei("logs", "1", "--member", "2", "--attempt", "3", "--stderr")
    query = stub.sent("GET", f"{API}/jobs/1/logs")[0].query
    assert (query["member"], query["attempt"], query["stream"]) == ("2", "3", "stderr")


def test_tail_prints_the_last_lines_and_follows(hodei, stub):
    text = b"".join(b"line %d\n" % n for n in range(1000)) + b"rest"

    def logs(request: Request) -> Answer:
        offset = int(request.query["offset"])
        data = text[offset : offset + 1000] if request.query["stream"] == "stdout" else b""
        headers = {"Hodei-Run": "1.0.1", "Hodei-Run-State": "succeeded", "Hodei-Job-State": "succeeded"}
        return Answer(data, headers=headers)

    stub.on("GET", f"{API}/jobs/1/logs", logs)
    stub.on("GET", f"{API}/jobs/1", detail(job(1)))
    assert hodei("logs", "--tail", "2", "1").stdout_bytes == b"line 999\nrest"
    assert hodei("logs", "--tail", "2", "-f", "1").stdout_bytes == b"line 999\nrest"
    assert hodei("logs", "--tail", "0", "1").stdout_bytes == b""


def test_lines_split_over_chunks_are_joined():
    assert last_lines([b"a\nb", b"c\n", b"d"], 2) == [b"bc\n", b"d"]


def test_log_lines_are_json_objects_for_programs(hodei, ended):
    ended(state="succeeded").on("GET", f"{API}/jobs/1/logs/times", {"run": "1.0.1", "started_ms": 1000})
    lines = [json.loads(line) for line in hodei("logs", "1", "--stderr", "-o", "jsonl").stdout.splitlines()]
    assert lines == [{"source": "main[0]", "stream": "stderr", "at": "1970-01-01T00:00:01.000Z", "text": "err\n"}]


def test_a_detached_run_prints_its_id(hodei, ended):
    ended(state="pending")
    assert hodei("run", "-d", "--name", "x", "--", "true").stdout == "1\n"
    assert json.loads(hodei("run", "-d", "--name", "x", "-o", "json", "--", "true").stdout) == {"id": 1, "name": "x"}
