"""`hodei reservation`: requests and output."""

from __future__ import annotations

import pytest

API = "/api/v1/reservations"
VIEW = {
    "name": "nightly", "project": "ml", "state": "upcoming", "start_at": "2026-01-01T20:00:00.000Z",
    "end_at": "2026-01-01T23:00:00.000Z", "places": [{"node": "n1", "resources": {"cpu": "2"}}], "by": "ann",
    "made_at": "2026-01-01T00:00:00.000Z", "late": [{"node": "n1", "run": "7.0.1", "end_at": ""}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_utc(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def sent(stub) -> dict[str, object]:
    return {key: value for key, value in stub.requests[-1].json().items() if value not in ("", 0, [], {}, "let")}


def test_a_reservation_is_created_with_a_warning_about_late_runs(hodei, stub):
    stub.on("POST", API, VIEW)
    result = hodei("reservation", "create", "nightly", "--project", "ml", "--from", "+2h", "--for", "3h", "--nodes", "1",
                 "--cpu", "2")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert sent(stub) == {"name": "nightly", "project": "ml", "from": "+2h", "for": "3h", "nodes": 1, "cpu": "2"}
    assert result.stdout == "reservation nightly: n1 for project ml, from 20:00 until 23:00\n"
    assert "run 7.0.1 may still be on n1" in result.stderr


def test_runs_of_others_are_stopped_at_the_start_if_requested(hodei, stub):
    stub.on("POST", API, VIEW | {"at_start": "stop", "at_end": "stop"})
    stub.on("GET", f"{API}/nightly", VIEW | {"at_start": "stop", "at_end": "stop"})
    result = hodei("reservation", "create", "nightly", "--project", "ml", "--for", "3h", "--nodes", "1", "--at-start", "stop",
                 "--at-end", "stop")  # fmt: skip
    assert (sent(stub)["at_start"], sent(stub)["at_end"]) == ("stop", "stop")
    assert "has no estimate and no timeout, and is stopped then if necessary" in result.stderr
    shown = hodei("reservation", "show", "nightly").stdout
    assert "at start" in shown
    assert "the project's runs are stopped" in shown
    assert (
        hodei(
            "reservation", "create", "x", "--project", "ml", "--for", "1h", "--nodes", "1", "--at-end", "kill"
        ).exit_code
        == 2
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("14:00", "2026-01-01T14:00:00+00:00", id="later today"),
        pytest.param("00:00", "2026-01-02T00:00:00+00:00", id="tomorrow"),
        pytest.param("2026-03-01T09:30:00", "2026-03-01T09:30:00+00:00", id="in the local time zone"),
        pytest.param("now", "now", id="now"),
    ],
)
def test_times_are_in_the_local_time_zone(hodei, stub, text, expected):
    stub.on("POST", API, VIEW)
    hodei(
        "reservation", "create", "x", "--project", "ml", "--from", text, "--for", "1h", "--node", "n1", "--node", "n2"
    )
    assert (sent(stub)["from"], sent(stub)["node"]) == (expected, ["n1", "n2"])


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(["--nodes", "1"], id="no length"),
        pytest.param(["--for", "1h", "--until", "+2h", "--nodes", "1"], id="two lengths"),
        pytest.param(["--for", "1h"], id="no nodes"),
        pytest.param(["--for", "1h", "--nodes", "1", "--node", "n1"], id="number and names"),
        pytest.param(["--for", "1h", "--nodes", "1", "--from", "soon"], id="no time"),
    ],
)
def test_contradicting_options_are_not_sent(hodei, stub, args):
    assert hodei("reservation", "create", "x", "--project", "ml", *args).exit_code == 2
    assert stub.requests == []


def test_reservations_are_listed_shown_and_deleted(hodei, stub):
    stub.on("GET", API, {"reservations": [VIEW]})
    stub.on("GET", f"{API}/nightly", VIEW)
    stub.on("DELETE", f"{API}/nightly", VIEW)
    assert hodei("reservation", "list").stdout.splitlines()[1].split() == [
        "nightly", "ml", "upcoming", "20:00", "23:00", "n1", "cpu", "2", "1",
    ]  # fmt: skip
    assert hodei("reservation", "list", "-o", "name").stdout == "nightly\n"
    assert '"state": "upcoming"' in hodei("reservation", "show", "nightly", "-o", "json").stdout
    shown = hodei("reservation", "show", "nightly").stdout
    assert "from     20:00 (in 20h)" in shown
    assert hodei("reservation", "delete", "nightly").stdout == "reservation nightly deleted\n"
