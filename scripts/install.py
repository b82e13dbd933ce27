"""install.py EXTRA [--locked]: install hodei[EXTRA] from this folder into the environment of this Python, and show progress.

It prints one line per package: a quiet pip seems to hang, and a verbose one prints too much. `--locked` installs the
versions of requirements-dev.lock and checks their hashes. Standard library only: nothing else is installed yet.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = "requirements-dev.lock"
_FETCHED = re.compile(r"\s*(?:Downloading|Using cached) (?P<name>[^-\s]+)-(?P<version>[^-\s]+)\S* \((?P<size>[^)]+)\)")
_PLACED = re.compile(r"Installing collected packages: (?P<names>.+)")


def progress(line: str) -> str:
    """What to show for a line of pip's output; empty for nothing."""
    if fetched := _FETCHED.match(line):
        return f"{fetched['name']} {fetched['version']} ({fetched['size']})"
    if placed := _PLACED.match(line):
        return f"writing {len(placed['names'].split(','))} packages"
    if "Installing build dependencies: started" in line:
        return "fetching the build tools"
    return ""


def pip_install(*args: str) -> int:
    # Without byte code: Python compiles a module when it is first imported, and most never are.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--no-color"]
    output: list[str] = []
    with subprocess.Popen(
        [*command, "--progress-bar", "off", *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as pip:  # fmt: skip
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            if shown := progress(line):
                print(f"    {shown}", flush=True)
    if pip.returncode:
        print("".join(output), file=sys.stderr)
        print(f"error: pip ended with exit code {pip.returncode}; its output is above", file=sys.stderr)
        print("  next: if a download failed, run the same command again; downloaded packages are kept", file=sys.stderr)
    return pip.returncode


def main(extra: str, *options: str) -> int:
    began = time.monotonic()
    print(f"==> installing hodei[{extra}] into {sys.prefix} with pip", flush=True)
    if "--locked" in options:
        failed = pip_install("--require-hashes", "-r", str(ROOT / LOCK)) or pip_install("--no-deps", "-e", str(ROOT))
    else:
        failed = pip_install("-e", f"{ROOT}[{extra}]")
    if not failed:
        print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
