"""lock.py: write requirements-dev.lock, every version and hash of the development environment.

uv resolves, in an environment of its own, so that it adds nothing to the one that it locks.
"""

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
        subprocess.run([f"{place}/bin/python", "-m", "pip", "install", "-q", "uv>=0.9"], check=True)
        command = [f"{place}/bin/uv", "pip", "compile", "--quiet", f"--python={sys.executable}", "--extra=dev"]
        # Without the address of an index: each machine uses its own.
        command += ["--upgrade", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
        done = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    (ROOT / LOCK).write_text("# Written by `make lock`; used by `make venv LOCKED=1`.\n" + done.stdout)
    print(f"{LOCK}: {done.stdout.count('==')} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
