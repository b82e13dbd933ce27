"""Scenarios: a file with a cluster, jobs, facts and expectations, run by the real controller."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.policies import POLICIES
from hodei.sim.scenario.__main__ import main
from hodei.sim.scenario.check import Finding, Outcome, check_scenario
from hodei.sim.scenario.parse import parse_scenario, read_scenario
from hodei.sim.scenario.report import format_report, to_json, update_expectations

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "scenarios").glob("*.yaml"))

TWO_NODES = "cluster: [{name: n, count: 2, cpu: 4, memory: 8Gi}]\n"
ONE_NODE = "cluster: [{name: n, cpu: 4, memory: 8Gi}]\n"


def run(text: str) -> Outcome:
    return check_scenario(parse_scenario(f"scenario: a test\n{dedent(text)}".encode(), "a.scenario.yaml"))


def findings(text: str) -> list[Finding]:
    return run(text).findings


def holds(text: str) -> None:
    outcome = run(text)
    assert outcome.findings
    assert outcome.held, format_report(outcome)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_holds(path: Path):
    outcome = check_scenario(read_scenario(path))
    assert outcome.findings
    assert outcome.held, format_report(outcome)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_scenario_is_deterministic(path: Path):
    scenario = read_scenario(path)
    assert to_json(check_scenario(scenario)) == to_json(check_scenario(scenario))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_can_be_used_in_a_scenario(name: str):
    holds(f"policy: {name}\n{ONE_NODE}jobs: [{{name: a, run: 1m}}]\nexpect: [{{job: a, starts: 0s, on: n}}]\n")


QUEUE = (
    ONE_NODE
    + """\
jobs:
  - {name: first, cpu: 4, run: 10m}
  - {name: second, cpu: 4, at: 1m, run: 5m}
  - {name: stays, cpu: 4, at: 2m}
expect:
"""
)
HELD = {
    "an exact start": "{job: second, starts: 10m}",
    "a start before": "{job: second, starts: {before: 11m}}",
    "a start after": "{job: second, starts: {after: 9m59s, before: 10m1s}}",
    "a start at about a time": "{job: second, starts: {about: 10m900ms}}",
    "a node": "{job: second, on: n}",
    "a state at a time": "{at: 5m, job: second, state: pending, reason: INSUFFICIENT_CPU}",
    "a node at a time": "{at: 12m, job: second, on: n}",
    "absent before it is submitted": "{at: 59s, job: second, state: absent}",
    "an end": "{job: first, ends: succeeded, within: 10m}",
    "no end": "{job: stays, ends: never}",
    "no preemption": "{never: preemption}",
}
NOT_HELD = {
    "another start": ("{job: second, starts: 9m}", "it started at 10m on n", "Insufficient cpu"),
    "a later start": ("{job: second, starts: {before: 10m}}", "it started at 10m on n", ""),
    "an earlier start": ("{job: second, starts: {after: 10m}}", "it started at 10m on n", ""),
    "too far from a time": ("{job: second, starts: {about: 10m2s}}", "it started at 10m on n", ""),
    "an unexpected start": ("{job: second, starts: never}", "it started at 10m on n", ""),
    "another state": ("{at: 5m, job: second, state: running}", "it was pending (INSUFFICIENT_CPU)", "Insufficient cpu"),
    "another reason": ("{at: 5m, job: second, reason: NO_NODES}", "it was pending (INSUFFICIENT_CPU)", ""),
    "a node to be avoided": ("{job: second, not_on: n}", "it was on n", "running on n"),
    "a node while it waits": ("{at: 5m, job: second, on: n}", "it was pending, on no node", ""),
    "another end": ("{job: first, ends: failed}", "it succeeded at 10m", ""),
    "an end too late": ("{job: second, ends: succeeded, within: 10m}", "it succeeded at 15m", ""),
    "an end that does not happen": ("{job: stays, ends: succeeded}", "it has not ended: running", ""),
    "a second start": ("{job: first, attempt: 2, starts: 1m}", "it started 1 times in all", ""),
    "a preemption": ("{preempted: first, by: second}", "it was not preempted", ""),
    "a broken start reservation": ("{start_reservations_broken: 1}", "0 were", ""),
}


@pytest.mark.parametrize("expected", HELD.values(), ids=HELD)
def test_a_met_expectation_holds(expected: str):
    holds(f"{QUEUE}  - {expected}\n")


@pytest.mark.parametrize(("expected", "instead", "why"), NOT_HELD.values(), ids=NOT_HELD)
def test_a_failed_expectation_reports_what_happened_and_why(expected: str, instead: str, why: str):
    (finding,) = findings(f"{QUEUE}  - {expected}\n")
    assert not finding.held
    assert instead in finding.happened
    assert why in finding.why
    assert finding.line == 8


@pytest.mark.parametrize("expected", [expected for expected, _, _ in NOT_HELD.values()], ids=NOT_HELD)
def test_expectations_that_were_updated_hold(expected: str):
    outcome = run(f"{QUEUE}  - {expected}\n  - {{never: over-commit}}\n")
    updated = check_scenario(parse_scenario(update_expectations(outcome).encode(), "a.scenario.yaml"))
    assert updated.held, format_report(updated)


def test_overcommitment_is_always_checked():
    (finding,) = findings(ONE_NODE + "jobs: [{name: a, cpu: 3, running: n}, {name: b, cpu: 3, running: n}]\n")
    assert finding.expected == "never over-commit"
    assert finding.happened == "at 0s n holds 6 cpu and has 4"


SCENARIOS = {
    "a job can be cancelled": """
        jobs: [{name: a, run: 1h, stopping: 10s}]
        facts: [{at: 1m, cancel: a}]
        expect: [{job: a, ends: cancelled, reason: CANCELLED, within: 70s}]""",
    "a held job waits until it is released": """
        jobs: [{name: full, cpu: 4, run: 1m}, {name: a, cpu: 4, at: 1s, run: 1m}]
        facts: [{at: 10s, hold: a}, {at: 10m, release: a}]
        expect: [{at: 5m, job: a, state: held, reason: HELD}, {job: a, starts: 10m}]""",
    "a requeued job starts again": """
        jobs: [{name: a, run: [10m, 1m]}]
        facts: [{at: 1m, requeue: a}]
        expect: [{job: a, attempt: 2, starts: 1m}, {job: a, ends: succeeded, within: 2m}]""",
    "a job that has ended can be requeued": """
        jobs: [{name: a, run: 1m}]
        facts: [{at: 10m, requeue: a}]
        expect: [{job: a, attempt: 2, starts: 10m}, {job: a, ends: succeeded, within: 11m}]""",
    "a failed run is retried as often as given": """
        jobs: [{name: a, run: 1m, exit: [1, 0], retries: 1}, {name: b, run: 1m, exit: 7}]
        expect: [{job: a, ends: succeeded}, {job: b, ends: failed, reason: EXIT_CODE}]""",
    "a member can be made to fail": """
        jobs: [{name: a, count: 2, run: 1h}]
        facts: [{at: 5m, fail: a, member: 1, exit: 9}]
        expect: [{job: a, ends: failed, reason: EXIT_CODE, within: 5m}]""",
    "a run ends at its timeout": """
        jobs: [{name: a, run: 1h, timeout: 5m}]
        expect: [{job: a, ends: failed, reason: TIMEOUT, within: 5m}]""",
    "nothing starts on a cordoned node": """
        jobs: [{name: a, at: 1m, run: 1m}]
        facts: [{at: 0s, cordon: n}, {at: 5m, uncordon: n}]
        expect: [{job: a, starts: 5m}]""",
    "a taint that is not tolerated evicts runs": """
        jobs: [{name: a, run: 10m}]
        facts: [{at: 1m, taint: n, as: "down=yes:NoExecute"}, {at: 5m, untaint: n, as: "down=yes:NoExecute"}]
        expect: [{at: 2m, job: a, state: pending}, {job: a, attempt: 2, starts: 5m}]""",
    "runs of a lost node start again when it is back": """
        jobs: [{name: a, run: 10m}]
        facts: [{at: 1m, lose: n}, {at: 5m, join: n}]
        expect: [{at: 2m, job: a, state: pending}, {job: a, attempt: 2, starts: 5m, on: n}]""",
    "a running job is not started again": """
        jobs: [{name: old, cpu: 4, running: n, at: -5m, run: 10m}, {name: a, cpu: 4, run: 1m}]
        expect: [{job: a, starts: 5m}, {job: old, ends: succeeded}]""",
    "an earlier submission comes first": """
        jobs: [{name: late, cpu: 4, run: 1m}, {name: early, cpu: 4, at: -1h, run: 1m}]
        expect: [{job: early, starts: 0s}, {job: late, starts: 1m}]""",
    "a job larger than the cluster is refused": """
        jobs: [{name: a, cpu: 5}]
        expect: [{job: a, ends: refused, reason: LARGER_THAN_CLUSTER}, {at: 0s, job: a, state: refused}]""",
    "without a run time the estimate is used": """
        jobs: [{name: a, estimate: 7m}]
        expect: [{job: a, ends: succeeded, within: 7m}]""",
    "a job may be written in the full form": """
        jobs:
          - at: 1m
            run: 1m
            apiVersion: hodei/v1
            kind: Job
            metadata: {name: a}
            spec: {tasks: [{name: x, count: 2}, {name: y}]}
        expect: [{job: a, starts: 1m}]""",
    "gpus in use at the start stay in use": """
        jobs: [{name: old, gpu: 2, running: n, run: 5m}, {name: a, gpu: 1, run: 1m}]
        expect: [{job: a, starts: 5m}]""",
    "a scenario ends at its time limit": """
        jobs: [{name: a, run: 1h}]
        until: 10m
        expect: [{job: a, ends: never}]""",
}


@pytest.mark.parametrize("text", SCENARIOS.values(), ids=SCENARIOS)
def test_a_scenario_holds(text: str):
    holds("cluster: [{name: n, cpu: 4, memory: 8Gi, gpu: 2}]\n" + dedent(text))


def test_a_node_may_join_later():
    holds("""
        cluster: [{name: n, count: 2, cpu: 4, memory: 8Gi}, {name: late, cpu: 8, memory: 8Gi, there: false}]
        config: {admission: {oversized: wait}}
        jobs: [{name: a, cpu: 8, run: 1m}]
        facts: [{at: 5m, join: late}]
        expect: [{job: a, starts: 5m, on: late}]
    """)


def test_a_fact_without_effect_is_noted():
    outcome = run(ONE_NODE + "jobs: [{name: a, run: 1m}]\nfacts: [{at: 5m, cancel: a}]\n")
    assert outcome.history.notes == ["facts[0] cancel a at 5m: no effect"]


def test_jobs_submitted_at_one_time_are_decided_together():
    holds(ONE_NODE + "jobs: [{name: low, cpu: 4, priority: low, run: 1m}, {name: high, cpu: 4, priority: high, run: 1m}]"
          "\nexpect: [{job: high, starts: 0s}, {job: low, starts: 1m}]\n")  # fmt: skip


MISTAKES = {
    "an unknown key": ("jobz: []", 4, "jobz: unknown key 'jobz'; did you mean 'jobs'?"),
    "an unknown policy": ("policy: eazy", 4, "policy: there is no policy 'eazy'; did you mean 'easy'?"),
    "a policy twice": ("policy: easy\nconfig: {}", 5, "config: policy and config are both given"),
    "a wrong configuration": (
        "config: {profile: {}}",
        4,
        "config.profile: unknown key 'profile'; did you mean 'profiles'?",
    ),
    "a wrong plugin": ("config: {profiles: {default: {queue: nosuch}}}", 4, "config: "),
    "an unknown verb": (
        "facts:\n  - {at: 1m, loose: n}",
        5,
        "facts[0].loose: unknown key 'loose'; did you mean 'lose'?",
    ),
    "two verbs": ("facts: [{at: 1m, lose: n, join: n}]", 4, "facts[0]: lose and join together"),
    "an unknown node": ("facts: [{at: 1m, lose: m}]", 4, "facts[0].lose: there is no node 'm'"),
    "an unknown job": ("expect:\n\n  - {job: b, starts: 1m}", 6, "expect[0].job: there is no job 'b'"),
    "an invalid time": ("expect: [{job: a, starts: soon}]", 4, "expect[0].starts: 'soon' is not a duration"),
    "a state without a time": ("expect: [{job: a, state: pending}]", 4, "expect[0].state: when? add at: 1m"),
    "an empty expectation": ("expect: [{job: a}]", 4, "expect[0]: no expectation for a"),
    "an invalid taint": ("facts: [{at: 1m, taint: n}]", 4, "facts[0].as: '' is not a taint"),
}


@pytest.mark.parametrize(("more", "line", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_problem_is_reported_with_its_line_and_path(more: str, line: int, message: str):
    text = f"scenario: a test\n{ONE_NODE}jobs: [{{name: a, run: 1m}}]\n{more}\n"
    with pytest.raises(InvalidInput) as refused:
        parse_scenario(text.encode(), "a.scenario.yaml")
    where, text = refused.value.problems[0]
    assert where == f"a.scenario.yaml:{line}"
    assert message in text


def test_all_problems_of_jobs_and_nodes_are_reported():
    text = (
        "scenario: x\ncluster:\n- {name: n, cpus: 4}\njobs:\n- {name: a, cpu: four}\n- {name: a, cpu: 1}\n- {name: a}\n"
    )
    with pytest.raises(InvalidInput) as refused:
        parse_scenario(text.encode(), "x")
    reported = [f"{where} {message.partition(':')[0]}" for where, message in refused.value.problems]
    assert reported == ["x:3 cluster[0].cpus", "x:5 jobs[0].cpu", "x:7 jobs[2].name"]


def test_an_update_changes_only_failed_expectations():
    text = (
        "scenario: a test\n" + ONE_NODE + "jobs:\n  - {name: a, run: 1m}   # short\n"
        "expect:\n  - {job: a, starts: 0s}   # at once\n  - job: a\n    ends: failed\n\n  # removed:\n"
        "  - {preempted: a}\n  - {start_reservations_broken: 0}\n"
    )
    expected = text.replace("job: a\n    ends: failed", "{job: a, ends: succeeded}").replace("  - {preempted: a}\n", "")
    assert update_expectations(check_scenario(parse_scenario(text.encode(), "a"))) == expected


def test_an_update_of_a_file_without_expectations_adds_them():
    text = f"scenario: a test\n{TWO_NODES}jobs: [{{name: a, run: 1m}}, {{name: b, cpu: 9}}]\nexpect: []\n"
    after = update_expectations(check_scenario(parse_scenario(text.encode(), "a")))
    assert after.partition("expect:\n")[2].splitlines() == [
        "  - {job: a, starts: 0s, on: n1}",
        "  - {job: a, ends: succeeded}",
        "  - {job: b, ends: refused, reason: LARGER_THAN_CLUSTER}",
        "  - {start_reservations_broken: 0}",
    ]
    assert check_scenario(parse_scenario(after.encode(), "a")).held


GOOD = f"scenario: good\n{ONE_NODE}jobs: [{{name: a, run: 1m}}]\nexpect:\n  - {{job: a, starts: 0s}}\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.scenario.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.scenario.yaml"
    path.write_text(GOOD.replace("good", "bad").replace("starts: 0s", "starts: 5s"))
    return path


def test_the_exit_code_is_0_if_all_hold_1_if_some_do_not_and_2_if_a_file_is_unreadable(
    good: Path, bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(good)]) == 0
    assert "1 scenario held" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "DID NOT HOLD  a starts at 5s  (line 5)" in output
    assert "1 of 2 scenarios did not hold" in output
    assert main([str(good), str(tmp_path / "none.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2


def test_the_result_is_json_for_programs(good: Path, bad: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["-o", "json", str(good), str(bad)]) == 1
    first, second = json.loads(capsys.readouterr().out)["scenarios"]
    assert (first["held"], second["held"]) == (True, False)
    assert first["jobs"] == [
        {"name": "a", "state": "succeeded", "starts": [{"at_ms": 0, "nodes": ["n"], "ended_ms": 60000}]}
    ]
    assert second["expectations"][0]["happened"] == "it started at 0s on n"


def test_an_update_shows_the_difference_and_then_holds(bad: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--update", str(bad)]) == 0
    output = capsys.readouterr().out
    assert "-  - {job: a, starts: 5s}\n+  - {job: a, starts: 0s}\n" in output
    assert main([str(bad)]) == 0


def test_pytest_runs_scenario_files_as_tests(good: Path, bad: Path, tmp_path: Path):
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "DID NOT HOLD  a starts at 5s" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_pytest_plugin_imports_nothing_of_hodei_before_a_scenario_runs():
    code = (
        "import hodei.pytest_plugin, sys; print(*(name for name in sys.modules"
        " if name in ('numpy', 'yaml', 'msgspec') or name.startswith('hodei.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["hodei.pytest_plugin"]
