"""The client against a stub: finding the server, errors, broken connections, restarts, streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hodei.api.views import JobDetail, JobList, LogTimes, NodePatch, SubmitReply
from hodei.client import Client, Denied, ServerUnreachable, WaitTimedOut
from hodei.client.logs import LogOptions
from hodei.client.transport import error_from, find_server, split_address
from hodei.model.errors import Conflict, HodeiError, InvalidInput, NotFound, QueueFull, Unavailable
from unit.cli.stub import Answer, Request, Stub, job, node, problem

API = "/api/v1"


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub().start()
    yield server
    server.stop()


@pytest.fixture
def client(stub: Stub) -> Iterator[Client]:
    with Client(stub.address, "hod_secret", timeout_s=5, retry_s=5) as client:
        yield client


def a_home(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "server.json").write_text('{"address": "http://127.0.0.1:4711", "pid": 1, "more": true}')
    (path / "token").write_text("hod_home\n")
    return path


def test_arguments_override_the_environment_and_the_environment_the_home(tmp_path: Path):
    home = a_home(tmp_path)
    assert find_server(home=home, environ={}).address == "http://127.0.0.1:4711"
    environ = {"HODEI_SERVER": "http://127.0.0.1:5000", "HODEI_TOKEN": "hod_env"}
    assert find_server(home=home, environ=environ).address == "http://127.0.0.1:5000"
    assert find_server(home=home, environ=environ).token == "hod_env"
    assert find_server("127.0.0.1:6000", "hod_arg", home, environ).address == "http://127.0.0.1:6000"
    assert find_server("127.0.0.1:6000", "hod_arg", home, environ).token == "hod_arg"


def test_the_token_of_the_home_is_found_without_being_named(tmp_path: Path):
    assert find_server(home=a_home(tmp_path), environ={}).token == "hod_home"


def test_a_token_file_is_read_and_stripped(tmp_path: Path):
    (tmp_path / "t").write_text("hod_file\n")
    environ = {"HODEI_SERVER": "https://h.example", "HODEI_TOKEN_FILE": str(tmp_path / "t")}
    assert find_server(home=tmp_path, environ=environ).token == "hod_file"


def test_the_token_of_this_machine_is_never_sent_to_another_host(tmp_path: Path):
    home = a_home(tmp_path)
    assert find_server("https://elsewhere.example", home=home, environ={}).token == ""
    assert find_server("http://127.0.0.1:9", home=home, environ={}).token == "hod_home"


def test_without_a_server_the_error_has_the_command_to_start_one(tmp_path: Path):
    with pytest.raises(ServerUnreachable) as caught:
        find_server(home=tmp_path, environ={})
    assert "hodei up" in caught.value.hint


@pytest.mark.parametrize("text", ["", "ftp://x", "http://", "http://h:port", "http://h?x=1", "unix:///tmp/x"])
def test_an_invalid_address_is_refused(text: str):
    with pytest.raises(InvalidInput):
        split_address(text)


def test_a_token_with_a_line_break_is_refused_before_it_becomes_a_header():
    with pytest.raises(InvalidInput):
        split_address("http://h", "a\r\nX-Evil: 1")


def test_an_address_may_have_a_path_and_a_bare_host(tmp_path: Path):
    assert split_address("https://h.example/hodei/").path == "/hodei"
    assert split_address("h.example:81").port == 81
    assert split_address("http://[::1]:7").address == "http://[::1]:7"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "UNAUTHORIZED", Denied),
        (403, "FORBIDDEN", Denied),
        (404, "NOT_FOUND", NotFound),
        (404, "NO_SUCH_PATH", NotFound),
        (409, "CONFLICT", Conflict),
        (422, "INVALID", InvalidInput),
        (413, "TOO_LARGE", InvalidInput),
        (429, "QUEUE_FULL", QueueFull),
        (503, "UNAVAILABLE", Unavailable),
        (503, "NOT_READY", Unavailable),
        (500, "BUG", HodeiError),
    ],
)
def test_a_problem_becomes_its_exception(status: int, code: str, kind: type[HodeiError]):
    error = error_from(status, msgspec.json.encode({"code": code, "message": "what", "hint": "next"}))
    assert type(error) is kind
    assert (error.message, error.hint, error.code) == ("what", "next", code)


def test_problems_keep_their_paths():
    error = error_from(422, b'{"code": "INVALID", "message": "bad", "problems": [["spec.cpu", "negative"]]}')
    assert isinstance(error, InvalidInput)
    assert error.problems == (("spec.cpu", "negative"),)


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"[]", b"\xff\xfe", b'{"message": 3}'])
def test_an_error_without_a_problem_document_has_a_code(body: bytes):
    error = error_from(502, body)
    assert isinstance(error, Unavailable)
    assert error.code == "HTTP_502"


def test_an_answer_of_another_shape_is_a_hodei_error(stub: Stub, client: Client):
    stub.on("GET", f"{API}/info", {"hello": 1})
    with pytest.raises(HodeiError) as caught:
        client.info()
    assert caught.value.code == "BAD_ANSWER"


def test_requests_share_one_connection_and_send_the_token(stub: Stub, client: Client):
    stub.on("GET", f"{API}/nodes", {"nodes": [node()]})
    assert [client.nodes()[0].name for _ in range(3)] == ["laptop"] * 3
    assert stub.connections == 1
    assert stub.requests[0].headers["Authorization"] == "Bearer hod_secret"


def test_a_stale_connection_is_replaced_once(stub: Stub, client: Client):
    stub.on("GET", f"{API}/nodes", {"nodes": []})
    client.nodes()
    stub.drop = 1
    assert client.nodes() == []
    stub.drop = 2
    with pytest.raises(ServerUnreachable):
        client.nodes()


def test_a_request_on_a_new_connection_is_not_repeated(stub: Stub, client: Client):
    stub.drop = 1
    with pytest.raises(ServerUnreachable):
        client.nodes()
    assert len(stub.requests) == 1


def test_a_requeue_whose_answer_was_lost_is_not_sent_twice(stub: Stub, client: Client):
    stub.on("GET", f"{API}/nodes", {"nodes": []})
    client.nodes()
    stub.drop = 1
    with pytest.raises(ServerUnreachable):
        client.requeue(7)
    assert len(stub.sent("POST", f"{API}/jobs/7/requeue")) == 1


def test_calls_work_after_a_restart_of_the_server(stub: Stub, client: Client):
    stub.on("GET", f"{API}/nodes", {"nodes": []})
    client.nodes()
    stub.stop()
    stub.start()
    assert client.nodes() == []


def test_a_restarted_server_on_another_port_is_found_through_its_home(stub: Stub, tmp_path: Path):
    stub.on("GET", f"{API}/nodes", {"nodes": []})

    def write_server_file() -> None:
        (tmp_path / "server.json").write_text(msgspec.json.encode({"address": stub.address, "pid": 1}).decode())

    write_server_file()
    with Client(home=tmp_path) as client:
        client.nodes()
        stub.stop()
        stub.port = 0
        stub.start()
        write_server_file()
        assert client.nodes() == []
        assert client.address == stub.address


def test_submit_sends_the_fields_as_a_document_with_a_key(stub: Stub, client: Client):
    stub.on("POST", f"{API}/jobs", Answer(SubmitReply([12]), 201))
    handle = client.submit(command=["true"], cpu=2, name="train")
    (request,) = stub.requests
    assert request.json() == {"jobs": [{"command": ["true"], "cpu": 2, "name": "train"}]}
    assert len(request.headers["Idempotency-Key"]) >= 16
    assert handle.id == 12
    assert "job 12 (train)" in repr(handle)


def test_a_submit_whose_answer_was_lost_is_sent_again_with_the_same_key(stub: Stub, client: Client):
    stub.on("GET", f"{API}/nodes", {"nodes": []})
    stub.on("POST", f"{API}/jobs", Answer(SubmitReply([1]), 201))
    client.nodes()
    stub.drop = 1
    client.submit({"command": ["true"]})
    first, second = stub.sent("POST", f"{API}/jobs")
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert first.body == second.body


def test_many_jobs_are_submitted_in_chunks_with_their_own_keys_and_survive_a_restart(stub: Stub, client: Client):
    submitted: dict[str, list[int]] = {}

    def submit(request: Request) -> Answer:
        count, key = len(request.json()["jobs"]), request.headers["Idempotency-Key"]
        start = sum(map(len, submitted.values())) + 1
        submitted.setdefault(key, list(range(start, start + count)))
        if len(submitted) == 2 and len(stub.requests) == 2:
            # Stored, but the answer is lost: the server stops now and starts again a little later.
            stub.stop()
            threading.Timer(0.3, stub.start).start()
        return Answer(SubmitReply(submitted[key]), 201)

    stub.on("POST", f"{API}/jobs", submit)
    ids = client.submit_all([{"command": ["true"]} for _ in range(1100)], key="batch-7")
    assert ids == list(range(1, 1101))
    assert list(submitted) == ["batch-7.0", "batch-7.1", "batch-7.2"]


@pytest.mark.parametrize("wrong", [None, 1.5, b"x", "", 0, -1, True, object(), {"a": 1}])
def test_an_invalid_reference_is_refused_by_every_call_before_anything_is_sent(
    stub: Stub, client: Client, wrong: object
):
    calls = [
        client.wait, client.job, client.cancel, client.hold, client.release, client.requeue, client.suspend, client.resume,
        client.checkpoint, client.migrate, client.why, client.priority, client.graph, client.log_times, client.log_reader,
        client.log_lines, client.array,
        client.elements, client.resolve, client.requeue_all, lambda job: client.requeue_all(arrays=job),
        lambda job: client.requeue_all([job]), lambda job: client.wait([job]), lambda job: client.execute(job, ["true"]),
        lambda job: list(client.logs(job)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidInput, match="is not a job reference"):
            call(wrong)
    assert not stub.requests


def test_a_bare_list_is_refused_with_a_hint(stub: Stub, client: Client):
    with pytest.raises(InvalidInput, match="not a list") as caught:
        client.submit(["echo", "hi"])
    assert "submit(command=" in caught.value.hint
    assert not stub.requests


def test_a_document_and_fields_together_are_refused(client: Client):
    with pytest.raises(InvalidInput):
        client.submit({"command": ["true"]}, cpu=2)


def test_pages_are_read_until_the_last_and_not_beyond_the_limit(stub: Stub, client: Client):
    def page(request: Request) -> JobList:
        after = int(request.query.get("after", "11"))
        ids = list(range(after - 1, 0, -1))[: min(4, int(request.query["limit"]))]
        return JobList([job(id) for id in ids], ids[-1] if ids and ids[-1] > 1 else 0)

    stub.on("GET", f"{API}/jobs", page)
    assert [view.id for view in client.jobs(state=["pending", "held"])] == list(range(10, 0, -1))
    assert stub.requests[0].query["state"] == "pending,held"
    assert [view.id for view in client.jobs(limit=6)] == [10, 9, 8, 7, 6, 5]


def test_wait_polls_until_the_job_has_ended(stub: Stub, client: Client):
    states = iter(["running", "running", "failed"])
    stub.on("GET", f"{API}/jobs/5/wait", lambda _: job(5, next(states)))
    assert client.wait(5)[0].state == "failed"


def test_wait_survives_a_restart_of_the_server(stub: Stub, client: Client):
    def wait(request: Request) -> object:
        if len(stub.requests) == 1:
            return job(5, "running")
        if len(stub.requests) == 2:
            stub.stop()
            threading.Timer(0.3, stub.start).start()
        return job(5)

    stub.on("GET", f"{API}/jobs/5/wait", wait)
    assert client.wait([5])[0].state == "succeeded"
    assert len(stub.requests) >= 3


def test_wait_fails_if_the_server_does_not_return(stub: Stub):
    stub.on("GET", f"{API}/jobs/5/wait", job(5, "running"))
    with Client(stub.address, retry_s=0.2) as client:
        stub.on("GET", f"{API}/nodes", {"nodes": []})
        client.nodes()
        stub.stop()
        with pytest.raises(ServerUnreachable):
            client.wait(5)


def test_wait_does_not_wait_for_a_server_that_was_never_reached(stub: Stub, client: Client):
    stub.stop()
    with pytest.raises(ServerUnreachable, match="connection refused"):
        client.wait(5)


def test_wait_times_out_with_the_current_states(stub: Stub, client: Client):
    stub.on("GET", f"{API}/jobs/5/wait", job(5))
    stub.on("GET", f"{API}/jobs/6/wait", job(6, "running"))
    with pytest.raises(WaitTimedOut) as caught:
        client.wait([5, 6], timeout_s=0.05)
    assert [view.state for view in caught.value.jobs] == ["succeeded", "running"]


class FakeLog:
    """The log of a job with the output of each attempt, four bytes per read."""

    def __init__(self, *attempts: bytes, running: bool = False) -> None:
        self.attempts = list(attempts)
        self.running = running

    def __call__(self, request: Request) -> Answer:
        attempt = int(request.query.get("attempt", "0")) or len(self.attempts)
        if not self.attempts:
            return Answer(b"", headers={"Hodei-Run": "", "Hodei-Run-State": "", "Hodei-Job-State": "pending"})
        offset = int(request.query["offset"])
        data = self.attempts[attempt - 1][offset : offset + 4]
        newest = attempt == len(self.attempts)
        return Answer(
            data,
            headers={
                "Hodei-Run": f"3.0.{attempt}",
                "Hodei-Run-State": "running" if newest and self.running else "failed",
                "Hodei-Job-State": "running" if self.running else "failed",
                "Hodei-Next-Offset": str(offset + len(data)),
            },
        )


def test_logs_are_the_bytes_as_written(stub: Stub, client: Client):
    stub.on("GET", f"{API}/jobs/3/logs", FakeLog(b"\x00\xff raw\x1b[31m\n"))
    assert b"".join(client.logs(3)) == b"\x00\xff raw\x1b[31m\n"


def test_logs_without_follow_end_at_the_current_end(stub: Stub, client: Client):
    stub.on("GET", f"{API}/jobs/3/logs", FakeLog(b"so far", running=True))
    assert b"".join(client.logs(3)) == b"so far"
    stub.on("GET", f"{API}/jobs/3/logs", FakeLog())
    assert b"".join(client.logs(3)) == b""


def test_following_continues_after_a_restart_and_into_the_next_attempt(stub: Stub, client: Client):
    log = FakeLog(b"first attempt,", running=True)
    stub.on("GET", f"{API}/jobs/3/logs", log)
    received = b""
    for chunk in client.logs(3, follow=True):
        received += chunk
        if received == b"first attempt,":
            stub.stop()
            threading.Timer(0.2, stub.start).start()
            log.attempts.append(b" second")
        if received.endswith(b"second"):
            log.running = False
    assert received == b"first attempt, second"


def test_following_a_job_that_has_not_started_waits_for_it(stub: Stub, client: Client):
    log = FakeLog()
    stub.on("GET", f"{API}/jobs/3/logs", log)
    threading.Timer(0.1, lambda: log.attempts.append(b"output")).start()
    assert b"".join(client.logs(3, follow=True)) == b"output"


def test_lines_of_a_run_whose_start_is_not_reported_yet_have_the_current_time(stub: Stub, client: Client):
    before_ms = time.time_ns() // 1_000_000
    stub.on("GET", f"{API}/jobs/3", JobDetail(job(3), {}, []))
    stub.on("GET", f"{API}/jobs/3/logs", FakeLog(b"hi\n", running=True))
    stub.on("GET", f"{API}/jobs/3/logs/times", LogTimes("3.0.1"))
    (line,) = client.log_lines(3, LogOptions(("stdout",)))
    assert (line.text, line.at_ms >= before_ms) == (b"hi\n", True)


def sse(*seqs: int) -> bytes:
    parts = [f'id: {seq}\ndata: {{"seq": {seq}, "at_ms": 1, "kind": "job.submitted"}}\n\n' for seq in seqs]
    return b"retry: 2000\n\n: hello\n\n" + "".join(parts).encode()


def test_a_broken_stream_resumes_after_the_last_event(stub: Stub, client: Client):
    def stream(request: Request) -> Answer:
        after = int(request.headers["Last-Event-Id"])
        return Answer(sse(*range(after, after + 3)) + b'event: resync\ndata: {"last": 1}\n\n')

    stub.on("GET", f"{API}/events/stream", stream)
    stub.on("GET", f"{API}/events", {"events": [], "last": 4})
    found = client.events(4, follow=True)
    assert [next(found).seq for _ in range(5)] == [5, 6, 7, 8, 9]
    assert [r.headers["Last-Event-Id"] for r in stub.sent("GET", f"{API}/events/stream")] == ["4", "6", "8"]


def test_a_stream_survives_a_restart(stub: Stub, client: Client):
    def stream(request: Request) -> Answer:
        after = int(request.headers["Last-Event-Id"])
        if after == 1:
            stub.stop()
            threading.Timer(0.2, stub.start).start()
        return Answer(sse(after + 1))

    stub.on("GET", f"{API}/events/stream", stream)
    stub.on("GET", f"{API}/events", {"events": [], "last": 0})
    found = client.events(0, follow=True)
    first = [next(found).seq]
    stub.on("GET", f"{API}/events/stream", lambda r: Answer(sse(int(r.headers["Last-Event-Id"]) + 1)))
    assert [*first, next(found).seq, next(found).seq] == [1, 2, 3]


@pytest.mark.parametrize("last", [0, 1, 2, 3, 1023, 1024, 1025, 70_001])
def test_the_newest_event_is_found_with_few_requests(stub: Stub, client: Client, last: int):
    def page(request: Request) -> dict[str, object]:
        after = int(request.query["after"])
        events = [{"seq": after + 1, "at_ms": 1, "kind": "x"}] if after < last else []
        return {"events": events, "last": after + len(events)}

    stub.on("GET", f"{API}/events", page)
    assert client.last_event() == last
    assert len(stub.requests) < 60


def test_the_name_of_a_patched_node_is_quoted_in_the_path(stub: Stub, client: Client):
    stub.on("PATCH", f"{API}/nodes/a%2F..%2Fb", node("a/../b"))
    assert client.patch_node("a/../b", NodePatch(cordon=True, labels={"x": None})).name == "a/../b"
    assert stub.requests[0].json()["cordon"] is True
    assert stub.requests[0].json()["labels"] == {"x": None}


def test_wait_ready_waits_for_a_starting_server(stub: Stub, client: Client):
    answers = iter([problem(503, "NOT_READY", "starting"), problem(503, "NOT_READY", "starting"), b"ok\n"])
    stub.on("GET", "/readyz", lambda _: next(answers))
    stub.on("POST", f"{API}/jobs", Answer(SubmitReply([1]), 201))
    assert client.submit(command=["true"], wait_ready=True).id == 1
