"""install.py EXTRA: put hodei[EXTRA] from this folder into the environment of the Python that runs this, and show progress.

A quiet pip looks as if it hangs, a talkative one buries what matters: this prints one line per package. Standard library
only, because nothing else is installed yet.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def main(extra: str) -> int:
    began = time.monotonic()
    print(f"==> installing hodei[{extra}] into {sys.prefix} with pip", flush=True)
    # Without byte code: what is imported is compiled on its first use, and most of it never is.
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--no-color"]
    command += ["--progress-bar", "off", "-e", f"{ROOT}[{extra}]"]
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            said.append(line)
            if shown := progress(line):
                print(f"    {shown}", flush=True)
    if pip.returncode:
        print("".join(said), file=sys.stderr)
        print(f"error: pip ended with exit code {pip.returncode}; its output is above", file=sys.stderr)
        print("  next: if a download failed, run the same command again: what is here already is kept", file=sys.stderr)
        return 1
    print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
