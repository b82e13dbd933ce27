"""Data locations: allowed ones are compared by path component, and nothing escapes from them."""

from __future__ import annotations

import pytest

from hodei.model.dependency import AllowedData, parse_data_location
from hodei.model.errors import InvalidInput

ALLOWED = AllowedData(["/data/", "/srv/one.csv", "https://host/open", "http://127.0.0.1:8080/"])


@pytest.mark.parametrize(
    "what",
    ["/data/x", "/data/a/b.csv", "/srv/one.csv", "https://host/open", "https://host/open/x?y=1", "https://HOST:443/open/x",
     "http://127.0.0.1:8080/anything"],
)  # fmt: skip
def test_locations_below_an_allowed_one_are_allowed(what: str) -> None:
    ALLOWED.check([what])


@pytest.mark.parametrize(
    "what",
    ["/database/x", "/srv/one.csv.bak", "/srv/two.csv", "/etc/shadow", "https://host/opened", "https://host.evil/open/x",
     "http://host/open/x", "https://host:444/open", "https://evil/host/open", "http://127.0.0.1/",
     "http://127.1:8080/x", "http://[::ffff:127.0.0.1]:8080/x", "http://2130706433:8080/x"],
)  # fmt: skip
def test_similar_looking_locations_are_refused_with_the_setting_to_change(what: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        ALLOWED.check([what])
    assert refusal.value.code == "DATA_NOT_ALLOWED"
    assert "[scheduling.data]" in refusal.value.hint


@pytest.mark.parametrize(
    "what",
    ["", "x", "data/x", "/data/../etc/shadow", "/data//x", "/data/./x", "https://host/open/../x", "https://host/%2e%2e/x",
     "https://host/open/%2e%2e%2fx", "https://user@host/open/x", "https://host\\@evil/open", "ftp://host/x", "https:///x",
     "https://host:port/x", "file:///etc/shadow", "/data/\n", "/data/\u202e", "https://host/#x", "/" + "x" * 2000],
)  # fmt: skip
def test_ambiguous_locations_are_refused(what: str) -> None:
    with pytest.raises(InvalidInput):
        parse_data_location(what)


def test_nothing_is_allowed_by_default() -> None:
    assert not AllowedData([])
    with pytest.raises(InvalidInput):
        AllowedData([]).check(["/data/x"])
