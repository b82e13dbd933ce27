"""Cron schedules: the meaning of the fields, and changes of daylight saving time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.model.cron import parse_cron
from hodei.model.errors import InvalidInput


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def following(schedule: str, after: str, zone: str = "UTC", times: int = 1) -> list[str]:
    cron, at, out = parse_cron(schedule, zone), ms(after), []
    for _ in range(times):
        at = cron.next_ms(at)
        out.append(datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ"))
    return out


@pytest.mark.parametrize(
    ("schedule", "after", "expected"),
    [
        pytest.param("*/5 * * * *", "2026-01-01T00:00:00Z", "2026-01-01T00:05Z", id="strictly after"),
        pytest.param("*/5 * * * *", "2026-01-01T00:04:59.999Z", "2026-01-01T00:05Z", id="a moment before"),
        pytest.param("30 3 * * mon-fri", "2026-01-02T04:00Z", "2026-01-05T03:30Z", id="over a weekend"),
        pytest.param("0 0 1 * *", "2026-01-31T12:00Z", "2026-02-01T00:00Z", id="the next month"),
        pytest.param("0 0 29 2 *", "2026-03-01T00:00Z", "2028-02-29T00:00Z", id="a leap day"),
        pytest.param("0 0 29 2 *", "2097-01-01T00:00Z", "2104-02-29T00:00Z", id="eight years to the next leap day"),
        pytest.param("0 0 13 * fri", "2026-01-01T00:00Z", "2026-01-02T00:00Z", id="either day, if both are restricted"),
        pytest.param(
            "0 0 13 * */2", "2026-01-01T00:00Z", "2026-01-13T00:00Z", id="both days, if one begins with a star"
        ),
        pytest.param("0 0 * * 7", "2026-01-01T00:00Z", "2026-01-04T00:00Z", id="seven is sunday"),
        pytest.param("0 0 * * fri-sun", "2026-01-03T12:00Z", "2026-01-04T00:00Z", id="up to sunday"),
        pytest.param("5/20 1,3 * JAN *", "2026-01-01T01:45Z", "2026-01-01T03:05Z", id="from five in steps of twenty"),
        pytest.param("5 1-9/4 * * 2,7", "2024-01-01T00:00Z", "2024-01-02T01:05Z", id="every fourth hour of a range"),
        pytest.param("0 0 L * *", "2026-02-01T00:00Z", "2026-02-28T00:00Z", id="the last day of a month"),
        pytest.param("@hourly", "2026-01-01T00:30Z", "2026-01-01T01:00Z", id="hourly"),
        pytest.param("@weekly", "2026-01-01T00:30Z", "2026-01-04T00:00Z", id="weekly"),
        pytest.param("@yearly", "2026-01-01T00:00Z", "2027-01-01T00:00Z", id="yearly"),
    ],
)
def test_a_schedule_is_due_when_all_its_fields_match(schedule: str, after: str, expected: str):
    assert following(schedule, after) == [expected]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("", "0 fields"), ("* * * *", "4 fields"), ("* * * * * *", "6 fields"), ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"), ("* * 0 * *", "day-of-month"), ("* * * 13 *", "month"), ("* * * * 8", "week"),
        ("*/0 * * * *", "minute"), ("9-3 * * * *", "minute"), ("a * * * *", "minute"), ("*-3 * * * *", "minute"),
        ("1,,2 * * * *", "minute"),
        ("0 0 31 2 *", "day-of-month"), ("0 0 * * l", "week"),
        ("1" * 5000 + " * * * *", "too large"), ("@often", "fields"),
    ],
)  # fmt: skip
def test_an_invalid_schedule_is_refused_with_its_field(schedule: str, message: str):
    with pytest.raises(InvalidInput, match=message):
        parse_cron(schedule)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../../etc/passwd", "", "/etc/localtime"])
def test_an_unknown_time_zone_is_refused(zone: str):
    with pytest.raises(InvalidInput, match="no time zone"):
        parse_cron("* * * * *", zone)


# Madrid: forward on 2026-03-29 at 01:00Z (02:00 -> 03:00), back on 2026-10-25 at 01:00Z (03:00 -> 02:00).


def test_a_time_that_does_not_exist_is_due_once_at_the_first_moment_after_the_gap():
    assert following("30 2 * * *", "2026-03-28T12:00Z", "Europe/Madrid", 2) == [
        "2026-03-29T01:00Z",
        "2026-03-30T00:30Z",
    ]


def test_several_times_in_one_gap_are_due_once():
    assert following("0,20,40 2 * * *", "2026-03-29T00:50Z", "Europe/Madrid", 2) == [
        "2026-03-29T01:00Z", "2026-03-30T00:00Z",
    ]  # fmt: skip


def test_a_repeated_time_is_due_the_first_time_only():
    assert following("30 2 * * *", "2026-10-24T12:00Z", "Europe/Madrid", 2) == [
        "2026-10-25T00:30Z",
        "2026-10-26T01:30Z",
    ]


def test_every_half_hour_is_due_through_the_repeated_hour():
    assert following("*/30 * * * *", "2026-10-24T23:30Z", "Europe/Madrid", 6) == [
        "2026-10-25T00:00Z", "2026-10-25T00:30Z", "2026-10-25T01:00Z", "2026-10-25T01:30Z", "2026-10-25T02:00Z",
        "2026-10-25T02:30Z",
    ]  # fmt: skip


def test_every_half_hour_is_due_without_omission_or_duplicate_at_a_gap():
    assert following("*/30 * * * *", "2026-03-29T00:00Z", "Europe/Madrid", 4) == [
        "2026-03-29T00:30Z", "2026-03-29T01:00Z", "2026-03-29T01:30Z", "2026-03-29T02:00Z",
    ]  # fmt: skip


def test_a_time_of_the_repeated_hour_that_has_passed_is_not_due_again():
    assert following("30 2 * * *", "2026-10-25T01:10Z", "Europe/Madrid") == ["2026-10-26T01:30Z"]


def test_a_schedule_has_no_due_times_after_the_last_year_of_the_calendar():
    assert parse_cron("0 0 29 2 *").next_ms(253_299_000_000_000) == 0


def test_gaps_of_half_an_hour_and_at_midnight_are_handled():
    # Lord Howe: forward by 30 minutes on 2026-10-04 at 02:00 (15:30Z the day before).
    assert following("15 2 4 10 *", "2026-10-01T00:00Z", "Australia/Lord_Howe") == ["2026-10-03T15:30Z"]
    # Cairo: forward on 2026-04-24 at 00:00 local (2026-04-23T22:00Z).
    assert following("30 0 24 4 *", "2026-04-01T00:00Z", "Africa/Cairo") == ["2026-04-23T22:00Z"]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["Europe/Madrid", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "America/St_Johns"]),
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 366 * 3),
)
def test_a_daily_time_comes_once_on_every_day_of_the_calendar(zone: str, hour: int, minute: int, day: int):
    """Against the calendar: each local day has exactly one due time, on that day."""
    cron, tz = parse_cron(f"{minute} {hour} * * *", zone), ZoneInfo(zone)
    start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)
    first = datetime.fromtimestamp(cron.next_ms(round(start.timestamp() * 1000)) / 1000, tz)
    second = datetime.fromtimestamp(cron.next_ms(round(first.timestamp() * 1000)) / 1000, tz)
    assert second.date() - first.date() == timedelta(days=1)
    for found in (first, second):
        real = found.replace(tzinfo=None)
        named = datetime.combine(found.date(), datetime.min.time()).replace(hour=hour, minute=minute)
        exists = named.replace(tzinfo=tz).astimezone(UTC).astimezone(tz).replace(tzinfo=None) == named
        assert real == named if exists else timedelta(0) < real - named <= timedelta(hours=1)
        assert found.fold == 0
