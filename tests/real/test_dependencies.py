"""Dependencies through a real server and its command line, also across a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from real.installation import Installation, until

pytestmark = pytest.mark.real
SMALL = "cpu: 10m\nmemory: 1Mi\n"


def documents(*some: str) -> str:
    return "---\n".join(f"{one}{SMALL}" for one in some)


def by_name(installation: Installation, text: str) -> dict[str, int]:
    made = installation.ok("submit", "-", "-o", "json", input=text).json
    return {job["name"]: job["id"] for job in made}


def test_a_diamond_of_names_in_any_order_of_documents(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    order = tmp_path / "order"
    jobs = by_name(
        installation,
        documents(
            f"name: join\nafter: [left, right]\ncommand: echo join >> {order}\n",
            f"name: left\nafter: start\ncommand: echo left >> {order}\n",
            f"name: right\nafter: [start]\ncommand: echo right >> {order}\n",
            f"name: start\ncommand: sleep 0.3; echo start >> {order}\n",
            "name: repair\nafter: {failed: [join]}\ncommand: ['true']\n",
        ),
    )
    assert installation.ended(jobs["join"])[0].job.state == "succeeded"
    lines = order.read_text().split()
    assert (lines[0], sorted(lines[1:3]), lines[3]) == ("start", ["left", "right"], "join")
    repair = installation.ended(jobs["repair"])[0].job
    assert (repair.state, repair.reason_code) == ("failed", "DEPENDENCY_NEVER_MET")
    assert f"job {jobs['join']} (join) to fail, but that succeeded" in repair.reason
    tree = installation.ok("job", "graph", str(jobs["start"])).out
    assert tree.splitlines()[0].endswith(f"{jobs['start']} start  succeeded")
    assert "if failed: " in tree
    drawn = installation.ok("job", "graph", str(jobs["start"]), "-o", "json").json
    assert {job["id"] for job in drawn["jobs"]} == set(jobs.values())
    assert len(drawn["edges"]) == 5
    for form, begins in (("dot", "digraph"), ("mermaid", "graph LR"), ("svg", "<svg")):
        assert installation.ok("job", "graph", str(jobs["join"]), "--format", form).out.startswith(begins)


def test_a_failed_job_starts_its_failure_branch_and_ends_its_success_branch(installation: Installation) -> None:
    installation.up()
    jobs = by_name(
        installation,
        documents(
            "name: build\ncommand: exit 3\n",
            "name: deploy\nafter: [build]\ncommand: ['true']\n",
            "name: report\nafter: {failed: [build]}\ncommand: ['true']\n",
            "name: clean\nafter: {completed: [build, deploy, report]}\ncommand: ['true']\n",
        ),
    )
    states = {name: installation.ended(id)[0].job.state for name, id in jobs.items()}
    assert states == {"build": "failed", "deploy": "failed", "report": "succeeded", "clean": "succeeded"}
    assert "DEPENDENCY_NEVER_MET" in installation.ok("why", str(jobs["deploy"])).out
    # These jobs have ended, so their results come from the store.
    assert installation.hodei("submit", "--after", "build", "--wait", "--", "true").code == 10
    assert installation.hodei("submit", "--after", str(jobs["report"]), "--wait", "--", "true").code == 0


def test_after_accepts_every_reference_to_an_array_or_an_element(installation: Installation) -> None:
    """Element 1 of 3 fails: dependents of the array never start, dependents of another element do."""
    installation.up()
    (build,) = installation.ok(
        "submit", "-q", "--name", "build", "--array", "3", "--cpu", "10m", "--memory", "1Mi", "--", "sh", "-c",
        "sleep 0.$HODEI_ARRAY_INDEX; exit $((HODEI_ARRAY_INDEX == 1))",
    ).out.split()  # fmt: skip
    assert build.endswith("[]")
    first = int(build[:-2])

    def check_references() -> None:
        small = ("--cpu", "10m", "--memory", "1Mi", "--wait", "--", "true")
        for whole in (build, str(first), "build", "build[]", f"{first + 2}[]"):
            assert installation.hodei("submit", "--after", whole, *small).code == 10, whole
        for one, code in ((f"{first}[0]", 0), ("build[0,2]", 0), ("build[1]", 10), (str(first + 2), 0)):
            assert installation.hodei("submit", "--after", one, *small).code == code, one

    check_references()
    installation.ok("wait", "--timeout", "120s", f"{first}[0]")
    check_references()  # now from the store
    text = documents(
        f"name: deploy\nafter: [{first}]\ncommand: ['true']\n", "name: next\nafter: ['build[2]']\ncommand: ['true']\n"
    )
    jobs = by_name(installation, text)
    assert installation.ended(jobs["deploy"])[0].job.reason_code == "DEPENDENCY_NEVER_MET"
    assert installation.ended(jobs["next"])[0].job.state == "succeeded"
    assert "no element 7" in installation.hodei("submit", "--after", "build[7]", "--", "true").err
    with installation.client() as client:
        small_job = {"command": ["true"], "cpu": "10m", "memory": "1Mi"}
        sweep = client.submit(name="sweep", array=2, **(small_job | {"command": "exit $HODEI_ARRAY_INDEX"}))
        elements = list(client.elements(sweep.refresh()))
        for whole in (sweep, sweep.id, int(sweep.id), sweep.refresh(), client.job("sweep"), "sweep"):
            for after in ([whole], whole, {"succeeded": [whole]}):
                assert client.submit(**small_job, after=after).wait(60).reason_code == "DEPENDENCY_NEVER_MET"
        assert client.submit(**small_job, after=[elements[-1]]).wait(60).state == "succeeded"
        (made,) = client.submit_all([small_job | {"after": {"failed": [sweep], "need": 1}}])
        assert client.wait(made, 60)[0].reason_code == "DEPENDENCY_NEVER_MET"
        with pytest.raises(InvalidInput, match="after"):
            client.submit(**small_job, after=[object()])


def test_a_missing_or_cyclic_dependency_is_refused_by_name(installation: Installation) -> None:
    installation.up()
    cycle = documents(*(f"name: {a}\nafter: [{b}]\ncommand: ['true']\n" for a, b in ("ab", "bc", "ca")))
    refused = installation.hodei("submit", "-", input=cycle)
    assert refused.code != 0
    assert "a -> b -> c -> a" in refused.err
    installation.submit(name="build")
    refused = installation.hodei("submit", "--after", "biuld", "--", "true")
    assert "there is no job 'biuld' in project default" in refused.err
    assert "did you mean 'build'?" in refused.err
    assert "there is no job 999" in installation.hodei("submit", "--after", "999", "--", "true").err
    refused = installation.hodei(
        "submit", "-", input=documents("name: x\nafter: {exists: /etc/hostname}\ncommand: ['true']\n")
    )
    assert "[scheduling.data]" in refused.err


def test_a_job_starts_when_its_file_appears_and_why_names_the_missing_file(
    installation: Installation, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    installation.configure(f'[scheduling.data]\nallow = ["{tmp_path}/data/"]\n').up()
    file = tmp_path / "data" / "x.csv"
    jobs = by_name(
        installation, documents(f"name: read\nafter: {{exists: ['{file}'], timeout: 1h}}\ncommand: cat {file}\n")
    )
    waiting = installation.ok("why", str(jobs["read"])).out
    assert "WAITING_FOR_DEPENDENCY" in waiting
    assert f"waits for {file} to appear" in waiting
    file.write_text("6 * 7")
    assert installation.ended(jobs["read"])[0].job.state == "succeeded"
    assert installation.ok("logs", str(jobs["read"])).out == "6 * 7"


def test_a_dependency_is_kept_when_the_server_is_killed(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    go = tmp_path / "go"
    jobs = by_name(
        installation,
        documents(
            "name: quick\ncommand: ['true']\n",
            "name: last\nafter: [slow, quick]\ncommand: ['true']\n",
            f"name: slow\ncommand: until test -e {go}; do sleep 0.05; done\n",
        ),
    )
    installation.ended(jobs["quick"])
    installation.kill()
    installation.up()
    answer = installation.ok("why", str(jobs["last"]), "-o", "json").json
    assert answer["code"] == "WAITING_FOR_DEPENDENCY"
    assert f"job {jobs['slow']} (slow) to succeed" in answer["summary"]
    assert "1 of 2 are met" in answer["summary"]
    go.touch()
    assert installation.ended(jobs["last"])[0].job.state == "succeeded"


def test_a_plan_names_the_unmet_dependencies(installation: Installation) -> None:
    installation.up()
    running = installation.submit("sleep", "600", name="first")
    until(lambda: installation.state(running) == "running", "the job runs")
    plans = installation.ok("plan", "--after", "first", "-o", "json", "--", "true").json
    assert plans[0]["code"] == "WAITING_FOR_DEPENDENCY"
    assert f"job {running} (first) to succeed" in plans[0]["summary"]
