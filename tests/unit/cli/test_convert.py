"""`hodei convert` and Slurm's commands for people's fingers, without a server."""

from __future__ import annotations

import pytest

from hodei.cli import shims
from hodei.wire.document import parse_job
from hodei.wire.yamlfile import load_yaml

SCRIPT = "#!/bin/bash\n#SBATCH -J sweep -c 4 --mem=8G\n#SBATCH --mail-type=END\nset -e\n./sweep\n"


def test_a_script_is_printed_as_a_job_file_that_a_server_takes(hodei, tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text(SCRIPT)
    done = hodei("convert", str(path))
    (document,) = load_yaml(done.stdout, name="stdout")
    assert parse_job(document, now_ms=0)
    assert document["command"] == ["/bin/bash", "-c", "set -e\n./sweep"]
    assert "--mail-type END was left out" in done.stderr


def test_strict_makes_an_error_of_what_was_left_out(hodei):
    assert hodei("convert", "-", "--strict", input=SCRIPT).exit_code == 1
    assert hodei("convert", "-", input=SCRIPT).exit_code == 0


def test_a_file_that_is_no_text_is_said_to_be_none(hodei, tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert hodei("convert", str(tmp_path / "x")).exit_code == 2


def test_the_commands_for_fingers_are_written_and_nothing_else_is_overwritten(hodei, tmp_path):
    place = tmp_path / "bin"
    assert hodei("slurm-shims", str(place)).exit_code == 0
    assert sorted(path.name for path in place.iterdir()) == ["sbatch", "scancel", "sinfo", "squeue"]
    assert hodei("slurm-shims", str(place)).exit_code == 0
    (place / "sbatch").write_text("#!/bin/sh\necho the real one\n")
    assert hodei("slurm-shims", str(place)).exit_code == 2


@pytest.mark.parametrize(
    ("do", "words", "command"),
    [
        (shims.squeue, ["-u", "ada"], ["jobs", "--user", "ada"]),
        (shims.squeue, [], ["jobs"]),
        (shims.scancel, ["7", "8"], ["cancel", "7", "8"]),
        (shims.sinfo, ["-N"], ["nodes"]),
    ],
)
def test_they_become_commands_of_hodei(do, words, command):
    assert do(words) == command


@pytest.mark.parametrize(
    ("do", "words"), [(shims.squeue, ["--start"]), (shims.scancel, ["-u", "ada"]), (shims.sinfo, ["-p", "main"]), (shims.sbatch, [])]
)  # fmt: skip
def test_what_they_do_not_know_is_refused(do, words):
    with pytest.raises(SystemExit):
        do(words)
