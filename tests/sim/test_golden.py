"""Published schedules are reproduced to the second. The published results are not part of the repository: without them these
tests are skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hodei.sim.metrics import bounded_slowdown
from hodei.sim.traces import open_workload
from hodei.sim.traces.workload import Estimates
from property.examples import PERCENT
from sim.machines import SHARED, pool, run
from sim.reference import Job

TRACES, VECTORS = SHARED / "traces", SHARED / "vectors"
PROCS = {"kth-sp2": 100, "sdsc-sp2": 128, "ctc-sp2": 338}
EASY, CLAIRVOYANT, SJBF = "wait_easy_s", "wait_easy_clairvoyant_s", "wait_easy_sjbf_clairvoyant_s"
# trace, policy, estimates, published waits (none where only the mean was published), bounded slowdown
PUBLISHED: list[tuple[str, str, Estimates, str, float]] = [
    ("kth-sp2", "easy", "user", EASY, 92.576540),
    ("kth-sp2", "easy", "actual", CLAIRVOYANT, 71.722385),
    ("kth-sp2", "easy-sjbf", "actual", SJBF, 49.847719),
    ("kth-sp2", "easy-sjbf", "user", "", 69.405401),
    ("sdsc-sp2", "easy", "user", EASY, 87.870324),
    ("sdsc-sp2", "easy", "actual", CLAIRVOYANT, 70.477941),
    ("sdsc-sp2", "easy-sjbf", "actual", SJBF, 56.836221),
    ("sdsc-sp2", "easy-sjbf", "user", "", 84.888944),
    ("ctc-sp2", "easy", "user", EASY, 49.571290),
    ("ctc-sp2", "easy", "actual", CLAIRVOYANT, 37.165401),
    ("ctc-sp2", "easy-sjbf", "actual", SJBF, 17.571687),
    ("ctc-sp2", "easy-sjbf", "user", "", 30.041069),
]
WINDOWS = (1981, 2756, 4299, 8850, 3316, 2714, 5228, 7762, 4022, 7085)
# Mean bounded slowdown over ten windows of 1,024 jobs of Lublin-1.
LUBLIN = {"easy": 271.40, "sjf": 42.08, "saf": 34.38, "f1": 35.26, "f3": 35.33, "f4": 29.66}


def published(path: str) -> Any:
    return pytest.mark.skipif(not (SHARED / path).exists(), reason=f"{path} is not available")


@pytest.mark.slow
@published("traces/kth-sp2/golden.csv.gz")
@pytest.mark.parametrize(
    ("trace", "policy", "estimates", "column", "slowdown"), PUBLISHED, ids=[" ".join(row[:3]) for row in PUBLISHED]
)
def test_every_published_wait_is_reproduced_to_the_second(
    trace: str, policy: str, estimates: Estimates, column: str, slowdown: float
):
    """With fewer examples than all, the first part of the trace: starts before its last arrival do not depend on the rest."""
    whole = open_workload(TRACES / trace / "golden.csv.gz", procs=PROCS[trace], estimates=estimates)
    workload = whole.window(0, len(whole.arrivals) * PERCENT // 100)
    last_ms = max(arrival.at_ms for arrival in workload.arrivals)
    result = run(workload, policy)
    outcomes = [o for o in result.outcomes if PERCENT == 100 or o.started_ms < last_ms]
    assert len(outcomes) > len(workload.arrivals) // 2
    if column:
        expected = whole.extra[column]
        wrong = [(o.id, o.wait_ms, expected[o.id]) for o in outcomes if o.wait_ms != expected[o.id] * 1000]
        assert wrong[:5] == []
    if PERCENT == 100:
        assert bounded_slowdown(outcomes) == pytest.approx(slowdown, abs=1e-5)
    assert result.start_reservations_broken == 0


def cases() -> list[Any]:
    path = VECTORS / "backfill_cases.json"
    if not path.exists():
        return [
            pytest.param(
                {},
                "",
                marks=pytest.mark.skip(
                    reason=f"{path} is not available: published schedules are not part of the repository"
                ),
            )
        ]
    found = json.loads(path.read_text())
    return [pytest.param(case, name, id=f"{case['case']} {name}") for case in found for name in case["policies"]]


@pytest.mark.parametrize(("case", "policy"), cases())
def test_jobs_of_small_published_cases_end_at_the_published_times(case: dict[str, Any], policy: str):
    jobs = [
        Job(id, each["submit_s"], each["run_s"], each["estimate_s"], each["procs"])
        for id, each in enumerate(case["jobs"], 1)
    ]
    result = run(pool(jobs, case["machine_procs"]), policy)
    ended = [outcome.ended_ms for outcome in result.outcomes]
    assert ended == [each["expected_finish_s"] * 1000 for each in case["jobs"]]


@pytest.mark.slow
@published("traces/lublin-256")
@pytest.mark.parametrize("policy", LUBLIN)
def test_the_mean_slowdown_of_ten_windows_is_the_published_one(policy: str):
    (path,) = (TRACES / "lublin-256").glob("*swf*")
    found = []
    for first in WINDOWS:
        # Windows count jobs from 1, `first` from 0.
        workload = open_workload(f"{path}?first={first - 1}&jobs=1024", procs=256)
        found.append(bounded_slowdown(run(workload, policy).outcomes))
    assert sum(found) / len(found) == pytest.approx(LUBLIN[policy], rel=0.01)
