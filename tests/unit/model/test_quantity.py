"""Quantities and durations are parsed as Kubernetes and people write them, exactly."""

from __future__ import annotations

import pytest

from hodei.model.errors import InvalidInput
from hodei.model.resources import (
    format_duration,
    format_quantity,
    format_resources,
    human_amount,
    human_quantity,
    parse_duration_ms,
    parse_quantity,
    parse_resources,
)


@pytest.mark.parametrize(
    ("text", "scale", "amount"),
    [
        pytest.param("250m", 1000, 250, id="a quarter of a core"),
        pytest.param("2", 1000, 2000, id="two cores"),
        pytest.param(1.5, 1000, 1500, id="a number with a fraction"),
        pytest.param("0.5", 1000, 500, id="half a core"),
        pytest.param(".5", 1000, 500, id="half a core without a zero"),
        pytest.param("100u", 1000, 1, id="less than a thousandth is rounded up to one"),
        pytest.param("1.0001", 1000, 1001, id="a little more than one core is rounded up"),
        pytest.param("8Gi", 1, 8 * 2**30, id="binary gigabytes"),
        pytest.param("8G", 1, 8 * 10**9, id="decimal gigabytes"),
        pytest.param("64Mi", 1, 64 * 2**20, id="binary megabytes"),
        pytest.param("1k", 1, 1000, id="a small k is a thousand"),
        pytest.param("1Ki", 1, 1024, id="Ki is 1024"),
        pytest.param("1e3", 1, 1000, id="an exponent"),
        pytest.param("12E2", 1, 1200, id="a large E with digits is an exponent"),
        pytest.param("1.5Gi", 1, 1536 * 2**20, id="a fraction of a binary unit"),
        pytest.param("0.5", 1, 1, id="half a byte is a whole byte"),
        pytest.param("1500m", 1, 2, id="one and a half bytes are two"),
        pytest.param("1n", 1, 1, id="the smallest unit counts as one"),
        pytest.param("0", 1, 0, id="nothing"),
        pytest.param("+3", 1, 3, id="with a plus"),
        pytest.param(" 4 ", 1, 4, id="with blanks around it"),
    ],
)
def test_a_quantity_is_read_exactly_and_rounded_up(text, scale, amount):
    assert parse_quantity(text, scale=scale) == amount


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("-1", "negative", id="negative"),
        pytest.param("nan", "not an amount", id="not a number"),
        pytest.param(float("inf"), "not an amount", id="infinite"),
        pytest.param("8GB", "not a quantity", id="with a B"),
        pytest.param("eight", "not a quantity", id="a word"),
        pytest.param("", "not a quantity", id="empty"),
        pytest.param("1 000", "not a quantity", id="a blank inside"),
        pytest.param("9e18", "larger than any machine", id="absurdly large"),
        pytest.param("1E", "larger than any machine", id="an exabyte"),
        pytest.param("1e999", "not a quantity", id="an absurd exponent"),
        pytest.param("9" * 10_000, "not a quantity", id="ten thousand digits"),
        pytest.param("1.2.3", "not a quantity", id="two points"),
        pytest.param("1gi", "not a quantity", id="a suffix in the wrong case"),
    ],
)
def test_an_invalid_quantity_is_refused_with_a_hint(text, message):
    with pytest.raises(InvalidInput, match=message) as error:
        parse_quantity(text)
    assert error.value.hint
    assert len(error.value.message) < 100


def test_the_hint_for_a_trailing_b_is_to_leave_it_out():
    with pytest.raises(InvalidInput) as error:
        parse_quantity("8GB")
    assert error.value.hint == "leave out the B: 8G"


@pytest.mark.parametrize(
    ("amount", "scale", "text"),
    [
        (250, 1000, "250m"),
        (3000, 1000, "3"),
        (0, 1000, "0"),
        (8 * 2**30, 1, "8Gi"),
        (1536 * 2**20, 1, "1536Mi"),
        (1000, 1, "1000"),
        (0, 1, "0"),
    ],
)
def test_an_amount_is_written_in_its_shortest_exact_form_and_reads_back(amount, scale, text):
    assert format_quantity(amount, scale=scale) == text
    assert parse_quantity(text, scale=scale) == amount


@pytest.mark.parametrize(
    ("amount", "scale", "text"),
    [(3500, 1000, "3.5"), (250, 1000, "0.25"), (8375186227, 1, "7.8Gi"), (512, 1, "512"), (2**30, 1, "1Gi")],
)
def test_human_quantities_have_three_digits(amount, scale, text):
    assert human_quantity(amount, scale=scale) == text


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        pytest.param("90", 90_000, id="a bare number is seconds"),
        pytest.param(90, 90_000, id="a whole number is seconds"),
        pytest.param("1.5", 1500, id="a fraction of seconds"),
        pytest.param("90s", 90_000, id="seconds"),
        pytest.param("250ms", 250, id="milliseconds"),
        pytest.param("15m", 900_000, id="minutes"),
        pytest.param("1h30m", 5_400_000, id="hours and minutes"),
        pytest.param("1h 30m", 5_400_000, id="with a blank"),
        pytest.param("1.5h", 5_400_000, id="a fraction of hours"),
        pytest.param("2d", 172_800_000, id="days"),
        pytest.param("1w", 604_800_000, id="a week"),
        pytest.param("01:30:00", 5_400_000, id="a clock"),
        pytest.param("05:30", 330_000, id="minutes and seconds"),
        pytest.param("2-01:00:00", 176_400_000, id="Slurm's days"),
        pytest.param("0", 0, id="none"),
    ],
)
def test_a_duration_is_read_in_milliseconds(text, ms):
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "5 parsecs", "1h and a bit", "nan", "1e5", "200 y", "99999999d", "9" * 400]
)
def test_an_invalid_duration_is_refused_with_a_hint(text):
    with pytest.raises(InvalidInput) as error:
        parse_duration_ms(text)
    assert error.value.hint


@pytest.mark.parametrize("ms", [0, 1, 999, 1000, 61_000, 5_400_000, 90_061_001, 604_800_000])
def test_a_written_duration_reads_back(ms):
    assert parse_duration_ms(format_duration(ms)) == ms


def test_a_duration_is_written_largest_unit_first():
    assert format_duration(90_061_001) == "1d1h1m1s1ms"


def test_resources_have_units_and_aliases():
    found = parse_resources({"cpus": "500m", "mem": "1Gi", "disk": "2Gi", "gpus": 1, "example.com/fpga": 2})
    assert found == {"cpu": 500, "memory": 2**30, "ephemeral-storage": 2**31, "gpu": 1000, "example.com/fpga": 2}
    assert format_resources(found) == {
        "cpu": "500m", "memory": "1Gi", "ephemeral-storage": "2Gi", "gpu": "1", "example.com/fpga": "2",
    }  # fmt: skip
    assert human_amount("cpu", 2500) == "2.5"


def test_a_resource_given_under_two_names_is_refused():
    with pytest.raises(InvalidInput, match="memory is given twice"):
        parse_resources({"memory": "1Gi", "mem": "2Gi"})


@pytest.mark.parametrize("name", ["", "a b", "/x", "-cpu", "x" * 300, "a/b/c"])
def test_an_invalid_resource_name_is_refused(name):
    with pytest.raises(InvalidInput, match="not a resource name"):
        parse_resources({name: 1})


def test_a_zero_request_is_kept():
    assert parse_resources({"cpu": 0}) == {"cpu": 0}
