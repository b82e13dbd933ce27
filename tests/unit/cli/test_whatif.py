"""`hodei whatif`: request and output."""

from __future__ import annotations

from hodei.model.explanation import ProjectedEviction, ProjectedStart, WhatIf
from unit.cli.stub import NOW_MS, problem

PATH = "/api/v1/whatif"
HOUR = 3_600_000


def test_all_changes_are_one_request(hodei, stub, tmp_path):
    stub.on("POST", PATH, WhatIf(NOW_MS))
    (tmp_path / "easy.toml").write_text('[scheduling.profiles.default]\nqueue = "batch"\n')
    result = hodei("whatif", "--add-nodes", "2", "--like", "n1", "--remove-node", "n2", "--policy",
                 str(tmp_path / "easy.toml"), "--cpu", "2", "--", "true")  # fmt: skip
    assert result.exit_code == 0, result.output
    (request,) = stub.sent("POST", PATH)
    body = request.json()
    assert (body["add_nodes"], body["like"], body["remove_nodes"]) == (2, "n1", ["n2"])
    assert body["jobs"][0]["command"] == ["true"]
    assert body["policy"]["profiles"]["default"]["queue"] == "batch"


def test_the_answer_has_starts_evictions_and_moved_jobs(hodei, stub):
    stub.on("POST", PATH, WhatIf(
        NOW_MS,
        (ProjectedStart("own", start_ms=NOW_MS, nodes=("a", "b")), ProjectedStart("huge")),
        (ProjectedEviction("low", NOW_MS, 7, by_name="own"),),
        (ProjectedStart("sooner", 8, NOW_MS, ("c",), NOW_MS + HOUR, ("a",)),),
        (ProjectedStart("late", 9, NOW_MS + 2 * HOUR, ("a",), NOW_MS + HOUR, ("a",)),),
        3,
        ("some forecasts are missing",),
    ))  # fmt: skip
    text = " ".join(hodei("whatif", "--add-nodes", "1").output.split())
    for part in (
        "own would start now on a, b", "huge: no start within the forecast", "7 low now own never", "8 sooner", "-60m c",
        "9 late", "+60m a", "3 pending jobs would start at the same time", "note: some forecasts are missing",
    ):  # fmt: skip
        assert part in text, text


def test_a_job_larger_than_the_cluster_exits_with_5(hodei, stub):
    stub.on("POST", PATH, problem(422, "LARGER_THAN_CLUSTER", "can never run here"))
    assert hodei("whatif", "--cpu", "64", "--", "true").exit_code == 5


def test_a_what_if_without_a_change_is_a_usage_error(hodei):
    assert hodei("whatif").exit_code == 2
    assert hodei("whatif", "--like", "n1").exit_code == 2
