"""`submit`, `plan` and `job init`: documents from files, stdin and options."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.explanation import Explanation, Placement
from unit.cli.stub import Answer, job, problem

API = "/api/v1"


@pytest.fixture
def submitted(stub):
    """All documents that the server received."""
    received: list[dict] = []

    def submit(request):
        documents = request.json()["jobs"]
        received.extend(documents)
        return Answer({"ids": list(range(len(received) - len(documents) + 1, len(received) + 1))}, 201)

    stub.on("POST", f"{API}/jobs", submit)
    return received


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str | bytes, name: str = "job.yaml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def test_every_document_of_every_file_is_submitted_in_order(hodei, submitted, file):
    one = file("name: a\ncommand: [x]\n---\nname: b\ncommand: [y]\n", "1.yaml")
    two = file("apiVersion: hodei/v1\nkind: Job\nmetadata: {name: c}\nspec: {tasks: [{command: [z]}]}\n", "2.yaml")
    result = hodei("submit", one, two)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "job 1 (a) submitted\njob 2 (b) submitted\njob 3 (c) submitted\n"
    assert [document.get("name", "-") for document in submitted] == ["a", "b", "-"]


@pytest.mark.parametrize(
    "text",
    [
        "command: [x]\n---\ncommand: [y]",
        '[{"command": ["x"]}, {"command": ["y"]}]',
        '{"jobs": [{"command": ["x"]}, {"command": ["y"]}]}',
        '{"command": ["x"]}\n{"command": ["y"]}\n',
    ],
    ids=["yaml", "list", "bulk", "json lines"],
)
def test_stdin_takes_many_jobs_in_every_form(hodei, submitted, text: str):
    result = hodei("submit", "-", "-q", input=text)
    assert (result.exit_code, result.stdout) == (0, "1\n2\n")
    assert [document["command"] for document in submitted] == [["x"], ["y"]]


def test_ids_and_names_are_printed_for_programs(hodei, submitted, file):
    path = file("name: a\ncommand: [x]\n")
    assert msgspec.json.decode(hodei("submit", path, "-o", "json").stdout) == [{"id": 1, "name": "a"}]
    assert hodei("submit", path, "-o", "name").stdout == "2\n"


def test_a_command_with_options_is_sent_in_the_short_form(hodei, submitted, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("SECRET", "42")
    monkeypatch.chdir(tmp_path)
    args = "--name t --cpu 2 --memory 4Gi --gpu 1 --gpu-type a100 --priority 7 --env A=1=2 --env SECRET --retries 2"
    more = "--label team=a --node-selector disk=ssd --timeout 1h --project p --resource licence/x=1 --tolerate gpu:NoSchedule"
    result = hodei("submit", *args.split(), *more.split(), "--", "python", "--cpu", "x.py")
    assert result.exit_code == 0, result.stderr
    assert submitted == [
        {
            "command": ["python", "--cpu", "x.py"], "name": "t", "cpu": "2", "memory": "4Gi", "gpu": "1",
            "gpu_type": "a100", "priority": 7, "env": {"A": "1=2", "SECRET": "42"}, "retries": 2, "project": "p",
            "labels": {"team": "a"}, "node_selector": {"disk": "ssd"}, "timeout": "1h", "workdir": os.getcwd(),
            "resources": {"licence/x": "1"}, "tolerations": ["gpu:NoSchedule"],
        }
    ]  # fmt: skip
    parse_job(submitted[0])


def test_the_working_directory_of_this_machine_is_not_sent_to_another(hodei, stub, submitted, monkeypatch):
    from hodei.client.transport import Target

    monkeypatch.setattr(Target, "loopback", property(lambda self: False))
    assert hodei("submit", "--", "true").exit_code == 0
    assert submitted == [{"command": ["true"]}]


@pytest.mark.parametrize("args", [[], ["--full"]], ids=["short", "full"])
def test_the_example_job_is_valid(hodei, args: list[str]):
    text = hodei("job", "init", *args).stdout
    assert text.startswith("#")
    for document in load_yaml(text, name="example"):
        parse_job(document)


def test_wait_reports_a_failed_job(hodei, stub, submitted, file):
    stub.on("GET", f"{API}/jobs/1/wait", job(1, "failed", exit_code=2, reason="exit code 2"))
    result = hodei("submit", "--wait", file("command: [x]"))
    assert result.exit_code == 10
    assert "job 1 (job-1) failed: exit code 2" in result.stderr


def test_all_mistakes_are_reported_with_their_lines_and_nothing_is_sent(hodei, stub, submitted, file):
    path = file("command: [x]\ncpu: -1\nmemroy: 1Gi\n---\ncommand: [y]\n---\ncommand: 5\n")
    result = hodei("submit", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 3 mistakes found, nothing was sent\n")
    assert f"{path}:2: cpu: " in result.stderr
    assert f"{path}:3: memroy: unknown key 'memroy'; did you mean 'memory'?" in result.stderr
    assert f"{path}:7: command" in result.stderr
    assert result.stderr.endswith("[INVALID]\n")
    assert not stub.requests


def test_broken_yaml_is_reported_once_with_line_and_column(hodei, stub, file):
    result = hodei("submit", file("command: [x\ncpu: 1\n", "bad.yaml"))
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert "bad.yaml:" in lines[0]
    assert lines[1].startswith("  next: ")
    assert len(lines) == 3


def test_bad_options_are_errors_before_anything_is_sent(hodei, stub):
    result = hodei("submit", "--cpu", "nan", "--", "true")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cpu: ")
    assert not stub.requests


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is nothing to submit"),
        (["missing.yaml"], "there is no file missing.yaml"),
        (["."], ". is a directory"),
        (["https://example.com/job.yaml"], "is a URL"),
        (["binary"], "binary is not text"),
        (["nul"], "nul is binary, not text"),
        (["empty"], "empty contains no job"),
        (["secret"], "cannot read secret"),
        (["--cpu", "2", "empty"], "--cpu is for a command, not for a file"),
        (["empty", "--", "true"], "both a file (empty) and a command (true)"),
        (["--env", "NO_SUCH_THING", "--", "true"], "this shell has no such variable"),
        (["--label", "x", "--", "true"], "is not of the form KEY=VALUE"),
    ],
)
def test_unreadable_input_is_a_usage_error(hodei, stub, file, monkeypatch, tmp_path, args, message):
    monkeypatch.chdir(tmp_path)
    file(b"\xff\xfe\x00", "binary")
    file(b"a\x00b", "nul")
    file("# nothing\n", "empty")
    Path(file("x", "secret")).chmod(0)
    if args == ["secret"] and os.access("secret", os.R_OK):
        pytest.skip("this user can read everything")
    result = hodei("submit", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "next: " in result.stderr or "cannot read" in message or "KEY=VALUE" in message
    assert not stub.sent("POST", f"{API}/jobs")


NOW = Explanation(
    status="placed", code="PLACED", summary="starts at once", name="a", placements=(Placement("n1", "main", 0),)
)
LATER = Explanation(status="waiting", code="INSUFFICIENT_CPU", summary="1 node lacks cpu", name="b", nodes=1)
NEVER = Explanation(status="unsatisfiable", code="TOO_LARGE", summary="no node is that large", name="c", nodes=1)


@pytest.mark.parametrize(
    ("plans", "plain", "detailed"),
    [([NOW], 0, 0), ([LATER], 0, 2), ([NOW, LATER], 0, 2), ([NEVER], 5, 5), ([NOW, NEVER], 5, 5)],
    ids=["now", "later", "one later", "never", "one never"],
)
def test_the_exit_code_of_plan_is_the_outcome(hodei, stub, file, plans, plain: int, detailed: int):
    stub.on("POST", f"{API}/plan", {"plans": plans})
    path = file("command: [x]")
    assert hodei("plan", path).exit_code == plain
    assert hodei("plan", "--detailed-exitcode", path).exit_code == detailed
    assert not stub.sent("POST", f"{API}/jobs")


def test_plan_explains_one_job_and_lists_several(hodei, stub, file):
    stub.on("POST", f"{API}/plan", {"plans": [NOW]})
    path = file("command: [x]")
    output = hodei("plan", path).stdout
    assert output == "the job (a) would start now: starts at once [PLACED]\n\n  main[0] would go to n1\n"
    stub.on("POST", f"{API}/plan", {"plans": [NOW, LATER]})
    assert hodei("plan", path).stdout.splitlines()[1:] == [
        "a    placed   n1     starts at once",
        "b    waiting  -      1 node lacks cpu",
    ]
    assert len(msgspec.json.decode(hodei("plan", path, "-o", "json").stdout)) == 2


def test_a_job_larger_than_the_cluster_exits_with_5(hodei, stub, file):
    stub.on("POST", f"{API}/plan", problem(422, "LARGER_THAN_CLUSTER", "x can never run here", "ask for less"))
    result = hodei("plan", file("command: [x]"))
    assert result.exit_code == 5
    assert "error: x can never run here" in result.stderr
