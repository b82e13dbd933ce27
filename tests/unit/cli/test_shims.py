"""Commands of Slurm for Hodei: requests, options and rows, with a stub of the server. A real server and a real Slurm are in
`real/test_slurm_shims` and `real/slurm/test_shims`."""

from __future__ import annotations

import pytest

from hodei.backends.slurm_variables import counts, folded_hosts, folded_numbers, hosts, hosts_in_order
from hodei.cli.shims import listings, sbatch
from hodei.cli.shims.__main__ import COMMANDS, main
from hodei.cli.shims.jobs import (
    CommandError,
    JobRow,
    format_duration,
    format_full_duration,
    format_rows,
    parse_options,
)
from unit.cli.stub import job


@pytest.mark.parametrize(
    ("seconds", "short", "full"),
    [(0, "0:00", "00:00:00"), (90, "1:30", "00:01:30"), (3600, "1:00:00", "01:00:00"), (183_600, "2-03:00:00", "2-03:00:00")],
)  # fmt: skip
def test_durations_have_the_format_of_slurm(seconds, short, full):
    assert (format_duration(seconds), format_full_duration(seconds)) == (short, full)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1"], "n1"), (["n1", "n2", "n3", "n7"], "n[1-3,7]"), (["n01", "n02"], "n[01-02]"), (["host"], "host"), ([], ""),
        (["a1", "b1", "a2"], "a[1-2],b1"), (["host", "n1"], "host,n1"),
    ],
)  # fmt: skip
def test_names_of_hosts_are_folded(names, text):
    assert folded_hosts(names) == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,5]", "n1 n2 n3 n5"), ("n1", "n1"), ("n[08-10],gpu2", "n08 n09 n10 gpu2"), ("a-b.c,x[1-2]y[3,4]", "a-b.c x1y3 x1y4 x2y3 x2y4"),
    ],
)  # fmt: skip
def test_scontrol_shows_the_names_in_a_list_of_hosts(text, names, capsys, monkeypatch):
    assert hosts(text) == names.split()
    monkeypatch.setenv("SLURM_JOB_NODELIST", text)
    for words in ([], [text]):
        with pytest.raises(SystemExit) as ended:
            main(["scontrol", "show", "hostnames", *words])
        assert not ended.value.code
        assert capsys.readouterr().out.split() == names.split()


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n[1-999999999]", ",", "n[1-1000][1-1000]", ""])
def test_an_invalid_host_list_is_refused(text, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["scontrol", "show", "hostnames", text])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("scontrol: error: ")


def test_lists_keep_the_order_of_the_nodes():
    assert hosts_in_order(["n2", "n1"]) == "n2,n1"
    assert hosts_in_order(["n1", "n2", "n1", "m"]) == "n[1-2],m"
    assert counts([2, 2, 1, 2]) == "2(x2),1,2"


def test_numbers_are_folded():
    assert folded_numbers([9, 1, 3, 8, 7]) == "1,3,7-9"


@pytest.mark.parametrize(
    ("fields", "state", "reason", "code"),
    [
        ({"state": "pending", "reason_code": "INSUFFICIENT_CPU"}, "PENDING PD", "Resources", "0:0"),
        ({"state": "pending", "reason_code": "WAITING_FOR_DEPENDENCY"}, "PENDING PD", "Dependency", "0:0"),
        ({"state": "pending", "reason_code": "ARRAY_LIMIT"}, "PENDING PD", "JobArrayTaskLimit", "0:0"),
        ({"state": "held"}, "PENDING PD", "JobHeldUser", "0:0"),
        ({"state": "scheduled"}, "CONFIGURING CF", "None", "0:0"),
        ({"state": "running"}, "RUNNING R", "None", "0:0"),
        ({"state": "running", "cancel_requested": True}, "COMPLETING CG", "None", "0:0"),
        ({"state": "succeeded", "exit_code": 0}, "COMPLETED CD", "None", "0:0"),
        ({"state": "failed", "reason_code": "EXIT_CODE", "exit_code": 3}, "FAILED F", "NonZeroExitCode", "3:0"),
        ({"state": "failed", "reason_code": "EXIT_CODE", "exit_code": 137}, "FAILED F", "NonZeroExitCode", "0:9"),
        ({"state": "failed", "reason_code": "TIMEOUT", "exit_code": 143}, "TIMEOUT TO", "TimeLimit", "0:0"),
        ({"state": "failed", "reason_code": "OUT_OF_MEMORY", "exit_code": 137}, "OUT_OF_MEMORY OOM", "OutOfMemory", "0:9"),
        ({"state": "failed", "reason_code": "LOST"}, "NODE_FAIL NF", "NodeDown", "0:0"),
        ({"state": "cancelled", "reason_code": "CANCELLED", "started_at": "2026-01-01T00:00:00Z"}, "CANCELLED CA", "None", "0:15"),
        ({"state": "pending", "reason_code": "A_NEW_ONE"}, "PENDING PD", "A_NEW_ONE", "0:0"),
    ],
)  # fmt: skip
def test_states_and_reasons_are_those_of_slurm(fields, state, reason, code):
    row = JobRow(job(1, **{"started_at": "", "exit_code": None, "reason_code": "", **fields}))
    assert (f"{row.state} {row.short_state}", row.reason, row.exit_code) == (state, reason, code)


def test_columns_are_cut_and_padded():
    row = JobRow(job(17, name="a-long-name"))
    assert (
        list(format_rows("%.5i|%-x|%4j|%j", listings.SQUEUE_FIELDS, [row], header=True))[1]
        == "   17|%-x|a-lo|a-long-name"
    )
    with pytest.raises(CommandError, match="%y"):
        list(format_rows("%y", listings.SQUEUE_FIELDS, [row], header=False))


def test_options_are_parsed_like_getopt():
    args = parse_options(["-hu", "ada", "--sta=PD,R", "7"], "h/noheader u/user= states=")
    assert ("noheader" in args, args.get("user"), args.values("states"), args.rest) == (True, "ada", ["PD", "R"], ["7"])
    with pytest.raises(CommandError, match="unrecognized option '--nope'"):
        parse_options(["--nope"], "h/noheader")


def test_arguments_after_the_script_are_not_options():
    options, rest, wrapped = sbatch.split(["-c", "4", "--mem=1G", "job.sh", "-c", "x"])
    assert [(option.name, option.value) for option in options] == [("cpus-per-task", "4"), ("mem", "1G")]
    assert (rest, wrapped) == (["job.sh", "-c", "x"], None)
    assert sbatch.split(["--wrap", "a b", "-n2"])[2] == "a b"


def test_variables_of_sbatch_override_the_script_and_are_overridden_by_the_command_line(stub, monkeypatch, tmp_path):
    stub.on("POST", "/api/v1/jobs", {"ids": [7]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")
    monkeypatch.setenv("SBATCH_JOB_NAME", "other")
    (tmp_path / "job.sh").write_text("#!/bin/sh\n#SBATCH -t 60\ntrue\n")
    with pytest.raises(SystemExit) as ended:
        main(["sbatch", "-J", "own", "job.sh"])
    assert not ended.value.code
    (job,) = stub.sent("POST", "/api/v1/jobs")[0].json()["jobs"]
    assert (job["timeout"], job["name"], job["workdir"]) == ("7m", "own", str(tmp_path))
    assert "HODEI_TOKEN" not in job["env"]


@pytest.mark.parametrize(
    ("options", "code"),
    [("--time=foo", 255), ("--mem=abc", 255), ("-n many", 255), ("-N 0", 255), ("--burst", 255), ("nonsense", 255), ("-H", 1), ("-a x", 1)],
)  # fmt: skip
def test_invalid_options_exit_with_the_code_of_slurm(stub, monkeypatch, tmp_path, options, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n#SBATCH {options}\ntrue\n")
    with pytest.raises(SystemExit) as ended:
        main(["sbatch", "job.sh"])
    assert ended.value.code == code
    assert not stub.sent("POST", "/api/v1/jobs")


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_an_unknown_command_is_refused(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code


@pytest.mark.parametrize("name", ["squeue", "scancel", "sacct", "scontrol", "sinfo", "srun", "sbatch"])
def test_unknown_options_are_refused(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option"])
    assert ended.value.code == (255 if name in ("srun", "sbatch") else 1)
    assert capsys.readouterr().err.startswith(f"{name}: ")


def test_srun_refuses_exclusive_outside_of_a_job(monkeypatch, capsys):
    monkeypatch.delenv("HODEI_JOB_ID", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["srun", "--exclusive", "true"])
    assert ended.value.code == 1
    assert "--exclusive" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_shim_has_help_and_version(name: str, capsys):
    for word, line_count in (("--version", 1), ("-V", 1), ("--help", 2), ("--usage", 2)):
        with pytest.raises(SystemExit) as ended:
            main([name, word])
        output = capsys.readouterr()
        assert (ended.value.code, output.err, output.out.count("\n")) == (0, "", line_count)
        assert output.out.startswith(f"{name} for Hodei ")


def test_an_impossible_action_is_reported_once_with_a_hint(stub, capsys):
    from unit.cli.stub import problem

    stub.on("GET", "/api/v1/jobs/3", {"job": job(3), "spec": {}, "runs": []})
    stub.on("POST", "/api/v1/jobs/3/hold", problem(409, "CONFLICT", "job 3 has ended", "hodei requeue 3"))
    with pytest.raises(SystemExit) as ended:
        main(["scontrol", "hold", "3"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "scontrol: error: job 3 has ended; next: hodei requeue 3\n"


def test_sinfo_shows_profiles_and_queues_as_partitions(stub, capsys):
    from unit.cli.stub import node

    info = {
        "version": "0",
        "api": "v1",
        "installation": "i",
        "address": "a",
        "epoch": 1,
        "started_at": "",
        "ready": True,
    }
    stub.on("GET", "/api/v1/info", info | {"profiles": ["default", "night"], "backends": ["local"], "jobs": {}})
    stub.on("GET", "/api/v1/nodes", {"nodes": [node("a"), node("b", labels={"slurm.hodei.io/queue": "gpu"})]})
    with pytest.raises(SystemExit):
        main(["sinfo", "-h", "-o", "%P %N"])
    assert capsys.readouterr().out == "default a\nnight a\ngpu b\n"
