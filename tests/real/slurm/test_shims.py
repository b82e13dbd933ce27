"""The same scripts with a real sbatch and with the shims, on the local backend and on a Slurm backend: same variables, same
files, same output. Job ids and node names differ and are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from real.installation import Installation
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.slow]
# Variables with equal values in both. Slurm sets SLURM_NTASKS and SLURM_CPUS_PER_TASK only if requested.
SAME = (
    "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP",
    "SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_LOCALID",
    "SLURM_NNODES", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST",
    "SLURM_TASKS_PER_NODE", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_USER",
)  # fmt: skip
PRINT_VARIABLES = "env | grep ^SLURM | sort"


class SlurmAndShims:
    """The real commands with the cluster's configuration, and the shims with the server's."""

    def __init__(self, cluster: SlurmCluster, installation: Installation, folder: Path) -> None:
        self._cluster, self._installation, self.folder = cluster, installation, folder
        self.bin = folder / "bin"
        assert installation.hodei("slurm-shims", str(self.bin)).code == 0

    def real(self, name: str, *args: str) -> subprocess.CompletedProcess[str]:
        return self._call([name, *args], {**os.environ, **self._cluster.env}, "real")

    def shim(self, name: str, *args: str) -> subprocess.CompletedProcess[str]:
        env = self._installation.env({"PATH": f"{self.bin}:{os.environ['PATH']}"})
        return self._call([str(self.bin / name), *args], env, "shim")

    def _call(self, args: list[str], env: dict[str, str], system: str) -> subprocess.CompletedProcess[str]:
        # Directories of equal name and length, so that outputs with them can be compared.
        work = self.folder / system / "work"
        work.mkdir(parents=True, exist_ok=True)
        return subprocess.run(args, cwd=work, env=env, capture_output=True, text=True, timeout=120, check=False)

    def outputs(self, system: str, id: str, times: int) -> dict[str, str]:
        """The files of the directory, with its name and the job's id (`times` times in a file name) replaced."""
        work = self.folder / system / "work"
        number = re.compile(rf"(?<=[_-]){id}(?=[_.])")
        return {
            number.sub("N", path.name, times): path.read_text().replace(str(work), "WORK") for path in work.iterdir()
        }


@pytest.fixture(scope="module", params=["this machine", "slurm"])
def both(request, own_slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("both")
    folder.chmod(0o755)
    installation = Installation(folder / "server" / "home")
    installation.home.parent.mkdir()
    nodes = "".join(f'[[nodes]]\nname = "{name}"\ncpu = "16"\nmemory = "16Gi"\n' for name in ("n1", "n2"))
    if request.param == "slurm":
        nodes = (
            '[backends.local]\nkind = "local"\nenabled = false\n[backends.hpc]\nkind = "slurm"\nmode = "placed"\npoll = "100ms"\n'
            f'partitions = ["main"]\noutput = "{folder / "output"}"\nconf = "{own_slurm.conf}"\n'
        )
    installation.configure(nodes)
    try:
        yield installation.up()
    finally:
        installation.close()
        own_slurm.clear()


@pytest.fixture
def pair(both: Installation, own_slurm: SlurmCluster, tmp_path: Path) -> SlurmAndShims:
    return SlurmAndShims(own_slurm, both, tmp_path)


def run_with_both(
    pair: SlurmAndShims, *args: str, script: str = "", times: int = 1
) -> tuple[dict[str, str], dict[str, str]]:
    """The files written with Slurm and with the shims."""
    out = []
    for system, call in (("real", pair.real), ("shim", pair.shim)):
        work = pair.folder / system / "work"
        work.mkdir(parents=True, exist_ok=True)
        if script:
            (work / "job.sh").write_text(script)
        done = call("sbatch", "--parsable", "-W", *args)
        assert done.returncode == 0, done
        out.append(pair.outputs(system, done.stdout.strip(), times))
    return out[0], out[1]


def variables(files: dict[str, str]) -> list[dict[str, str]]:
    """`SLURM_*` of every file, in order of their names."""
    found = []
    for name in sorted(files):
        pairs = dict(line.partition("=")[::2] for line in files[name].splitlines() if line.startswith("SLURM"))
        if pairs:
            found.append(pairs)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ["-J", "My Job", "-c", "2", "--mem=100M", "-t", "5"],
        ["-N", "1", "-n", "3", "-c", "2", "--mem=100M"],
        ["-N", "1", "--ntasks-per-node=2", "--mem-per-cpu=20M"],
        ["-J", "steps", "-a", "5-12:3", "-c", "1", "--mem=50M"],
        ["-J", "list", "-a", "1,3,7-9%2", "-n", "1", "--mem=50M"],
    ],
    ids=["one task", "three tasks on one node", "two tasks per node", "an array with a step", "an array by a list"],
)
def test_scripts_get_the_same_variables(pair, options):
    real, shim = run_with_both(pair, *options, "--wrap", PRINT_VARIABLES)
    assert set(real) == set(shim)
    of_slurm, of_shims = variables(real), variables(shim)
    assert len(of_slurm) == len(of_shims) == len(real)
    for expected, actual in zip(of_slurm, of_shims, strict=True):
        names = [name for name in SAME if name in expected]
        assert {name: actual.get(name) for name in names} == {name: expected[name] for name in names}
        if "SLURM_ARRAY_TASK_ID" not in expected:
            assert not [name for name in actual if name.startswith("SLURM_ARRAY")]


SCRIPT = """#!/bin/bash
#SBATCH --job-name=pat
#SBATCH -o o_%j_%A_%a_%x_%u_%n_%t_%s_%%_%5x.txt
#SBATCH --error=e_%j.txt
echo "args: $1 $2"; pwd; echo "$SLURM_SUBMIT_DIR"; echo "$EXPORTED"; echo err >&2
"""


def test_files_arguments_and_directories_are_the_same(pair):
    real, shim = run_with_both(
        pair, "--mem=50M", "--export=ALL,EXPORTED=yes", "job.sh", "a", "b c", script=SCRIPT, times=2
    )
    assert real == shim
    assert any("args: a b c\nWORK\nWORK\nyes\n" in text for text in real.values())


def test_elements_write_the_same_files(pair):
    real, shim = run_with_both(
        pair, "--mem=50M", "-a", "3,10", "-o", "o_%A_%a_%4a", "--wrap", "echo $SLURM_ARRAY_TASK_ID"
    )
    assert real == shim == {"o_N_3_0003": "3\n", "o_N_10_0010": "10\n"}


def test_srun_starts_the_same_tasks(pair):
    body = "echo once; srun sh -c 'echo $SLURM_PROCID/$SLURM_NTASKS' | sort; srun -n 1 sh -c 'exit 3'; echo $?"
    real, shim = run_with_both(pair, "-N1", "-n", "3", "--mem=60M", "-e", "/dev/null", "--wrap", body)
    assert real == shim == {"slurm-N.out": "once\n0/3\n1/3\n2/3\n3\n"}


def test_tasks_on_several_nodes_are_the_same(pair):
    """With the shims every node runs the whole script, so the script is only the srun."""
    body = "srun sh -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_NTASKS $SLURM_NNODES'"
    real, shim = run_with_both(pair, "-N2", "--ntasks-per-node=2", "--mem=60M", "-o", "out", "--wrap", body)
    assert sorted(real["out"].splitlines()) == sorted(shim["out"].splitlines())
    assert len(real["out"].splitlines()) == 4


def same_codes_and_outputs(pair: SlurmAndShims, args: list[str]) -> None:
    real, shim = pair.real(*args), pair.shim(*args)
    assert shim.returncode == real.returncode, (real, shim)
    numbers = re.compile(r"\d+")
    assert numbers.sub("N", shim.stdout) == numbers.sub("N", real.stdout)


@pytest.mark.parametrize("script", ["echo hi; exit 3", "kill -9 $$"])
def test_exit_codes_of_jobs_are_the_same(pair, script):
    same_codes_and_outputs(pair, ["srun", "--mem=50M", "sh", "-c", script])
    same_codes_and_outputs(pair, ["sbatch", "-W", "--mem=50M", "--wrap", "exit 3"])


@pytest.mark.parametrize("both", ["this machine"], indirect=True)
@pytest.mark.parametrize(
    "args",
    [
        ["sbatch", "--no-such", "--wrap", "true"], ["sbatch", "nofile.sh"], ["sbatch", "-a", "3-1", "--wrap", "true"],
        ["sbatch", "-Q", "--wrap", "true"], ["squeue", "-j", "99999"], ["squeue", "--no-such"],
        ["squeue", "-h", "-n", "no-such-name"], ["scancel", "99999"], ["scancel", "abc"], ["scancel"],
        ["scontrol", "show", "job", "99999"], ["scontrol", "hold", "99999"], ["srun", "--no-such", "true"], ["srun"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_exit_codes_and_outputs_are_the_same(pair, args):
    same_codes_and_outputs(pair, args)


def test_columns_of_squeue_and_sinfo_are_the_same(pair):
    for args in (
        ["squeue"],
        ["squeue", "-o", "%i|%P|%j|%u|%t|%T|%M|%l|%D|%R|%C|%m|%a|%A|%F|%K|%r|%N|%S|%V|%e|%L|%Q|%q|%Z"],
        ["sinfo"],
    ):
        assert pair.shim(*args).stdout.splitlines()[0] == pair.real(*args).stdout.splitlines()[0]
    assert pair.shim("squeue", "-l").stdout.splitlines()[1] == pair.real("squeue", "-l").stdout.splitlines()[1]


def test_fields_of_scontrol_are_those_of_slurm(pair):
    shown = []
    for call in (pair.real, pair.shim):
        id = call(
            "sbatch", "--parsable", "-W", "-J", "shown", "-t", "3", "--mem=50M", "--wrap", "exit 3"
        ).stdout.strip()
        text = call("scontrol", "-o", "show", "job", id).stdout
        shown.append(dict(re.findall(r"(\S+?)=(\S*)", text)))
    real, shim = shown
    assert set(shim) <= set(real)
    same_fields = (
        "JobName",
        "JobState",
        "Reason",
        "ExitCode",
        "TimeLimit",
        "NumNodes",
        "NumCPUs",
        "NumTasks",
        "BatchFlag",
        "Dependency",
    )
    assert {name: shim[name] for name in same_fields} == {name: real[name] for name in same_fields}
