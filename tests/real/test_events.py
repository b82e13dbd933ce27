"""The event stream: numbered without gaps or repeats, also across a crash of the server."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Generator
from typing import Any

import pytest

from real.installation import DEADLINE_S, Installation, until

pytestmark = pytest.mark.real


def sse(installation: Installation, last: int | None = None, query: str = "") -> Generator[tuple[int, dict[str, Any]]]:
    """(id, event) of the event stream, until it ends."""
    host, port = installation.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
    headers = {"Authorization": f"Bearer {installation.token}"} | ({} if last is None else {"Last-Event-ID": str(last)})
    connection.request("GET", f"/api/v1/events/stream{query}", headers=headers)
    response = connection.getresponse()
    assert response.status == 200
    id = 0
    try:
        while line := response.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                id = int(value)
            elif name == "data":
                yield id, json.loads(value)
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()


def test_a_stream_resumes_after_the_server_was_killed(installation: Installation) -> None:
    installation.up()
    first = [installation.submit("true") for _ in range(5)]
    installation.ended(*first)
    seen: list[int] = []
    ends: list[int] = []

    def read(last: int | None) -> None:
        for id, event in sse(installation, last):
            assert id == event["seq"]
            seen.append(id)
            if event["kind"] == "job.ended":
                ends.append(event["job"])

    for end_server in (installation.kill, installation.stop):
        reader = threading.Thread(target=read, args=(seen[-1] if seen else 0,), daemon=True)
        reader.start()
        jobs = [installation.submit("sh", "-c", "sleep 0.05") for _ in range(10)]
        until(lambda: len(seen) > len(first), "events arrive")
        end_server()
        reader.join(DEADLINE_S)
        assert not reader.is_alive()
        installation.up()
        installation.ended(*jobs)
    reader = threading.Thread(target=read, args=(seen[-1],), daemon=True)
    reader.start()
    until(lambda: len(ends) >= 25, "all ends have arrived")
    stored = [event["seq"] for event in installation.request("GET", "/api/v1/events?limit=10000").json["events"]]
    until(lambda: len(seen) >= len(stored), "all events have arrived")
    assert seen == stored == list(range(1, len(stored) + 1))
    assert sorted(ends) == list(range(1, 26))
    installation.stop()
    reader.join(DEADLINE_S)


def test_the_client_misses_nothing_across_restarts(installation: Installation) -> None:
    installation.up()
    received: list[int] = []

    def read() -> None:
        with installation.client() as client:
            for event in client.events(0, follow=True):
                received.append(event.seq)
                if event.kind == "job.ended" and event.job == 12:
                    return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(3):
        ids = [installation.submit("true") for _ in range(4)]
        installation.kill()
        installation.up()
        installation.ended(*ids)
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    assert received == list(range(1, len(received) + 1))


def test_a_stream_can_be_limited_to_one_job_or_to_new_events(installation: Installation) -> None:
    installation.up()
    first, second = installation.submit("true"), installation.submit("true")
    installation.ended(first, second)
    one = []
    for _, event in sse(installation, query=f"?job={second}&after=0"):
        one.append(event)
        if event["kind"] == "job.ended":
            break
    assert {event["job"] for event in one} == {second}
    assert one[0]["kind"] == "job.submitted"
    # The stream starts somewhere between these submissions, and has no event from before them.
    new = sse(installation)
    received: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: received.append(next(new)[1]), daemon=True)
    reader.start()
    later: list[int] = []

    def submit_another() -> bool:
        later.append(installation.submit("true"))
        return bool(received)

    until(submit_another, "a new event arrives")
    assert received[0]["job"] in later
    new.close()
    installation.ended(*later)


def test_the_command_line_follows_events_across_a_restart(installation: Installation) -> None:
    installation.up()
    follower = installation.begin("events", "-f", "--after", "0", "-o", "jsonl")
    assert follower.stdout is not None
    installation.submit("true")
    lines = iter(follower.stdout.readline, b"")
    first = json.loads(next(lines))  # it is connected now, so it reconnects after an outage
    installation.kill()
    installation.up()
    installation.ended(1, installation.submit("sh", "-c", "exit 3"))
    seqs, kinds = [first["seq"]], [first["kind"]]
    for line in lines:
        event = json.loads(line)
        seqs.append(event["seq"])
        kinds.append(event["kind"])
        if event["kind"] == "job.ended" and event["job"] == 2:
            break
    assert seqs == list(range(1, len(seqs) + 1))
    assert kinds.count("job.ended") == 2
    shown = installation.ok("events", "--limit", "3").lines
    assert len(shown) == 4
    assert "job.ended" in shown[-1]
