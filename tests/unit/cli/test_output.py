"""Output: for people, for programs, and safe for the terminal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from hodei.api.views import JobDetail, SocketView
from hodei.cli import times
from hodei.cli.output import Column, clean, table
from unit.cli.stub import detail, job, node

GOLDEN = Path(__file__).parent / "golden"
API = "/api/v1"
EVENTS = [
    {"seq": 1, "at_ms": 1_767_225_540_000, "kind": "job.submitted", "job": 1, "detail": {"name": "a"}},
    {"seq": 2, "at_ms": 1_767_225_590_250, "kind": "run.placed", "job": 1, "run": "1.0.1", "node": "laptop"},
]


@pytest.fixture
def cluster(stub):
    views = [
        job(3, "running", labels={"team": "a"}),
        job(2, "pending", started_at="", scheduled_at="", reason_code="INSUFFICIENT_CPU", reason="insufficient cpu"),
        job(1, "failed", exit_code=3, reason="exit code 3", finished_at="2025-12-31T23:58:12.500Z"),
    ]
    stub.on("GET", f"{API}/jobs", {"jobs": views, "next_after": 0})
    stub.on("GET", f"{API}/jobs/1", detail(views[2]))
    stub.on("GET", f"{API}/nodes", {"nodes": [node(), node("empty", used={}, taints=[], state="cordoned", runs=0)]})
    stub.on("GET", f"{API}/nodes/laptop", node())

    def events(request):
        after = int(request.query["after"])
        found = [event for event in EVENTS if event["seq"] > after][: int(request.query["limit"])]
        return {"events": found, "last": found[-1]["seq"] if found else after}

    stub.on("GET", f"{API}/events", events)
    return stub


@pytest.mark.parametrize(
    "args",
    [
        "jobs -a", "jobs -a -o wide", "jobs -a -o json", "jobs -a -o jsonl", "jobs -a -o yaml", "jobs -a -o name",
        "jobs -a --no-headers", "job show 1", "job show 1 -o json", "job show 1 -o yaml", "job history 1",
        "job history 1 -o json", "nodes", "nodes -o wide", "nodes -o json", "node show laptop", "events",
        "events -o jsonl",
    ],
)  # fmt: skip
def test_output_matches_its_golden_file(hodei, cluster, args: str):
    """Machine output is an interface: a golden file that has to change needs an entry in the change log."""
    result = hodei(*args.split())
    assert result.exit_code == 0, result.stderr
    golden = GOLDEN / (args.replace(" ", "_") + ".txt")
    assert result.stdout == golden.read_text()


def test_several_items_are_a_json_list_and_one_item_an_object(hodei, cluster):
    assert [view["id"] for view in msgspec.json.decode(hodei("jobs", "-a", "-o", "json").stdout)] == [3, 2, 1]
    assert msgspec.json.decode(hodei("job", "show", "1", "-o", "json").stdout)["job"]["id"] == 1
    assert yaml.safe_load(hodei("nodes", "-o", "yaml").stdout)[0]["name"] == "laptop"


def test_an_empty_list_is_empty_for_programs_and_a_message_for_people(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [], "next_after": 0})
    assert hodei("jobs", "-o", "json").stdout == "[]\n"
    assert hodei("jobs", "-o", "jsonl").stdout == ""
    people = hodei("jobs")
    assert people.stdout == ""
    assert people.stderr == "no active jobs (all: hodei jobs -a)\n"


def test_the_environment_can_set_the_format(hodei, cluster, monkeypatch):
    monkeypatch.setenv("HODEI_OUTPUT", "name")
    assert hodei("jobs").stdout == "3\n2\n1\n"
    assert hodei("jobs", "-o", "jsonl").stdout.startswith("{")


def test_filters_go_to_the_server(hodei, cluster):
    hodei("jobs", "--project", "p", "--name", "n", "-l", "team in (a, b)", "--since", "6h", "--limit", "7")
    sent = {"project": "p", "name": "n", "label": "team in (a, b)", "since": "6h", "limit": "7"}
    assert cluster.requests[-1].query == sent | {"arrays": "fold"}
    hodei("jobs", "--elements")
    assert "arrays" not in cluster.requests[-1].query
    hodei("jobs")
    assert cluster.requests[-1].query["state"] == "pending,held,scheduled,running"
    hodei("jobs", "--state", "failed", "--state", "cancelled")
    assert cluster.requests[-1].query["state"] == "failed,cancelled"


def test_a_truncated_list_is_reported_on_stderr(hodei, cluster):
    result = hodei("jobs", "-a", "--limit", "3", "-o", "name")
    assert result.stdout == "3\n2\n1\n"
    assert "there may be more" in result.stderr
    assert hodei("jobs", "-a", "--limit", "4").stderr == ""


GANG = {
    "topology": {"key": "rack", "required": False}, "on_failure": "repair", "assembly_timeout": "5m", "elastic": True,
}  # fmt: skip


def a_gang(**spec: object) -> JobDetail:
    """Eight members: five run, the sixth was lost; there was an earlier attempt."""
    view = job(1, "running", members=8, first_attempt=2, attempt=3)
    run = detail(view).runs[0]
    runs = [replace(run, id="1.0.1", state="failed")]
    for member in range(6):
        runs.append(replace(run, id=f"1.{member}.2", member=member, attempt=2, rank=member, state="running"))
    runs[6] = replace(runs[6], state="lost")
    runs[1] = replace(runs[1], cpus=[0, 1, 4], gpus={"0": 1.0, "1": 0.5}, checkpoint_at="2025-12-31T23:59:30.000Z")
    return JobDetail(view, {"spec": {"tasks": [{"name": "main", "count": 8, "min": 4}], **spec}}, runs)


def shown(text: str, field: str) -> str:
    return next((line.removeprefix(field).strip() for line in text.splitlines() if line.startswith(f"{field} ")), "")


def test_a_partial_gang_shows_how_many_members_run(hodei, stub):
    stub.on("GET", f"{API}/jobs/1", a_gang())
    assert shown(hodei("job", "show", "1").stdout, "members") == "8 in 1 task, 4 are enough; 5 of 8 run"


def test_a_job_shows_how_long_it_may_wait(hodei, stub):
    stub.on("GET", f"{API}/jobs/1", a_gang(scheduling_timeout="5m", max_queue_time="2h"))
    assert shown(hodei("job", "show", "1").stdout, "may wait") == "5m each time, 2h for its first start"


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({}, ""),
        ({"topology": "zone"}, "all in one zone; a lost member restarts all"),
        (GANG, "all in one rack if possible; only a lost member is replaced; all must run within 5m; "
         "grows and shrinks with the free capacity"),
    ],
    ids=["none", "a required topology", "all rules"],
)  # fmt: skip
def test_the_rules_of_a_gang_are_described(hodei, stub, rules, text):
    stub.on("GET", f"{API}/jobs/1", a_gang(gang=rules))
    assert shown(hodei("job", "show", "1").stdout, "gang") == text


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"model": "colocated"}, "all tasks on one backend"),
        ({"model": "distributed"}, "tasks over backends, by transfer costs"),
        ({"model": "hub_and_spoke", "hub": "main"}, "tasks over backends, by transfer costs to main"),
    ],
    ids=["colocated", "distributed", "hub and spoke"],
)
def test_a_distribution_is_described(hodei, stub, rules, text):
    stub.on("GET", f"{API}/jobs/1", a_gang(distribution=rules))
    assert shown(hodei("job", "show", "1").stdout, "distribution") == text


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"signal": "USR1"}, "signal USR1, up to 30s before it is stopped"),
        ({"command": ["save", "-f"], "timeout": "2m"}, "command save -f, up to 2m before it is stopped"),
        ({"file": "/a"}, "time from /a"),
    ],
    ids=["a signal", "a command", "a file alone"],
)
def test_a_checkpoint_is_described(hodei, stub, rules, text):
    stub.on("GET", f"{API}/jobs/1", a_gang(checkpoint=rules))
    assert shown(hodei("job", "show", "1").stdout, "checkpoint") == text


def test_runs_show_their_rank_devices_and_last_checkpoint(hodei, stub):
    stub.on("GET", f"{API}/jobs/1", a_gang())
    lines = hodei("job", "show", "1").stdout.splitlines()
    head = next(line for line in lines if "RUN " in line)
    first = next(line for line in lines if "1.0.2" in line)
    assert "RANK" in head
    assert "cpu 0-1,4, gpu 0, gpu 1 x0.5" in first
    assert "30s ago" in first


def test_a_node_shows_its_sockets_and_its_address(hodei, stub):
    view = node(sockets=[SocketView([0, 1, 2, 3], [0, 1]), SocketView([4, 5, 6, 7])], address="10.0.0.7")
    stub.on("GET", f"{API}/nodes/laptop", view)
    stub.on("GET", f"{API}/nodes", {"nodes": [view]})
    text = hodei("node", "show", "laptop").stdout
    assert shown(text, "socket 0") == "cpu 0-3, gpu 0-1"
    assert shown(text, "socket 1") == "cpu 4-7"
    assert shown(text, "address") == "10.0.0.7"
    assert "cpu 0-3, gpu 0-1; cpu 4-7" in hodei("nodes", "-o", "wide").stdout


EVIL = "x\x1b]0;owned\x07\r\n\x9b31m\u202ey"


def test_control_characters_in_names_never_reach_the_terminal(hodei, stub):
    view = job(1, "running", name=EVIL, reason=EVIL, labels={"k": EVIL}, user=EVIL, project=EVIL, nodes=[EVIL])
    stub.on("GET", f"{API}/jobs", {"jobs": [view], "next_after": 0})
    stub.on("GET", f"{API}/jobs/1", detail(view))
    stub.on("GET", f"{API}/nodes", {"nodes": [node(EVIL, labels={"a": EVIL}, reason=EVIL, version=EVIL)]})
    stub.on("POST", f"{API}/jobs/1/hold", view)
    for args in (
        "jobs -o wide",
        "jobs -o json",
        "jobs -o jsonl",
        "job show 1",
        "nodes -o wide",
        "nodes -o name",
        "hold 1",
    ):
        out = hodei(*args.split()).stdout
        assert "owned" in out
        assert not set(out) & set("\x1b\x07\r\x9b\u202e"), args


def test_escaped_json_decodes_to_the_same(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(1, name=EVIL)], "next_after": 0})
    assert msgspec.json.decode(hodei("jobs", "-a", "-o", "json").stdout)[0]["name"] == EVIL


def test_clean_does_not_change_ordinary_text():
    assert clean("Größe 数 ok") == "Größe 数 ok"
    assert clean("a\x1bb\u202ec") == r"a\x1bb\u202ec"


def test_wide_characters_keep_columns_aligned():
    columns = [Column("A", lambda row: row), Column("B", lambda row: "x")]
    assert table(["数数", "abcd"], columns).splitlines() == ["A     B", "数数  x", "abcd  x"]


def test_output_is_not_coloured_without_a_terminal(hodei, cluster, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in hodei("jobs").stdout


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (250, "250ms"), (45_000, "45s"), (119_000, "119s"), (180_000, "3m"), (7_800_000, "2h10m"),
     (7_200_000, "2h"), (86_400_000, "24h"), (5 * 86_400_000, "5d")],
)  # fmt: skip
def test_durations_are_short(ms: int, text: str):
    assert times.duration_text(ms) == text


def test_times_are_relative_for_people():
    assert times.ago("2025-12-31T23:57:00Z") == "3m ago"
    assert times.ago(times.now_ms() + 12_000) == "in 12s"
    assert times.ago("") == ""
    assert times.iso(1_767_225_600_250) == "2026-01-01T00:00:00.250Z"
