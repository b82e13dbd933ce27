"""Parsing and views of reservations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from builders import NOW_MS, amounts
from hodei.api.resources import ReservationRequest, parse_moment_ms, parse_reservation, reservation_view
from hodei.model.errors import InvalidInput
from hodei.model.reservation import LateRun, Reservation, ReservationSpec

HOUR = 3_600_000


def request(**fields: Any) -> ReservationRequest:
    document = {"name": "nightly", "project": "ml", "for": "1h", "nodes": 2} | fields
    return msgspec.convert({key: value for key, value in document.items() if value is not None}, ReservationRequest)


def test_a_request_is_parsed():
    spec = parse_reservation(request(**{"from": "+2h"}, cpu=2, memory="1Gi"), NOW_MS, "ann")
    start = NOW_MS + 2 * HOUR
    assert spec == ReservationSpec("nightly", "ml", start, start + HOUR, 2, request=amounts(2, "1Gi"), by="ann")


def test_a_request_may_name_nodes_and_an_end():
    until = "2023-11-15T01:13:20+01:00"
    spec = parse_reservation(request(**{"for": None}, until=until, nodes=None, node=["n2", "n1"]), NOW_MS, "ann")
    assert (spec.start_ms, spec.end_ms, spec.named, spec.count) == (NOW_MS, NOW_MS + 2 * HOUR, ("n2", "n1"), 0)


def test_a_start_in_the_past_is_now():
    assert parse_reservation(request(**{"from": "2020-01-01T00:00:00Z"}), NOW_MS, "").start_ms == NOW_MS


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        pytest.param({"name": "No Good"}, "name", id="an invalid name"),
        pytest.param({"project": ""}, "project", id="no project"),
        pytest.param({"from": "yesterday"}, "from", id="an invalid time"),
        pytest.param({"for": "soon"}, "for", id="an invalid duration"),
        pytest.param({"until": "+2h"}, "for", id="both for and until"),
        pytest.param({"for": None}, "for", id="neither for nor until"),
        pytest.param({"for": "0s"}, "for", id="too short"),
        pytest.param({"for": "10000d"}, "for", id="longer than a year"),
        pytest.param({"nodes": None}, "nodes", id="no nodes"),
        pytest.param({"node": ["n1"]}, "nodes", id="both a number and names"),
        pytest.param({"nodes": -1}, "nodes", id="a negative number"),
        pytest.param({"nodes": None, "node": ["n1", "n1"]}, "node", id="a node twice"),
        pytest.param({"cpu": "many"}, "resources", id="an invalid amount"),
    ],
)
def test_an_invalid_field_is_named(fields, where):
    with pytest.raises(InvalidInput) as refused:
        parse_reservation(request(**fields), NOW_MS, "")
    assert [path for path, _ in refused.value.problems] == [where]


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("now", NOW_MS),
        ("+90m", NOW_MS + 90 * 60_000),
        (str(NOW_MS), NOW_MS),
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-14T22:13:20", NOW_MS),
    ],
)
def test_times_are_parsed(text, expected_ms):
    assert parse_moment_ms(text, NOW_MS) == expected_ms


def test_a_reservation_is_shown_with_late_runs():
    reservation = Reservation("nightly", "ml", NOW_MS, NOW_MS + HOUR, (("n1", amounts(2)),), "ann", NOW_MS)
    view = reservation_view(reservation, True, (LateRun("n1", "7.0.1"),))
    assert (view.state, view.start_at, view.places[0].resources) == ("active", "2023-11-14T22:13:20.000Z", {"cpu": "2"})
    assert (view.late[0].run, view.late[0].end_at) == ("7.0.1", "")


def test_a_reservation_beyond_the_year_9999_is_refused() -> None:
    with pytest.raises(InvalidInput, match="year 10000"):
        parse_reservation(request(**{"from": "9999-12-31T23:59:59Z"}), NOW_MS, "")
