"""`hodei sim`: its options, output and files, and the files after an error.

The runs are small ones of the real scheduler; tests/sim proves that it decides well.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.__main__ import TRACES, main
from hodei.sim.commands import compare, replay
from hodei.sim.commands.compare import Failure, run_all
from hodei.sim.commands.output import Progress, staged_directory
from hodei.sim.commands.simulate import SimulationRequest, prepare, read_cluster, simulate
from hodei.sim.metrics import Result
from hodei.sim.policies import ABOUT, POLICIES, policy
from hodei.sim.traces.generate import NAMES
from hodei.wiring import make_controller

SMALL = "generate:lublin?jobs=60&seed=3"
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Three jobs on ten processors: the second waits for the first, the third is backfilled."""
    path = tmp_path / "jobs.csv"
    path.write_text("id,submit_s,run_s,requested_s,procs\n7,0,100,200,6\n8,10,50,60,10\n9,20,30,40,4\n")
    return str(path)


def test_a_mean_over_no_jobs_is_a_dash_and_not_0(trace: str, capsys):
    short = ["replay", trace, "--policy", "easy", "--procs", "10", "--until", "1s"]
    assert main(short) == 0
    rows = {line[2:29].strip(): line[29:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["bounded slowdown"] == "-"
    assert main([*short, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["bounded_slowdown"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["replay", "--policy", "easy", "--until", "0"], "'0' is not a positive duration"),
        (["forecasts", "--every", "0"], "'0' is not a positive duration"),
        (["forecasts", "--every", "500ms"], "'500ms' is too short; give 1s or more"),
    ],
)
def test_a_duration_of_zero_is_refused(trace: str, args: list[str], message: str, capsys):
    assert main([*args, trace, "--procs", "10"]) == 2
    assert message in capsys.readouterr().err


def test_replay_prints_one_object_with_the_numbers(trace: str, capsys):
    assert main(["replay", trace, "--policy", "easy", "--procs", "10", "-o", "json"]) == 0
    out = capsys.readouterr()
    numbers = json.loads(out.out)
    assert out.err == ""
    expected = "bounded_slowdown mean_wait_s max_wait_s utilisation jobs seconds start_reservations_broken policy workload unplaced starts"
    assert set(expected.split()) <= set(numbers)
    assert numbers["starts"] == {"head": 2, "backfill": 1, "spill": 0}
    assert (numbers["jobs"], numbers["mean_wait_s"], numbers["max_wait_s"]) == (3, 30.0, 90.0)
    assert (numbers["policy"], numbers["start_reservations_broken"], numbers["unplaced"]) == ("easy", 0, 0)


def test_replay_prints_the_main_numbers_and_notes(trace: str, capsys):
    assert main(["replay", trace, "--policy", "fcfs", "--procs", "9", "--gantt"]) == 0
    out = capsys.readouterr()
    assert "under fcfs, 1 node (9 cpu)" in out.out
    assert "start reservations broken  0" in out.out
    assert "100 %" in out.out  # the Gantt chart of a pool
    assert "note: 1 of 3 jobs larger than the machine" in out.err


def test_quiet_leaves_out_the_notes(trace: str, capsys):
    assert main(["replay", trace, "--policy", "fcfs", "--procs", "9", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_the_waits_of_all_jobs_are_written_in_order_of_their_ids(trace: str, tmp_path: Path):
    assert main(["replay", trace, "--policy", "easy", "--procs", "10", "--waits", "w.csv", "-q"]) == 0
    assert (tmp_path / "w.csv").read_text() == "id,wait_s\n7,0\n8,90\n9,0\n"


def test_a_job_that_never_started_has_no_wait(trace: str, tmp_path: Path):
    args = ["replay", trace, "--policy", "easy", "--procs", "10", "--until", "30s", "--waits", "w.csv", "-q"]
    assert main(args) == 0
    assert (tmp_path / "w.csv").read_text() == "id,wait_s\n7,0\n8,\n9,0\n"


def test_actual_estimates_are_the_real_run_times(trace: str):
    numbers = {}
    for source in ("user", "actual"):
        prepared = prepare(SimulationRequest(trace, "easy", procs=10, estimates=source))
        numbers[source] = [arrival.spec.estimate_ms for arrival in prepared.workload.arrivals]
    assert numbers == {"user": [200_000, 60_000, 40_000], "actual": [100_000, 50_000, 30_000]}


def test_learned_estimates_are_for_the_scheduler_to_learn(trace: str):
    prepared = prepare(SimulationRequest(trace, "easy", procs=10, estimates="learned"))
    assert prepared.config.estimates.source == "learned"
    assert [arrival.spec.estimate_ms for arrival in prepared.workload.arrivals] == [200_000, 60_000, 40_000]


def test_until_is_counted_from_the_first_arrival(tmp_path: Path):
    path = tmp_path / "late.csv"
    path.write_text("id,submit_s,run_s,requested_s,procs\n1,86400,10,10,1\n2,86460,10,10,1\n3,90000,10,10,1\n")
    result = simulate(prepare(SimulationRequest(str(path), "easy", procs=1, until_ms=120_000)))
    assert [outcome.id for outcome in result.outcomes] == [1, 2]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_a_suitable_workload(name: str):
    needs_gpus = "gpu_" in str(POLICIES[name]) or "fgd" in str(POLICIES[name])
    order = SimulationRequest("generate:gpu?jobs=15&nodes=4" if needs_gpus else "generate:lublin?jobs=15", name)
    result = simulate(prepare(order))
    assert all(outcome.ended_ms >= 0 for outcome in result.outcomes)


MISTAKES = {
    "no such trace": (["missing.swf", "--policy", "easy"], "there is no trace missing.swf"),
    "no such policy": ([SMALL, "--policy", "esay"], "did you mean 'easy'"),
    "no machine": (["jobs.csv", "--policy", "easy"], "give --procs or --cluster"),
    "no such cluster": ([SMALL, "--policy", "easy", "--cluster", "none.yaml"], "cannot read the cluster none.yaml"),
    "a file instead of a directory": ([SMALL, "--policy", "easy", "--out", "jobs.csv"], "it is not a directory"),
    "a directory that cannot be created": ([SMALL, "--policy", "easy", "--out", "jobs.csv/deep"], "cannot write to"),
    "a directory instead of a file": ([SMALL, "--policy", "easy", "--waits", "."], "it is a directory"),
    "a file in a missing directory": (
        [SMALL, "--policy", "easy", "--waits", "none/w.csv"],
        "cannot write to none/w.csv",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_has_a_hint_and_leaves_no_files(mistake: str, trace: str, tmp_path: Path, capsys):
    args, message = MISTAKES[mistake]
    assert main(["replay", *args]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("error: ")
    assert "next: " in out.err
    assert message in out.err
    assert os.listdir(tmp_path) == ["jobs.csv"]


@pytest.mark.parametrize(
    "args",
    [
        ["replay", SMALL],
        ["replay", SMALL, "--policy", "easy", "--procs", "0"],
        ["replay", SMALL, "--policy", "easy", "--procs", "5", "--cluster", "2x4"],
        ["replay", SMALL, "--policy", "easy", "--until", "soon"],
        ["replay", SMALL, "--policy", "easy", "--estimates", "guessed"],
        ["compare", SMALL, "--policies", ","],
        ["compare", SMALL, "--policies", "easy,easy"],
    ],
    ids=["no policy", "no processors", "two clusters", "an invalid time", "unknown estimates", "no policies", "a policy twice"],
)  # fmt: skip
def test_an_invalid_command_line_exits_with_2(args: list[str], capsys):
    assert main(args) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_report_directory_appears_when_it_is_complete(trace: str, tmp_path: Path, monkeypatch):
    def write(results: list[Result], folder: Path) -> None:
        assert not (tmp_path / "deep/report").exists()
        (folder / "index.html").write_text(results[0].policy)

    monkeypatch.setattr(replay, "write_report", write)
    assert main(["replay", trace, "--policy", "easy", "--procs", "10", "--out", "deep/report", "-q"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["deep", "jobs.csv"]
    assert os.listdir(tmp_path / "deep") == ["report"]
    assert (tmp_path / "deep/report/index.html").read_text() == "easy"


def test_a_report_into_an_existing_directory_replaces_files_of_the_same_name(tmp_path: Path):
    (tmp_path / "out").mkdir()
    for name in ("index.html", "other.txt"):
        (tmp_path / "out" / name).write_text("old")
    with staged_directory(Path("out")) as folder:
        assert folder is not None
        (folder / "index.html").write_text("new")
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"index.html": "new", "other.txt": "old"}


def test_a_failure_while_writing_leaves_neither_report_nor_waits(trace: str, tmp_path: Path, monkeypatch, capsys):
    def write(results: list[Result], folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device", "half")

    monkeypatch.setattr(replay, "write_report", write)
    args = ["replay", trace, "--policy", "easy", "--procs", "10", "--out", "deep/report", "--waits", "w.csv"]
    assert main(args) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["jobs.csv"]


def test_ctrl_c_reports_the_progress_and_leaves_no_files(trace: str, tmp_path: Path, monkeypatch, capsys):
    def interrupted(prepared, update) -> Result:
        update(3 * 86_400_000 + 7_200_000, 1234, 5678)
        raise KeyboardInterrupt

    monkeypatch.setattr(replay, "simulate", interrupted)
    assert main(["replay", trace, "--policy", "easy", "--procs", "10", "--out", "r", "--waits", "w.csv"]) == 130
    assert "day 3 02h of simulated time, 1,234 of 5,678 jobs done; nothing was written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["jobs.csv"]


def silent(names: list[str]) -> Progress:
    return Progress(names, io.StringIO(), shown=False)


@pytest.mark.real
def test_compare_prints_a_table_and_writes_waits_and_a_report(trace: str, tmp_path: Path, monkeypatch, capsys):
    reported: list[str] = []
    monkeypatch.setattr(compare, "write_report", lambda results, out: reported.extend(r.policy for r in results))
    args = ["compare", trace, "--policies", "fcfs, easy", "--procs", "10", "--waits", "w.csv", "--out", "r"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("fcfs", "easy"))] == ["fcfs", "easy"]
    assert (tmp_path / "w.csv").read_text() == "id,fcfs,easy\n7,0,0\n8,90,90\n9,130,0\n"
    assert reported == ["fcfs", "easy"]


@pytest.mark.real
def test_parallel_runs_have_the_results_of_sequential_ones():
    names = ["easy", "conservative", "fcfs"]
    orders = [SimulationRequest(SMALL, name) for name in names]
    for order, result in zip(orders, run_all(orders, silent(names), workers=2), strict=True):
        assert isinstance(result, Result)
        single = simulate(prepare(order))
        assert (result.policy, result.outcomes, result.samples) == (single.policy, single.outcomes, single.samples)


@pytest.mark.real
def test_a_policy_that_fails_does_not_lose_the_others():
    names = ["easy", "nonsense", "fcfs"]
    easy, nonsense, fcfs = run_all([SimulationRequest(SMALL, name) for name in names], silent(names), workers=2)
    assert isinstance(easy, Result)
    assert isinstance(nonsense, Failure)
    assert "there is no policy 'nonsense'" in nonsense.message
    assert isinstance(fcfs, Result)


def test_a_failed_policy_is_named_and_makes_exit_1(trace: str, monkeypatch, capsys):
    done = simulate(prepare(SimulationRequest(trace, "easy", procs=10)))
    monkeypatch.setattr(compare, "run_all", lambda orders, progress, workers: [done, Failure("out of memory")])
    assert main(["compare", trace, "--policies", "easy,sjf", "--procs", "10", "-o", "json"]) == 1
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert [numbers["policy"] for numbers in report["results"]] == ["easy"]
    assert report["failed"] == {"sjf": "out of memory"}
    assert "error: sjf failed: out of memory" in out.err


def test_if_all_policies_fail_nothing_is_written(trace: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run_all", lambda orders, progress, workers: [Failure("out of memory")])
    assert main(["compare", trace, "--policies", "easy", "--procs", "10", "--out", "r", "--waits", "w.csv"]) == 1
    assert "every run failed; easy: out of memory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["jobs.csv"]


@pytest.mark.real
@pytest.mark.parametrize(
    "command", [["replay", "--policy", "easy"], ["compare", "--policies", "easy,fcfs"]], ids=["replay", "compare"]
)
def test_a_real_ctrl_c_ends_everything_with_130(command: list[str], tmp_path: Path):
    """Interrupted when the report directory appears; the trace would take minutes."""
    name, *options = command
    argv = [sys.executable, "-m", "hodei.sim", name, "generate:lublin?jobs=1000000", *options, "--out", "r"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not any(name.endswith(".tmp") for name in os.listdir(tmp_path)):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "interrupted: " in stderr
    assert "nothing was written" in stderr
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_line_for_each_run(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    progress = Progress(["easy", "conservative"], screen, shown=True)
    progress.set_status(0, "reading the trace")
    progress.begin(0)
    progress.update(0, 3 * 86_400_000 + 3_600_000, 500, 1000)
    progress.set_status(1, "reading the trace")
    last = screen.getvalue().rsplit("\r", 1)[1]
    assert "easy         [#####.....]  50%" in last
    assert "day 3 01h" in last
    assert "conservative  reading the trace" in last
    progress.clear()
    assert screen.getvalue().endswith("\r\x1b[1A\x1b[J")


@pytest.mark.parametrize(
    ("screen", "shown"), [(io.StringIO, True), (Screen, False)], ids=["no terminal", "switched off"]
)
def test_without_a_terminal_nothing_is_drawn(screen, shown: bool):
    stream = screen()
    progress = Progress(["easy"], stream, shown=shown)
    progress.begin(0)
    progress.update(0, 1, 2, 3)
    progress.clear()
    assert stream.getvalue() == ""


def test_the_short_form_of_a_cluster_is_nodes_times_cores():
    nodes = read_cluster("12x4")
    assert [node.name for node in nodes][::11] == ["node-00", "node-11"]
    assert nodes[0].capacity == {"cpu": 4000, "memory": 16 * 2**30}
    assert read_cluster("2x4x8Gi")[0].capacity["memory"] == 8 * 2**30


YAML = """
- {name: big, count: 2, cpu: 64, memory: 256Gi, labels: {tier: fast}, region: eu, zone: eu-a, rack: r1, cost: 1.5}
- {name: gpu, cpu: 16, gpu: 8, gpu_type: a100, taints: ["gpu=yes:NoSchedule"]}
"""
TOML = """
[server]
port = 1

[[nodes]]
name = "big"
count = 2
cpu = 64
memory = "256Gi"
labels = {tier = "fast"}
region = "eu"
zone = "eu-a"
rack = "r1"
cost = 1.5

[[nodes]]
name = "gpu"
cpu = 16
gpu = 8
gpu_type = "a100"
taints = ["gpu=yes:NoSchedule"]
"""


@pytest.mark.parametrize(
    ("file", "text"),
    [("c.yaml", YAML), ("c.yaml", "nodes:" + YAML), ("c.toml", TOML)],
    ids=["a YAML list", "YAML under nodes", "TOML of a server"],
)
def test_groups_of_nodes_have_the_form_of_a_server_configuration(file: str, text: str):
    Path(file).write_text(text)
    first, second, gpu = read_cluster(file)
    assert (first.name, second.name, gpu.name) == ("big-0", "big-1", "gpu")
    assert first.capacity == second.capacity
    assert (first.capacity["cpu"], first.capacity["memory"]) == (64_000, 256 * 2**30)
    assert (first.labels, first.location.zone, first.location.rack) == ({"tier": "fast"}, "eu-a", "r1")
    assert (first.cost_milli, gpu.capacity["gpu"], gpu.gpu_type, gpu.taints[0].key) == (1500, 8000, "a100", "gpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no nodes"),
        ("- {name: a, cpus: 4}", "did you mean 'cpu'"),
        ("- {name: a, count: 0}", "a count of 0"),
        ("- {name: a}\n- {name: a}", "two nodes called 'a'"),
        ("- {name: a, cpu: lots}", "node 'a'"),
        ("machines: []", "unknown key 'machines'"),
        ("{", "c.yaml"),
    ],
    ids=["empty", "a misspelt key", "a count of 0", "a name twice", "not a number", "an unknown key", "not YAML"],
)
def test_an_invalid_cluster_is_refused_with_a_reason(text: str, message: str):
    Path("c.yaml").write_text(text)
    with pytest.raises(InvalidInput) as error:
        read_cluster("c.yaml")
    assert message in error.value.message
    assert error.value.hint


def test_on_a_cluster_large_jobs_become_gangs_of_members_that_fit_every_node(trace: str):
    prepared = prepare(SimulationRequest(trace, "easy", cluster="4x4"))
    tasks = [[(task.count, task.request["cpu"]) for task in a.spec.tasks] for a in prepared.workload.arrivals]
    assert tasks == [[(1, 4000), (1, 2000)], [(2, 4000), (1, 2000)], [(1, 4000)]]
    assert {outcome.size for outcome in simulate(prepared).outcomes} == {2, 3, 1}


def test_gpu_traces_count_the_gpus_of_a_cluster(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("- {name: g, count: 3, cpu: 64, gpu: 4}")
    (tmp_path / "p.csv").write_text(
        "timestamp,duration,num_gpus,cluster\n2017-10-09 07:00:00,60,8,a\n2017-10-09 07:00:10,60,16,a\n"
    )
    prepared = prepare(SimulationRequest("p.csv", "easy", cluster="c.yaml"))
    (only,) = prepared.workload.arrivals
    assert [(task.count, task.request) for task in only.spec.tasks] == [(2, {"gpu": 4000})]
    assert len(prepared.nodes) == 3


@pytest.mark.parametrize(("command", "names"), [("policies", list(POLICIES)), ("traces", [row[0] for row in TRACES])])
def test_lists_have_a_line_per_item(command: str, names: list[str], capsys):
    assert main([command]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", *names]
    assert main([command, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report] == names
    assert all(each["about"] for each in report)


def test_every_generator_is_listed():
    assert {row[0] for row in TRACES if ":" in row[0]} == {f"generate:{name}" for name in NAMES}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_built_and_is_in_the_reference(name: str):
    assert make_controller(policy(name)).queues
    assert ABOUT[name]
    assert f"\n| `{name}` |" in (DOCS / "reference/policies.md").read_text()


def test_child_processes_do_not_receive_ctrl_c():
    """In a fresh interpreter: the first process that multiprocessing starts also starts a helper process."""
    script = """
import re, signal
from pathlib import Path
from hodei.sim.commands.simulate import SimulationRequest
from hodei.sim.commands.compare import _start
if __name__ == "__main__":
    for _ in range(2):
        _, process = _start(SimulationRequest("generate:lublin?jobs=1000000", "fcfs"))
        blocked = int(re.search(r"SigBlk:\\s*(\\w+)", Path(f"/proc/{process.pid}/status").read_text())[1], 16)
        print(bool(blocked >> (signal.SIGINT - 1) & 1))
        process.kill()
        process.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr
