"""Arguments and variables of users reach their programs unchanged, and no shell interprets them.

A program prints its arguments and its environment; a canary file that half of the arguments try to create must not exist. Ten
thousand arguments pass through the script and a real bash, dozens through a real sbatch.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent_host import ReconnectingRecorder, an_order
from hodei.backends.hpc.script import batch_script, quoted
from hodei.backends.hpc.submission import job_name
from hpc_backends import a_slurm
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.real, pytest.mark.slow]
PER_SCRIPT = 250
SCRIPTS = 40  # with PER_SCRIPT arguments each: ten thousand
LISTS = settings(max_examples=SCRIPTS, deadline=None, suppress_health_check=list(HealthCheck))

PRINT_ARGS = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
PRINT_ALL = (
    "import os, sys; pairs = [k + b'=' + v for k, v in sorted(os.environb.items()) if k.startswith(b'U_')]; "
    "sys.stdout.buffer.write(b'\\0'.join([os.fsencode(os.getcwd()), *map(os.fsencode, sys.argv[1:]), *pairs]))"
)


def hostile(canary: Path) -> st.SearchStrategy[str]:
    """Any text, and text that creates the canary if a shell interprets it."""
    attacks = [
        f"$(touch {canary})", f"`touch {canary}`", f"; touch {canary} #", f"' ; touch {canary} ; '", f'" ; touch {canary} ; "',
        f"\n touch {canary}\n", f"\r\ntouch {canary}\r\n", f"\\'; touch {canary}; \\'", f"$'\\n'touch {canary}", f"| touch {canary}",
        f"\n#SBATCH --wrap='touch {canary}'\n", f"%s{canary}%n", f"${{IFS}};touch${{IFS}}{canary}", f"&& touch {canary}",
        f">{canary}", f"<(touch {canary})", "!!", "~root", "*", "-n", "--", "", "\\", "'", '"', "\x7f\x01", "é", "日本語", "\u2028",
    ]  # fmt: skip
    plain = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)
    return st.one_of(
        plain, st.sampled_from(attacks), st.builds(lambda a, b, c: a + b + c, plain, st.sampled_from(attacks), plain)
    )


def test_ten_thousand_arguments_pass_through_bash_unchanged(tmp_path):
    canary = tmp_path / "canary"
    count = 0

    @LISTS
    @given(st.lists(hostile(canary), min_size=PER_SCRIPT, max_size=PER_SCRIPT))
    def each(args):
        nonlocal count
        script = "exec " + " ".join(map(quoted, (sys.executable, "-IS", "-c", PRINT_ARGS, *args)))
        done = subprocess.run(["/bin/bash", "-p"], input=script.encode(), capture_output=True, timeout=60, check=True)
        assert done.stdout.split(b"\0") == [arg.encode() for arg in args]
        count += len(args)

    each()
    assert count >= PER_SCRIPT * SCRIPTS
    assert not canary.exists()


def test_commands_environments_and_directories_pass_through_the_whole_script(tmp_path):
    canary = tmp_path / "canary"

    @LISTS
    @given(
        st.lists(hostile(canary), max_size=40),
        st.lists(hostile(canary), min_size=1, max_size=40),
        st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=30),
    )
    def each(args, values, name):
        if name in (".", "..") or len(name.encode()) > 200:
            return
        workdir = tmp_path / "workdirs" / name
        workdir.mkdir(parents=True, exist_ok=True)
        env = {f"U_{number:03}": value for number, value in enumerate(values)}
        script = batch_script(
            files=str(tmp_path / "run"), argv=(sys.executable, "-IS", "-c", PRINT_ALL, *args), env=env, workdir=str(workdir),
            claim="c", rerun=True, job_variable="SLURM_JOB_ID", node_variable="SLURMD_NODENAME",
        )  # fmt: skip
        lines = script.split("\n")
        assert not any(line.startswith("#") for line in lines[1:]), "a line may be parsed as an option"
        assert "\r" not in script
        done = subprocess.run(["/bin/bash", "-p"], input=script.encode(), capture_output=True, timeout=60, check=True)
        expected = [str(workdir), *args, *(f"{key}={value}" for key, value in env.items())]
        assert done.stdout.split(b"\0") == [arg.encode() for arg in expected]

    each()
    assert not canary.exists()


def test_dozens_of_arguments_pass_through_a_real_sbatch_in_every_field(own_slurm: SlurmCluster, tmp_path):
    canary = tmp_path / "canary"
    program = tmp_path / "show.py"
    program.write_text(PRINT_ALL)
    examples = []

    @settings(max_examples=36, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(hostile(canary), min_size=1, max_size=20),
        st.lists(hostile(canary), min_size=1, max_size=5),
        hostile(canary),
    )
    def gather(args, values, name):
        examples.append((args, values, name))

    gather()

    async def scenario(transport: str) -> None:
        backend = a_slurm(own_slurm, tmp_path / transport, "placed", transport)
        await backend.open()
        recorder = ReconnectingRecorder(backend, 120)
        orders = []
        for number, (args, values, name) in enumerate(examples, 1):
            env = {f"U_{index}": value for index, value in enumerate(values)}
            order = an_order(number, sys.executable, "-IS", str(program), *args, env=env, workdir=str(tmp_path))
            spec = structs.replace(order.spec, name=name, project=name, annotations={name: name})
            run = structs.replace(order.run, node="hpc-n3", backend="hpc")
            orders.append(structs.replace(order, run=run, spec=spec))
        ends = await recorder.run(*orders)
        assert {end.exit_code for end in ends} == {0}
        for order, (args, values, _) in zip(orders, examples, strict=True):
            expected = [str(tmp_path), *args, *(f"U_{index}={value}" for index, value in enumerate(values))]
            assert (await recorder.log(order.run.id)).split(b"\0") == [arg.encode() for arg in expected]
        await backend.close()

    for transport in ("commands", "rest"):
        asyncio.run(scenario(transport))
    assert not canary.exists()


@given(st.text())
def test_names_of_jobs_are_printable_and_never_empty(name):
    shown = job_name(name)
    assert shown
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 100
