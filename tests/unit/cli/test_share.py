"""`hodei share`, `share show`, `quota` and `priority`: requests and output."""

from __future__ import annotations

import pytest

HOUR = 3_600_000 * 1_000_000
TREE = {
    "formula": "fair_tree",
    "at_ms": 1,
    "half_life_ms": 604_800_000,
    "rows": [
        {"account": "science", "shares": 3, "factor_milli": 1000, "level_shares": 4, "due": 0.75, "usage": 2 * HOUR,
         "level_usage": 2000 * HOUR, "used": 0.001, "level_fs": 750.0, "rank": 2, "ranked": 2},
        {"account": "science/ann", "shares": "parent", "factor_milli": 1000, "user": True, "rank": 2, "ranked": 2},
        {"account": "web", "shares": 1, "factor_milli": 500, "user": True, "level_shares": 4, "due": 0.25,
         "usage": 1998 * HOUR, "level_usage": 2000 * HOUR, "used": 0.999, "level_fs": 0.25025, "rank": 1, "ranked": 2},
    ],
    "budgets": [{"project": "web", "name": "gpu-hours", "used": 12.5, "limit": 500.0, "since_ms": 1}],
}  # fmt: skip
QUOTA = {
    "project": "ml", "resource": "cpu", "used": 3000, "hard": 2000, "cohort": "lab", "borrowed": 1000, "more": 0,
    "by": [["ann", 2000], ["bob", 1000]],
}  # fmt: skip
BREAKDOWN = {
    "job": 7, "milli": 533609, "position": 2, "pending": 9, "queue": "multifactor",
    "terms": [{"name": "priority", "milli": 500_000, "text": "as submitted"}, {"name": "age", "milli": 33_609, "text": "x"}],
}  # fmt: skip


@pytest.fixture
def answers(stub):
    stub.on("GET", "/api/v1/shares", TREE)
    stub.on("GET", "/api/v1/quotas", {"quotas": [QUOTA]})
    stub.on("GET", "/api/v1/jobs/7/priority", BREAKDOWN)
    return stub


def run(hodei, *args):
    done = hodei(*args)
    assert done.exit_code == 0, done.stderr
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_share_shows_every_account_and_the_budgets(hodei, answers):
    lines = run(hodei, "share")
    assert lines[0] == "fair share by fair tree, half-life 7d"
    assert "science 3 75.0% 0.1% 2 h 750 2/2 1.000 ████████████████████" in lines
    assert "web 1 25.0% 99.9% 1,998 h 0.2502 1/2 0.500 ██████████" in lines
    assert any(line.startswith("web gpu-hours 12.5 500") for line in lines)


def test_show_fetches_one_account_and_prints_its_calculation(hodei, answers):
    lines = run(hodei, "share", "show", "web")
    assert answers.requests[-1].query == {"account": "web"}
    assert "due 1 of 4 shares = 0.250000" in lines
    assert "used 1,998 h of 2,000 h on its level = 0.999000" in lines
    assert "factor its rank 1 of 2, counted from the last = 0.500" in lines
    assert "due like its parent account = 0.000000" in lines


def test_show_lists_the_accounts_if_the_name_is_unknown(hodei, answers):
    answers.on("GET", "/api/v1/shares", lambda request: TREE | {"rows": []} if request.query else TREE)
    done = hodei("share", "show", "wbe")
    assert done.exit_code == 3
    assert "next: accounts so far: science, web" in done.stderr


def test_programs_get_the_report_of_the_api(hodei, answers):
    import json

    assert json.loads(hodei("share", "-o", "json").stdout)["rows"] == TREE["rows"]
    assert json.loads(hodei("share", "show", "web", "-o", "json").stdout)["formula"] == "fair_tree"
    assert json.loads(hodei("quota", "-o", "json").stdout) == [QUOTA]
    assert json.loads(hodei("priority", "7", "-o", "json").stdout) == BREAKDOWN


def test_quota_shows_borrowed_amounts_and_the_largest_users(hodei, answers):
    assert run(hodei, "quota") == [
        "PROJECT RESOURCE USED HARD BORROWED MORE COHORT BY",
        "ml cpu 3 2 1 0 lab ann 2, bob 1",
    ]
    assert run(hodei, "quota", "show", "ml", "--no-headers") == ["ml cpu 3 2 - 1 0 lab ann 2, bob 1"]
    other = hodei("quota", "show", "other")
    assert (other.exit_code, other.stdout) == (3, "")
    assert "project 'other' has no quota" in other.stderr


def test_the_terms_of_a_priority_are_shown_with_their_sum(hodei, answers):
    lines = run(hodei, "priority", "7")
    assert lines[0] == "job 7 is number 2 of 9 in its queue (multifactor)"
    assert "priority 500 as submitted" in lines
    assert lines[-1] == "total 533.609"


@pytest.mark.parametrize(
    ("usage", "text"), [(0, "0 h"), (HOUR // 3600, "1 s"), (HOUR // 4, "0.25 h"), (123_456 * HOUR, "123,456 h")]
)
def test_usage_is_rounded_for_people(usage, text):
    from hodei.cli.share import _usage

    assert _usage(usage) == text
