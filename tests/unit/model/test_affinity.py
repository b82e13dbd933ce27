"""Selectors: how they are written and what they match."""

from __future__ import annotations

import pytest

from hodei.model.affinity import Requirement, all_match, check_requirement, parse_selector
from hodei.model.errors import InvalidInput

LABELS = {"zone": "a", "disk": "ssd", "cores": "16", "empty": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        pytest.param("zone=a", True, id="equal"),
        pytest.param("zone==a", True, id="equal, written twice"),
        pytest.param("zone=b", False, id="another value"),
        pytest.param("zone!=b", True, id="not equal"),
        pytest.param("zone!=a", False, id="not equal, but it is"),
        pytest.param("rack!=r1", True, id="a missing label is not equal to anything"),
        pytest.param("zone in (a, b)", True, id="one of"),
        pytest.param("zone notin (a, b)", False, id="none of, but it is one"),
        pytest.param("rack notin (r1)", True, id="a missing label is in no set"),
        pytest.param("rack in (r1)", False, id="a missing label is not one of a set"),
        pytest.param("disk", True, id="exists"),
        pytest.param("rack", False, id="does not exist, but should"),
        pytest.param("!rack", True, id="should not exist"),
        pytest.param("!disk", False, id="should not exist, but does"),
        pytest.param("cores>8", True, id="greater"),
        pytest.param("cores>16", False, id="not greater than itself"),
        pytest.param("cores<17", True, id="less"),
        pytest.param("zone>1", False, id="a word is not greater than a number"),
        pytest.param("rack<1", False, id="a missing label is not less than a number"),
        pytest.param("empty=", True, id="the empty value"),
        pytest.param("zone=a,disk=ssd,!spot", True, id="all of several"),
        pytest.param("zone=a, disk=hdd", False, id="one of several does not hold"),
        pytest.param("", True, id="no condition"),
    ],
)
def test_a_selector_matches_as_in_kubernetes(text, matches):
    assert all_match(parse_selector(text), LABELS) is matches


@pytest.mark.parametrize(
    "text",
    ["zone in ()", "zone in a", "=a", "zone=a disk=b", "cores>many", "cores>", "zone=(", ", ,", "zone in (a", "!"],
)
def test_a_selector_that_cannot_be_read_is_refused(text):
    with pytest.raises(InvalidInput):
        parse_selector(text)


@pytest.mark.parametrize(
    "requirement",
    [
        Requirement("zone", "In", ()),
        Requirement("zone", "NotIn", ()),
        Requirement("zone", "Exists", ("a",)),
        Requirement("zone", "DoesNotExist", ("a",)),
        Requirement("cores", "Gt", ("1", "2")),
        Requirement("cores", "Lt", ("many",)),
    ],
    ids=str,
)
def test_values_must_suit_the_operator(requirement):
    with pytest.raises(InvalidInput):
        check_requirement(requirement)


@pytest.mark.parametrize(
    "text", ["zone=a", "zone in (a, b)", "zone notin (a, b)", "disk", "!spot", "cores>8", "cores<8"]
)
def test_a_requirement_is_written_as_it_is_read(text):
    (requirement,) = parse_selector(text)
    assert str(requirement) == text
