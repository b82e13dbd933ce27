"""Shares, quotas, budgets, ranges and permissions on a real server."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from hodei.engine.fairness.formulas import classic, fair_tree
from hodei.engine.fairness.tree import Path, build_tree
from hodei.server.auth import Role, add_token
from real.installation import Installation, until

pytestmark = pytest.mark.real

NODE = """
[[nodes]]
name = "n1"
cpu = 4
memory = "1Gi"
"""
SHARES = """
[scheduling.profiles.default]
queue = "multifactor"

[scheduling.shares]
enabled = true
formula = "FORMULA"

[[scheduling.shares.accounts]]
name = "science"
shares = 3

[[scheduling.shares.accounts]]
name = "physics"
under = "science"
shares = 2
users = {ann = 2}

[[scheduling.shares.accounts]]
name = "biology"
under = "science"
"""


def with_token(installation: Installation, name: str, role: Role) -> dict[str, str]:
    """Add a token with this role, and return its environment when the server knows it."""
    token = add_token(installation.home / "tokens", name, role)
    until(lambda: installation.request("GET", "/api/v1/quotas", token=token).status == 200, f"{name} is known")
    return {"HODEI_TOKEN": token}


def use(installation: Installation, *projects: str, env: dict[str, str] | None = None) -> None:
    """Run a short job in each project, so that it has usage."""
    for project in projects:
        installation.ended(submit(installation, project, "sleep", "0.2", env=env))


def submit(
    installation: Installation, project: str, *command: str, env: dict[str, str] | None = None, **fields: Any
) -> int:
    options = [f"--{name}={value}" for name, value in {"cpu": "100m", "memory": "1Mi", **fields}.items()]
    result = installation.hodei("submit", f"--project={project}", *options, "-o", "name", "--", *command, env=env)
    assert result.code == 0, result.err
    return int(result.out)


def shares(installation: Installation) -> dict[Path, dict[str, Any]]:
    return {tuple(row["account"].split("/")): row for row in installation.ok("share", "-o", "json").json["rows"]}


def usage(installation: Installation) -> dict[Path, int]:
    return {path: row.get("usage", 0) for path, row in shares(installation).items()}


@pytest.mark.parametrize("formula", ["fair_tree", "classic"])
def test_the_fair_share_factors_follow_from_the_shown_shares_and_usage(
    installation: Installation, formula: str
) -> None:
    installation.configure(SHARES.replace("FORMULA", formula) + NODE).up()
    ann = with_token(installation, "ann", "user")
    use(installation, "physics", "physics", "elsewhere")
    use(installation, "physics", "biology", env=ann)
    rows = shares(installation)
    tree = build_tree((path, row["shares"]) for path, row in rows.items())
    used = {path: row.get("usage", 0) for path, row in rows.items() if row.get("user")}
    computed = classic(tree, used) if formula == "classic" else fair_tree(tree, used)
    assert {row.path: round(row.factor * 1000) for row in computed} == {p: r["factor_milli"] for p, r in rows.items()}
    assert ("science", "physics", "ann") in rows
    # The text has the same numbers.
    shown = installation.ok("share", "show", "physics").out
    assert "science/physics/ann" in shown
    assert "elsewhere" not in shown
    share = "of its parent's share = 0.333333 of everything" if formula == "classic" else "= 0.666667"
    assert f"2 of 3 shares {share}" in shown
    assert f"= {rows['science', 'physics', 'ann']['factor_milli'] / 1000:.3f}" in shown
    assert "physics" in installation.ok("share").out


def test_an_unknown_account_is_reported_with_the_known_ones(installation: Installation) -> None:
    installation.configure(SHARES.replace("FORMULA", "fair_tree") + NODE).up()
    use(installation, "web")
    refused = installation.hodei("share", "show", "wbe")
    assert (refused.code, refused.out) == (3, "")
    assert "there is no account 'wbe'\n  next: accounts so far: physics, science, web" in refused.err


def test_usage_survives_a_server_that_is_killed(installation: Installation) -> None:
    installation.configure(SHARES.replace("FORMULA", "fair_tree") + NODE).up()
    use(installation, "web", "physics")
    running = submit(installation, "biology", "sleep", "600")
    installation.until_state(running, "running")
    until(lambda: usage(installation).get(("science", "biology", "admin")), "the running job has usage")
    before = usage(installation)
    installation.kill()
    installation.up()
    after = usage(installation)
    # The usage of ended jobs is unchanged, but for a moment of decay with a half-life of a week.
    assert after["web", "admin"] == pytest.approx(before["web", "admin"], rel=0.01)
    assert after["science", "physics", "admin"] == pytest.approx(before["science", "physics", "admin"], rel=0.01)
    # The running job counts once, from its start.
    now = usage(installation)["science", "biology", "admin"]
    ran_ms = time.time() * 1000 - datetime.fromisoformat(installation.job(running).job.started_at).timestamp() * 1000
    rate = 1_000_000 // 10 + 250_000 // 1024  # a tenth of a core and 1Mi, with the default weights
    assert before["science", "biology", "admin"] <= after["science", "biology", "admin"] <= now
    assert now <= rate * (ran_ms + 30_000)
    installation.ok("cancel", str(running))


def test_without_shares_the_error_names_the_setting(installation: Installation) -> None:
    installation.configure(NODE).up()
    refused = installation.hodei("share")
    assert refused.code == 3
    assert "set scheduling.shares.enabled = true" in refused.err
    assert "NO_SHARES" in refused.err
    assert "no quotas are set" in installation.ok("quota").err


def test_every_term_of_a_priority_is_shown_and_they_add_up(installation: Installation) -> None:
    installation.configure(SHARES.replace("FORMULA", "fair_tree") + NODE).up()
    use(installation, "web")
    installation.until_state(submit(installation, "web", "sleep", "600", cpu=4), "running")
    pending = submit(installation, "web", "true", cpu=4, priority="low")
    priority = installation.ok("priority", str(pending), "-o", "json").json
    assert [term["name"] for term in priority["terms"]] == ["priority", "age", "fair share"]
    assert sum(term["milli"] for term in priority["terms"]) == priority["milli"]
    assert priority["terms"][0]["milli"] == 250_000
    shown = installation.ok("priority", str(pending)).out
    assert f"job {pending} is number 1 of 1 in its queue (multifactor)" in shown
    running = installation.hodei("priority", str(pending - 1))
    assert running.code != 0
    assert "it is not in a queue" in running.err


QUOTAS = """
[scheduling.quotas.ml]
hard = {cpu = 2}
pending = 1

[scheduling.ranges.ml]
max = {cpu = 2}

[scheduling.ranges."*"]
min = {memory = "1Mi"}
"""


def test_a_job_over_its_quota_is_pending_and_why_names_the_users_of_the_quota(installation: Installation) -> None:
    installation.configure(QUOTAS + NODE).up()
    ann = with_token(installation, "ann", "user")
    first = submit(installation, "ml", "sleep", "600", cpu=2, env=ann)
    installation.until_state(first, "running")
    pending = submit(installation, "ml", "true", cpu=1)
    until(lambda: installation.job(pending).job.reason_code == "QUOTA", "the quota refuses the job")
    why = installation.ok("why", str(pending)).out
    assert "project ml may hold 2 cpu and holds 2 cpu (ann 2); it asks for 1 cpu" in why
    assert "[QUOTA]" in why
    row = installation.ok("quota").lines[1].split()
    assert row == ["ml", "cpu", "2", "2", "0", "ann", "2"]
    (quota,) = installation.ok("quota", "show", "ml", "-o", "json").json
    assert (quota["used"], quota["hard"], quota["by"]) == (2000, 2000, [["ann", 2000]])
    # The project may have one pending job.
    more = installation.hodei("submit", "--project=ml", "--cpu=1", "--", "true")
    assert "project ml may have 1 pending jobs and has 1 (admin 1)" in more.err
    assert "PENDING_QUOTA" in more.err
    installation.ok("cancel", str(first))
    assert installation.ended(pending)[0].job.state == "succeeded"


def test_a_job_out_of_range_or_larger_than_its_quota_is_refused_at_submission(installation: Installation) -> None:
    installation.configure(QUOTAS + NODE).up()
    large = installation.hodei("submit", "--project=ml", "--cpu=3", "--", "true")
    assert large.code != 0
    assert "jobs of project ml must ask for at most 2 cpu" in large.err
    assert "OUT_OF_RANGE" in large.err
    document = json.dumps({"name": "gang", "project": "ml", "cpu": 2, "count": 2, "command": ["true"]})
    gang = installation.hodei("submit", "-", input=document)
    assert "can never run: it asks for 4 cpu and project ml may never hold more than 2" in gang.err
    assert "OVER_QUOTA" in gang.err
    small = installation.hodei("submit", "--memory=1Ki", "--", "true")
    assert "must ask for at least 1Mi memory" in small.err
    assert installation.ok("jobs", "--all", "-o", "name").out == ""


def test_lent_quota_is_reclaimed_and_the_borrower_starts_again_later(installation: Installation) -> None:
    lab = """
[scheduling.quotas.a]
hard = {cpu = 2}
cohort = "lab"

[scheduling.quotas.b]
hard = {cpu = 2}
cohort = "lab"
"""
    installation.configure(lab + NODE).up()
    jobs = [submit(installation, "a", "sh", "-c", "sleep 600", cpu=1) for _ in range(4)]
    for job in jobs:
        installation.until_state(job, "running")
    assert "lab" in installation.ok("quota").out
    owner = submit(installation, "b", "sleep", "1", cpu=1)
    (detail,) = installation.ended(owner)
    assert detail.job.state == "succeeded"
    youngest = installation.until_state(jobs[-1], "running")  # again, after the owner has ended
    assert youngest.job.attempt == 2
    with installation.client() as client:
        (event,) = [event for event in client.events(job=jobs[-1]) if event.kind == "job.reclaimed"]
    assert "gives back what project a borrowed of the quota of b" in event.detail["reason"]
    installation.ok("cancel", *map(str, jobs))


def test_jobs_of_a_project_over_its_budget_are_pending_until_the_next_period(installation: Installation) -> None:
    budget = '[scheduling.budgets.student]\nmoney = 0.000001\nprices = {cpu = "1.0"}\nperiod = "month"\n'
    installation.configure(budget + NODE).up()
    use(installation, "student")
    pending = submit(installation, "student", "true")
    until(lambda: installation.job(pending).job.reason_code == "BUDGET", "the budget refuses the job")
    this_month = datetime.fromtimestamp(time.time(), UTC).replace(day=1)
    reason = installation.job(pending).job.reason
    assert "has used" in reason
    assert f"the next period starts {this_month + timedelta(days=32):%Y-%m}-01" in reason
    assert installation.ended(submit(installation, "other", "true"))[0].job.state == "succeeded"
    assert "money" in installation.ok("share").out


def test_a_role_limits_the_priority_and_every_role_may_read(installation: Installation) -> None:
    installation.configure(SHARES.replace("FORMULA", "fair_tree") + NODE).up()
    ann, eve = with_token(installation, "ann", "user"), with_token(installation, "eve", "viewer")
    assert installation.hodei("submit", "--priority=high", "--", "true", env=ann).code == 0
    refused = installation.hodei("submit", "--priority=critical", "--", "true", env=ann)
    assert refused.code != 0
    assert "requests priority 1000; the role user may use at most 750" in refused.err
    assert "PRIORITY_TOO_HIGH" in refused.err
    answer = installation.request(
        "POST", "/api/v1/jobs", b'{"command": ["true"], "priority": 751}', token=ann["HODEI_TOKEN"],
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert (answer.status, answer.json["code"]) == (403, "PRIORITY_TOO_HIGH")
    assert installation.hodei("submit", "--priority=critical", "--", "true").code == 0
    for command in (("share",), ("share", "show", "default"), ("quota",)):
        assert installation.hodei(*command, env=eve).code == 0
    assert installation.hodei("submit", "--", "true", env=eve).code != 0
