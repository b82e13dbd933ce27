"""Conversion of batch scripts: sizes, files, dependencies, variables. `real/slurm/test_shims` compares with real sbatch."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from hodei.backends.hpc.batch_options import Option, file_name, redirections
from hodei.backends.hpc.convert import Dependencies, SbatchCall, convert, parse_dependencies
from hodei.jobfile.parse import parse_job
from hodei.model.errors import InvalidInput


def document_of(options: str, body: str = "./work", **fields: Any) -> dict[str, Any]:
    document, _ = convert(f"#!/bin/bash\n#SBATCH {options}\n{body}\n", "job.sh", **fields)
    assert parse_job(document, now_ms=0)
    return document


def a_call(**fields: Any) -> SbatchCall:
    return SbatchCall(**{"env": {}, "jobs": lambda text: [int(text)], **fields})


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("-c 4", {"cpu": 4}),
        ("-n 4 -c 2", {"cpu": 8}),
        ("-N 1 -n 4 --mem=8G", {"cpu": 4, "memory": "8Gi"}),
        ("--ntasks-per-node=16", {"cpu": 16}),
        ("-N 4 --ntasks-per-node=16", {"count": 4, "cpu": 16}),
        ("-N 4 --ntasks-per-node=16 -c 2 --mem=32G", {"count": 4, "cpu": 32, "memory": "32Gi"}),
        ("-n 64 --ntasks-per-node=16", {"count": 4, "cpu": 16}),
        ("-N 2", {"count": 2}),
        ("-N 2-4 -n 6", {"count": 2, "cpu": 3}),
        ("-N 2 -n 5", {"count": 2, "cpu": 3}),
        ("-n 4 --mem-per-cpu=2G", {"cpu": 4, "memory": "8Gi"}),
        ("--gpus=2 --cpus-per-gpu=4 --mem-per-gpu=10G", {"gpu": 2, "cpu": 8, "memory": "20Gi"}),
        ("-n 2 --gpus-per-task=a100:2", {"gpu": 4, "gpu_type": "a100", "cpu": 2}),
        ("-N 2 --ntasks-per-node=4 --gpus-per-node=4", {"count": 2, "cpu": 4, "gpu": 4}),
        ("-N 2 --ntasks-per-node=4 --gpus-per-node=2", {"count": 2, "cpu": 4, "gpu": 2}),
        ("-N 2 -n 4 -G 8", {"count": 2, "cpu": 2, "gpu": 4}),
        ("-N 2 --gpus-per-task=1 --cpus-per-gpu=3", {"count": 2, "gpu": 1, "cpu": 3}),
    ],
)
def test_requests_are_those_of_one_member(options, sizes):
    document = document_of(options)
    keys = ("count", "cpu", "memory", "gpu", "gpu_type")
    assert {key: document[key] for key in keys if key in document} == sizes


def test_a_script_runs_once_on_every_node():
    single = document_of("-n 4 -c 2")
    assert single["env"] == {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"}
    assert "job_anti_affinity" not in single
    several = document_of("-N 4 --ntasks-per-node=16")
    assert several["env"] == {"SLURM_NTASKS": "64", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "16"}


def test_members_of_a_job_on_several_nodes_have_anti_affinity_to_each_other_only():
    first = document_of("-N 2 -p a,b", call=a_call(token="one"))
    assert first["labels"] == {"slurm.hodei.io/apart": "one"}
    assert first["job_anti_affinity"]["required"] == [{"match": "slurm.hodei.io/apart=one", "topology": "host"}]
    # Hodei does not know the machines of a delegated partition.
    assert first["affinity"]["required"] == ["slurm.hodei.io/queue in (a, b), !hodei.io/delegated"]
    assert document_of("-N 2", call=a_call(token="two"))["labels"] != first["labels"]
    assert document_of("-N 2")["labels"] == document_of("-N 2")["labels"]


def test_a_job_has_the_name_of_its_script_like_in_slurm():
    document = document_of("-o %x.out")
    assert document["name"] == "job.sh"
    assert "job.sh.out" in document["command"][2].replace("'", "")
    other, _ = convert("#!/bin/sh\n#SBATCH -c 1\ntrue\n", "dir/My Train.sh")
    assert (other["name"], other["env"]["SLURM_JOB_NAME"]) == ("my-train.sh", "My Train.sh")


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--array=5-12", "array", "5-12"),
        ("--array=1,3,7-9:2%2", "array", {"indices": "1,3,7-9:2", "at_most": 2}),
        ("-a 4", "array", "4"),
        ("--array=[1-3]", "array", "1-3"),
        ("--array=[1-3]%2", "array", {"indices": "1-3", "at_most": 2}),
        ("--array=1-3%", "array", "1-3"),
        ("--array=1-4:2,7", "array", "1-4:2,7"),
        ("-p main,high", "affinity", {"required": ["slurm.hodei.io/queue in (main, high)"]}),
        ("-p main", "node_selector", {"slurm.hodei.io/queue": "main"}),
        ("-D /data/x", "workdir", "/data/x"),
        ("-t 1-02:30", "timeout", "1590m"),
        ("-A physics", "project", "physics"),
    ],
)  # fmt: skip
def test_options_become_keys(option, key, value):
    assert document_of(option)[key] == value


@pytest.mark.parametrize("value", ["-1", "0", "UNLIMITED", "infinite"])
def test_an_unlimited_time_is_no_timeout(value):
    assert "timeout" not in document_of(f"--time={value}", call=a_call())


def test_a_job_runs_where_it_was_submitted():
    assert document_of("-c 1", directory="/home/ada/run")["workdir"] == "/home/ada/run"
    elsewhere = document_of("-D sub", directory="/home/ada/run")
    assert elsewhere["workdir"] == "/home/ada/run/sub"
    assert elsewhere["env"]["SLURM_SUBMIT_DIR"] == "/home/ada/run"


@pytest.mark.parametrize("text", ["#SBATCH -n 1\n#SBATCH hetjob\n#SBATCH -n 2\nx\n", "#SBATCH packjob\nx\n"])
def test_a_heterogeneous_job_is_refused_with_its_line(text):
    with pytest.raises(InvalidInput, match=r"line \d: a heterogeneous job"):
        convert(f"#!/bin/sh\n{text}")


@pytest.mark.parametrize("options", ["-t x", "--mem=lots", "-a x", "-n many", "-N 0", "-d aftercorr:3", "-d singleton", "-H", "-b now", "--exclusive", "--exclusive=user", "--mem=0"])  # fmt: skip
def test_invalid_options_are_left_out_of_a_file_and_refused_at_submission(options):
    text = f"#!/bin/sh\n#SBATCH {options}\nx\n"
    _, notes = convert(text)
    assert any(note.startswith("line 2: --") for note in notes)
    with pytest.raises(InvalidInput, match="line 2: --"):
        convert(text, call=a_call())


def test_options_of_the_command_line_take_precedence():
    call = a_call(options=(Option("time", "5"), Option("job-name", "own")))
    document = document_of("-t 60 -J other", call=call)
    assert (document["timeout"], document["name"]) == ("5m", "own")


def test_unknown_options_are_refused_at_submission():
    with pytest.raises(InvalidInput, match="no option --burst"):
        convert("#!/bin/sh\n#SBATCH --burst\nx\n", call=a_call())
    convert("#!/bin/sh\nx\n#SBATCH --burst\n", call=a_call())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("afterok:12:13", Dependencies({"succeeded": ["12", "13"]})),
        ("afterok:12,afterany:3_4", Dependencies({"succeeded": ["12"], "completed": ["3_4"]})),
        ("afternotok:1?afterok:2", Dependencies({"failed": ["1"], "succeeded": ["2"]}, any=True)),
        ("7", Dependencies({"completed": ["7"]})),
    ],
)
def test_dependencies_are_parsed(text, expected):
    assert parse_dependencies(text) == expected


@pytest.mark.parametrize("text", ["afterok", "afterok:", "afterok:x", "after:3", "aftercorr:3", "singleton", "", "afterok:1,2?3"])  # fmt: skip
def test_unsupported_dependencies_are_reported(text):
    with pytest.raises(InvalidInput):
        parse_dependencies(text)


def test_dependencies_of_a_submission_are_resolved_to_jobs_of_hodei():
    call = a_call(jobs=lambda text: [int(text), int(text) + 1])
    assert document_of("-d afterok:12", call=call)["after"] == {"succeeded": [12, 13]}
    assert document_of("-d 'afterok:12?afterany:20'", call=call)["after"]["need"] == 1


ENV = {"PATH": "/bin", "MY": "a b", "HODEI_TOKEN": "hidden", "SLURM_JOB_ID": "3", "PWD": "/x", "odd.name": "1"}


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("-c 1", {"PATH": "/bin", "MY": "a b"}),
        ("--export=ALL,X=1", {"PATH": "/bin", "MY": "a b", "X": "1"}),
        ("--export=MY,X=1", {"MY": "a b", "X": "1"}),
        ("--export=NONE", {}),
        ("--export=X=1", {"X": "1"}),
    ],
)
def test_a_submission_exports_the_variables_that_sbatch_exports(option, expected):
    assert document_of(option, call=a_call(env=ENV)).get("env", {}) == expected


def test_arguments_reach_the_script():
    call = a_call(arguments=("a", "b c"))
    command = document_of("-c 1 -o /dev/stdout", body='echo "$0" "$@"', call=call)["command"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout == "job.sh a b c\n"
    document, _ = convert("#!/usr/bin/env python3\nimport sys; print(sys.argv[1:])\n", call=call)
    assert document["command"][4:7] == ["/usr/bin/env", "python3", "-c"]
    assert document["command"][-2:] == ["a", "b c"]


RUN = {
    "HODEI_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_USER": "ada", "PATH": "/usr/bin:/bin", "SLURM_PROCID": "2",
}  # fmt: skip
ELEMENT = RUN | {"HODEI_JOB_ID": "22", "HODEI_ARRAY_JOB": "8", "HODEI_ARRAY_INDEX": "13"}


@pytest.mark.parametrize(
    ("pattern", "env", "name"),
    [
        ("slurm-%j.out", RUN, "slurm-7.out"),
        ("o_%j_%A_%a_%x_%N_%u_%n_%t_%s_%J_%%_%5j", RUN, "o_7_7_4294967294_my job_n1_ada_0_2_batch_7_%_00007"),
        ("o_%A_%a_%4a_%j_%b", ELEMENT, "o_8_13_0013_22_3"),
        ("%z %", RUN, "%z %"),
        ("$(id) `id` '\"; x", RUN, "$(id) `id` '\"; x"),
        (r"\%j.out", RUN, "%j.out"),
    ],
)
def test_patterns_are_expanded_like_in_slurm(pattern, env, name):
    done = subprocess.run(
        ["/bin/sh", "-c", f"printf %s {file_name(pattern, 'my job')}"], env=env, capture_output=True, text=True, timeout=30, check=True
    )  # fmt: skip
    assert done.stdout == name


def test_streams_are_redirected_to_their_files(tmp_path):
    for append, output in ((False, "hi\n"), (True, "hi\nhi\n")):
        shell_code = redirections(f"{tmp_path}/o-%j", f"{tmp_path}/e", "", append=append, name="x")
        subprocess.run(["/bin/sh", "-c", f"{shell_code}; echo hi; echo err >&2"], env=RUN, check=True, timeout=30)
        assert (tmp_path / "o-7").read_text() == output
    assert redirections("out", "", "in", append=False, name="x") == "exec >out 2>&1 <in"
    assert redirections("", "", "", append=False, name="x") == ""


def test_output_is_redirected_by_default_only_at_submission():
    assert document_of("-c 1")["command"][0] == "/bin/bash"
    assert "-%j.out" not in str(document_of("-o x-%j.out")["command"])
    assert 'slurm-"$HODEI_JOB_ID".out' in document_of("-c 1", call=a_call())["command"][2]
    assert "${HODEI_ARRAY_INDEX" in document_of("-a 1-3", call=a_call())["command"][2]


@pytest.mark.parametrize(
    ("body", "value"),
    [("srun ./a", "steps"), ("time mpirun ./a", "steps"), ("echo srun-like", "true"), ("# srun ./a", "true"), ("x && srun a", "steps")],
)  # fmt: skip
def test_a_script_that_calls_srun_keeps_the_job_id_of_slurm(body, value):
    assert document_of("-n 2", body=body)["annotations"]["slurm.hodei.io/variables"] == value


def test_a_text_that_is_not_a_batch_script_is_refused():
    with pytest.raises(InvalidInput, match="not a batch script"):
        convert("# A project\n\nWords.\n", "README.md")
    assert convert("#SBATCH -c 2\ntrue\n")[0]["cpu"] == 2
    assert convert("#!/bin/sh\ntrue\n")[0]["name"] == "job"


def test_a_note_has_the_ignored_option_before_the_hint():
    _, notes = convert("#!/bin/sh\n#SBATCH --exclusive\nhostname\n")
    assert notes[0] == (
        "line 2: --exclusive is not supported and was left out; next: request the cores and the memory of a whole node"
    )
