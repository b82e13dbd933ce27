"""Kubernetes' quantities: the forms that its own parser accepts and rejects, and its rounding."""

import pytest

from hodei.kube.api.quantities import amount, amounts
from hodei.model.errors import InvalidInput
from hodei.model.resources import MAX_AMOUNT


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0), ("0n", 0), ("0Ki", 0), ("0E", 0), ("1", 1), ("+123", 123), ("1.", 1), ("1.5", 2), (".5", 1),
        ("1Ki", 2**10), ("8Ki", 2**13), ("7Mi", 7 * 2**20), ("6Gi", 6 * 2**30), ("5Ti", 5 * 2**40), ("4Pi", 4 * 2**50),
        ("10k", 10_000), ("7M", 7_000_000), ("6G", 6 * 10**9), ("5T", 5 * 10**12), ("4P", 4 * 10**15),
        ("1e3", 1000), ("1E3", 1000), ("1e+3", 1000), ("12e-1", 2), ("1.25e2", 125), ("0e9", 0), ("1e006", 10**6),
        ("0.1Ki", 103), ("0.025Ti", 27_487_790_695), ("1.5Mi", 1_572_864), ("12.523523Mi", 13_131_866),
        ("1m", 1), ("1000m", 1), ("1001m", 2), ("100n", 1), ("1u", 1), ("1n", 1), ("1e-40", 1),
    ],
)  # fmt: skip
def test_memory_is_whole_bytes_rounded_up(text, bytes_):
    assert amount(text) == bytes_


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("1", 1000), ("0.5", 500), ("250m", 250), ("0.1", 100), ("1.0005", 1001), ("100u", 1), ("1n", 1), ("1e3", 10**6),
        ("2k", 2 * 10**6), ("0", 0), (".001", 1), ("0.0011", 2), ("1Ki", 1_024_000),
    ],
)  # fmt: skip
def test_cpu_is_whole_thousandths_rounded_up(text, milli):
    assert amount(text, 1000) == milli


@pytest.mark.parametrize("text", ["1Ei", "3Ei", "100E", "1E", "1e40", "1e999", "9999999999999999999999"])
def test_an_amount_above_the_maximum_counts_as_the_maximum(text):
    assert amount(text) == MAX_AMOUNT


@pytest.mark.parametrize(
    "text",
    ["", ".", "1.1.M", "1+1.0M", "0.1mi", "0.1am", "aoeu", ".5i", "1i", "-3.01i", "-3.01e-", " 1", "1 ", "1 0", "1Gib",
     "1ki", "1K", "1e", "e3", "--1", "1e1.5", "NaN", "0x10", "1_000", "1" * 200],
)  # fmt: skip
def test_an_invalid_quantity_is_refused(text):
    with pytest.raises(InvalidInput):
        amount(text)


def test_a_negative_amount_is_refused():
    with pytest.raises(InvalidInput, match="negative"):
        amount("-1")


def test_each_resource_has_its_own_unit():
    assert amounts({"cpu": "1.5", "memory": "1Ki", "nvidia.com/gpu": "2", "pods": 110}) == {
        "cpu": 1500, "memory": 1024, "nvidia.com/gpu": 2, "pods": 110,
    }  # fmt: skip
