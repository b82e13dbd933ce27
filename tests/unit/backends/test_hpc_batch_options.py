"""`#SBATCH` and `#PBS` lines: parsing, the rules for options in annotations, and whole scripts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from builders import a_job_spec, a_run
from hodei.backends.hpc.batch_options import SLURM_ANNOTATION as ANNOTATION
from hodei.backends.hpc.batch_options import (
    Option,
    PbsOptions,
    SlurmOptions,
    parse_options,
    parse_script,
    slurm_seconds,
    takes_next_argument,
)
from hodei.backends.hpc.convert import convert, slurm_memory
from hodei.backends.hpc.ports import Partition
from hodei.jobfile.parse import parse_job
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused

MAIN = Partition("main", ("n1",))


def options_of(line: str) -> list[tuple[str, str]]:
    options, problems = parse_options(line, "slurm")
    assert not problems
    return [(option.name, option.value) for option in options]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-c4", [("cpus-per-task", "4")]),
        ("-c 4 -N 2", [("cpus-per-task", "4"), ("nodes", "2")]),
        ("--mem=8G --time 1:00", [("mem", "8G"), ("time", "1:00")]),
        ("-J 'my job'", [("job-name", "my job")]),
        ('-J "a $(id) b"', [("job-name", "a $(id) b")]),
        ("--exclusive --nodes=1", [("exclusive", ""), ("nodes", "1")]),
        ("--exclusive=user", [("exclusive", "user")]),
        ("-Hv", [("hold", ""), ("verbose", "")]),
        ("#SBATCH -p main   # where", [("partition", "main")]),
        ("", []),
    ],
)
def test_options_are_parsed_like_slurm(line, expected):
    assert options_of(line) == expected


@pytest.mark.parametrize(
    "line", ["--part=main", "--no-such", "-Z 3", "job.sh", "-c", "--mem", "--hold=1", "-J 'open", "--"]
)
def test_an_invalid_option_is_reported_and_not_guessed(line):
    assert parse_options(line, "slurm")[1]


def test_option_lines_count_up_to_the_first_command():
    script = parse_script(
        "#!/bin/bash -l\n# a comment\n#SBATCH -c 2\n\n#SBATCH -N1\necho hi\n#SBATCH --uid=0\necho '#SBATCH -n9'\n"
    )
    assert script.options == (Option("cpus-per-task", "2", 3), Option("nodes", "1", 5))
    assert script.interpreter == "/bin/bash -l"
    assert script.problems == ()
    assert [str(note) for note in script.ignored] == ["line 7: it comes after the first command, so SBATCH ignores it"]
    assert "echo hi" in script.body


def test_a_line_of_another_system_is_a_comment():
    assert parse_script("#!/bin/sh\n#PBS -N x\n#SBATCH -c2\n", "slurm").options == (Option("cpus-per-task", "2", 3),)


@given(st.text())
def test_no_text_breaks_the_parser(text):
    parse_script(text)
    parse_script(f"#SBATCH {text}")
    parse_options(text, "pbs")


def an_order(*lines: str) -> Start:
    spec = a_job_spec("job", command=("true",), annotations={ANNOTATION: "\n".join(lines)})
    return Start(run=a_run(1), spec=spec, task=spec.tasks[0])


POLICY = {"fixed": {"account": "hodei"}, "allowed": {"account": ("physics",), "qos": ("long",), "reservation": ()}}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--constraint=fast --licenses=matlab", {"constraint": "fast", "licenses": "matlab"}),
        ("-A physics", {"account": "physics"}),
        ("--qos=long", {"qos": "long"}),
        ("-p main -N1 -n1", {}),
        ("--nice=10", {"nice": "10"}),
        ("-J evil -o /etc/passwd --time=999 --mem=1 --requeue", {}),
    ],
    ids=["allowed options", "an allowed account", "an allowed qos", "the placement that Hodei chose", "a nice value", "overridden"],
)  # fmt: skip
def test_options_are_allowed_or_overridden(line, expected):
    chosen = dict(SlurmOptions(placed=True, **POLICY).of(an_order(line), MAIN))
    assert chosen == {"account": "hodei", **expected}


@pytest.mark.parametrize(
    "line",
    [
        "--account=root", "--qos=high", "--reservation=maint", "--uid=0", "--gid=0", "--partition=gpu", "--export=ALL",
        "--export-file=/etc/shadow", "--get-user-env", "--chdir=/root", "-D /", "--dependency=afterok:1", "--array=1-9",
        "--nodelist=n2", "--exclude=n1", "--exclusive", "--wrap=id", "--hold", "--begin=now", "--clusters=all", "--nice=-5",
        "--priority=TOP", "--propagate", "--nodes=2", "--ntasks=8", "--nodefile=/x", "--bb=x", "--container=/x", "--mail-user=a@b",
        "--reboot", "--core-spec=2", "--part=gpu", "--uid", "--unknown-plugin-option=1", "--network=x", "--test-only",
    ],
)  # fmt: skip
def test_options_that_bypass_the_policy_are_refused(line):
    with pytest.raises(BackendRefused):
        SlurmOptions(placed=True, **POLICY).of(an_order(line), MAIN)


def test_a_job_may_name_nodes_where_slurm_chooses_them():
    options = SlurmOptions(placed=False, also=("my-spank",), **POLICY)
    assert dict(options.of(an_order("--nodelist=n2 --exclusive"), MAIN))["nodelist"] == "n2"


def test_a_refusal_names_the_option_and_the_alternative():
    with pytest.raises(BackendRefused) as refused:
        SlurmOptions(placed=True).of(an_order("--dependency=afterok:1"), MAIN)
    assert "--dependency=afterok:1" in refused.value.message
    assert "`after`" in refused.value.hint


def test_pbs_options_follow_the_same_rules():
    policy = PbsOptions(fixed={"account": "hodei"}, allowed={"account": ("physics",), "project": ()})

    def of(line: str):
        order = an_order()
        spec = structs.replace(order.spec, annotations={"pbs.hodei.io/options": line})
        return policy.of(structs.replace(order, spec=spec), Partition("workq"))

    assert of("#PBS -A physics -q workq -N x") == (("A", "physics"),)
    refused = (
        "-A root",
        "-q express",
        "-u root",
        "-W depend=afterok:1",
        "-V",
        "-v A=1",
        "-l select=9",
        "-P other",
        "-h",
    )
    for line in refused:
        with pytest.raises(BackendRefused):
            of(line)


def test_a_script_of_slurm_becomes_a_job_file():
    text = (
        "#!/bin/bash\n#SBATCH -J 'My Job' -c 4 --mem-per-cpu=2G\n#SBATCH --gres=gpu:a100:2,fpga:1 -t 1-02:00\n"
        "#SBATCH --array=0-9%3 --export=A=1,B=two --constraint=fast\necho $SLURM_ARRAY_TASK_ID\n"
    )
    document, notes = convert(text)
    assert document == {
        "name": "my-job", "command": ["/bin/bash", "-c", "echo $SLURM_ARRAY_TASK_ID"], "cpu": 4, "memory": "8Gi", "gpu": 2,
        "gpu_type": "a100", "resources": {"fpga": 1}, "timeout": "1560m", "array": {"indices": "0-9", "at_most": 3},
        "env": {"A": "1", "B": "two", "SLURM_JOB_NAME": "My Job"},
        "annotations": {ANNOTATION: "#SBATCH --constraint=fast", "slurm.hodei.io/variables": "true"},
    }  # fmt: skip
    assert notes == []
    assert parse_job(document, now_ms=0)


def test_a_script_of_pbs_becomes_a_job_file():
    text = "#!/bin/bash\n#PBS -N hello -l select=2:ncpus=2:mem=500mb:ngpus=1 -l walltime=00:05:00\n#PBS -m abe -V\nsleep 1\n"
    document, notes = convert(text)
    assert document == {
        "name": "hello", "command": ["/bin/bash", "-c", "sleep 1"], "count": 2, "cpu": 2, "memory": "500Mi", "gpu": 1,
        "timeout": "5m",
    }  # fmt: skip
    assert [note.split(":")[0] for note in notes] == ["line 3", "line 3", "it has 2 tasks"]
    assert parse_job(document, now_ms=0)


def test_unsupported_options_are_named_with_their_line():
    _, notes = convert("#SBATCH --burst\n#SBATCH --bb=x\n#SBATCH -d afterok:12\nsrun x\n")
    assert "line 1: there is no option --burst" in notes
    assert any(note.startswith("line 2: --bb x") for note in notes)
    assert any("after: {succeeded: [...]}" in note for note in notes)
    assert any("srun" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 1800), ("1:30", 90), ("01:00:00", 3600), ("2-0", 172800), ("1-02:30:05", 95405), ("UNLIMITED", 0), ("x", None)],
)  # fmt: skip
def test_time_formats_of_slurm(text, expected):
    assert slurm_seconds(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("500", "500Mi"), ("8G", "8Gi"), ("4gb", "4Gi"), ("0", ""), ("x", "")])
def test_memory_formats_of_slurm(text, expected):
    assert slurm_memory(text) == expected


@pytest.mark.parametrize(
    ("argument", "expected"), [("-c", True), ("-c4", False), ("--mem", True), ("--mem=1", False), ("-H", False), ("--hold", False)]
)  # fmt: skip
def test_options_with_a_separate_value_take_the_next_argument(argument, expected):
    assert takes_next_argument(argument) == expected
