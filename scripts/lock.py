"""lock.py: write requirements-dev.lock, every version and hash of the development environment.

pip-tools runs in its own environment, so that it is not part of the locked one.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-dev.lock"


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python = Path(place) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "pip-tools>=7.5"], check=True)
        command = [python, "-m", "piptools", "compile", "--quiet", "--generate-hashes", "--strip-extras"]
        command += ["--extra=dev", "--allow-unsafe", "--no-header", "--no-annotate", "--upgrade"]
        # No address of an index goes into the lock: each machine uses its own.
        command += ["--no-emit-index-url", "--no-emit-trusted-host", "--no-emit-find-links", "--no-emit-options"]
        subprocess.run([*command, f"--output-file={LOCK}", "pyproject.toml"], cwd=ROOT, check=True)
    lock = ROOT / LOCK
    # The extra `dev` names Hodei itself, which comes from this folder and has no hash.
    pinned = re.sub(r"(?m)^(?:#.*\n)*hodei @ .*\n", "", lock.read_text())
    lock.write_text("# Written by `make lock`; used by `make venv LOCKED=1`.\n" + pinned)
    print(f"{LOCK}: {pinned.count('==')} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
