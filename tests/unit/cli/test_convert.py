"""`hodei convert` and `hodei slurm-shims`, without a server. The commands themselves are in `test_shims`."""

from __future__ import annotations

import json
import os

from hodei.cli.convert import SHIMS
from hodei.jobfile.parse import parse_job
from hodei.jobfile.yaml_reader import load_yaml

SCRIPT = "#!/bin/bash\n#SBATCH -J sweep -c 4 --mem=8G\n#SBATCH --mail-type=END\nset -e\n./sweep\n"


def test_a_script_is_printed_as_a_valid_job_file(hodei, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(SCRIPT)
    done = hodei("convert", str(path))
    (document,) = load_yaml(done.stdout, name="stdout")
    assert parse_job(document, now_ms=0)
    assert document["command"] == ["/bin/bash", "-c", "set -e\n./sweep"]
    assert document["workdir"] == os.getcwd()
    assert "--mail-type END was left out" in done.stderr


def test_a_script_is_converted_to_json_too(hodei):
    document = json.loads(hodei("convert", "-", "-o", "json", input=SCRIPT).stdout)
    assert document["name"] == "sweep"


def test_strict_makes_an_ignored_option_an_error(hodei):
    assert hodei("convert", "-", "--strict", input=SCRIPT).exit_code == 1
    assert hodei("convert", "-", input=SCRIPT).exit_code == 0


def test_a_binary_file_is_refused(hodei, tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert hodei("convert", str(tmp_path / "x")).exit_code == 2


def test_shims_are_written_and_other_files_are_not_overwritten(hodei, tmp_path):
    directory = tmp_path / "bin"
    assert hodei("slurm-shims", str(directory)).exit_code == 0
    assert sorted(path.name for path in directory.iterdir()) == sorted(SHIMS)
    assert hodei("slurm-shims", str(directory)).exit_code == 0
    (directory / "sbatch").write_text("#!/bin/sh\necho the real one\n")
    assert hodei("slurm-shims", str(directory)).exit_code == 2


def test_a_heterogeneous_job_is_refused(hodei):
    done = hodei("convert", "-", input="#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2\ntrue\n")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "line 3: a heterogeneous job" in done.stderr


def test_notes_are_in_the_order_of_the_script(hodei):
    script = "#!/bin/sh\n#SBATCH --mail-type=END\n#SBATCH --nonsense\n#SBATCH --partition=a\n#SBATCH --mail-user=x\ntrue $PBS_JOBID\n"
    lines = hodei("convert", "-", input=script).stderr.splitlines()
    assert [line.split()[2] for line in lines[:4]] == ["2:", "3:", "4:", "5:"]
    assert lines[4].startswith("note: the script uses PBS_JOBID")
