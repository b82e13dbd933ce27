from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from hodei.model.explanation import (
    BackendQueueEntry,
    Blocker,
    Explanation,
    NearestMiss,
    Patch,
    Placement,
    QueuePosition,
    Suggestion,
)
from hodei.model.job import Candidate, Decision, ScoreTerm
from unit.cli.stub import NOW_MS, job

GOLDEN = Path(__file__).parent / "golden"
API = "/api/v1"

WAITING = Explanation(
    status="waiting", code="INSUFFICIENT_CPU", summary="5 of 7 nodes lack cpu", job=12, name="train", state="pending",
    nodes=7, blockers=(
        Blocker("INSUFFICIENT_CPU", "insufficient cpu", "fit", count=5, nodes=("n1", "n2", "n3", "n4", "n5")),
        Blocker("UNTOLERATED_TAINT", "taint gpu:NoSchedule is not tolerated", "taints", count=2, nodes=("g1", "g2")),
    ),
    nearest=NearestMiss("n3", "lacks 500m cpu"), queue=QueuePosition(3, 41), attempts=4, last_attempt_ms=NOW_MS - 20_000,
    next_attempt_ms=NOW_MS + 8_000, next_trigger="when a run ends or a node joins", hint="ask for 1500m cpu or less",
    scheduler_beat_ms=NOW_MS - 100, at_ms=NOW_MS,
)  # fmt: skip
TERMS = (
    ScoreTerm("resource_fit", 8000, 40),
    ScoreTerm("load", 9000, 30),
    ScoreTerm("affinity", 0, 20),
    ScoreTerm("proximity", 5000, 10),
)
PLACED = Explanation(
    status="running", code="PLACED", summary="n2 scored highest of 3 feasible nodes", job=12, name="train",
    state="running", nodes=7, feasible=3, placements=(
        Placement("n2", "main", 0, "12.0.1", "running", Decision(
            Candidate("n2", 6400, TERMS), (Candidate("n1", 6400), Candidate("n9", 2000)), 3, 7)),
    ), at_ms=NOW_MS,
)  # fmt: skip
NEVER = Explanation(status="unsatisfiable", code="TOO_LARGE", summary="no node has 512 cpu", nodes=7, name="huge")


@pytest.mark.parametrize(("name", "answer"), [("waiting", WAITING), ("placed", PLACED), ("unsatisfiable", NEVER)])
def test_an_explanation_matches_its_golden_file(hodei, stub, name: str, answer: Explanation):
    stub.on("GET", f"{API}/jobs/12/why", answer)
    result = hodei("why", "12")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (GOLDEN / f"why_{name}.txt").read_text()


def test_json_output_is_the_object_of_the_api(hodei, stub):
    stub.on("GET", f"{API}/jobs/12/why", WAITING)
    assert msgspec.json.decode(hodei("why", "12", "-o", "json").stdout, type=Explanation) == WAITING


def test_wide_shows_every_node(hodei, stub):
    stub.on("GET", f"{API}/jobs/12/why", WAITING)
    assert "n1, n2, n3, n4, n5" in hodei("why", "12", "-o", "wide").stdout


def test_a_scheduler_without_heartbeat_is_shown(hodei, stub):
    silent = msgspec.structs.replace(WAITING, scheduler_beat_ms=NOW_MS - 90_000)
    stub.on("GET", f"{API}/jobs/12/why", silent)
    assert "last heartbeat 90s ago" in hodei("why", "12").stdout


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            BackendQueueEntry("hpc", NOW_MS + 90_000, "Slurm: Priority"),
            r"expected to start at \S.* \(in 90s\) by hpc's own estimate; ",
        ),
        (BackendQueueEntry("hpc"), r"hpc has no estimate of its start\n"),
    ],
    ids=["estimate", "no estimate"],
)
def test_a_job_in_the_queue_of_a_backend_shows_the_estimate_of_the_backend(
    hodei, stub, entry: BackendQueueEntry, text: str
):
    answer = Explanation(
        "placed", "PLACED", "placed on hpc-main, waits in the queue of backend hpc", job=12, backend_queue=entry
    )
    stub.on("GET", f"{API}/jobs/12/why", answer)
    assert re.search(text, hodei("why", "12").stdout)
    assert msgspec.json.decode(hodei("why", "12", "-o", "json").stdout, type=Explanation).backend_queue == entry


def test_last_is_the_newest_job(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(12)], "next_after": 0})
    stub.on("GET", f"{API}/jobs/12/why", PLACED)
    assert hodei("why", "last").stdout.startswith("job 12 (train) is running")


def test_suggested_changes_are_a_separate_table(hodei, stub):
    suggestions = (
        Suggestion("memory 64Gi to 60Gi", "lower", 3, "n2", Patch("main", {"request": {"memory": 60 * 2**30}})),
        Suggestion("tolerate dedicated=gpu:NoSchedule", "tolerate", 5, "g1"),
    )
    stub.on("GET", f"{API}/jobs/12/why", msgspec.structs.replace(WAITING, suggestions=suggestions))
    output = hodei("why", "12").stdout
    assert "\n  any one of these changes would let it start now:\n" in output
    assert "  memory 64Gi to 60Gi                3      n2\n" in output
    assert "  tolerate dedicated=gpu:NoSchedule  5      g1\n" in output


def test_why_can_be_limited_to_one_node(hodei, stub):
    placement = Placement("n2", "main", 0, decision=Decision(Candidate("n2", 6400, TERMS)))
    answer = Explanation(
        "waiting", "FITS_HERE", "n2 could take it", job=12, placements=(placement,), nodes=1, feasible=1
    )
    stub.on("GET", f"{API}/jobs/12/why", answer)
    output = hodei("why", "12", "--node", "n2").stdout
    assert output.startswith("job 12 is waiting: n2 could take it [FITS_HERE]\n")
    assert "main[0] could go to n2\n    score 64.0 of 100 (profile default)\n" in output
    (sent,) = stub.sent("GET", f"{API}/jobs/12/why")
    assert sent.query == {"node": "n2"}


def test_the_state_is_not_repeated_in_the_summary(hodei, stub):
    stub.on("GET", f"{API}/jobs/12/why", msgspec.structs.replace(PLACED, summary="running on n2", code="RUNNING"))
    assert hodei("why", "12").stdout.startswith("job 12 (train) is running on n2 [RUNNING]\n")
