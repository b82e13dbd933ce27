"""release.py VERSION: create a release of this checkout: changelog section, version, commit, tag, wheel, SBOM and image.

It changes only this checkout and dist/. It pushes and publishes nothing, and prints the command that does.
"""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+")
CHANGELOG, PACKAGE, CHART = "CHANGELOG.md", "src/hodei/__init__.py", "deploy/helm/hodei/Chart.yaml"
UNRELEASED = "## [Unreleased]\n"


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def cut_changelog(text: str, version: str, day: str) -> str:
    """The changelog with a section for VERSION. An existing one is kept, else Unreleased becomes that section."""
    before, mark, after = text.partition(UNRELEASED)
    if not mark:
        raise ValueError(f"{CHANGELOG} has no section [Unreleased]")
    pending, _, older = after.partition("\n## [")
    if f"## [{version}] - " in text:
        if pending.strip():
            raise ValueError(f"{CHANGELOG} has [{version}] already, and more under [Unreleased]")
        return text
    if not pending.strip():
        raise ValueError(f"{CHANGELOG} has nothing under [Unreleased] and no section [{version}]")
    section = f"{before}{mark}\n## [{version}] - {day}\n\n{pending.strip()}\n"
    return section + (f"\n## [{older}" if older else "")


def set_versions(version: str) -> None:
    for name, pattern in (
        (PACKAGE, r'(?m)^(__version__ = ").*(")$'),
        (CHART, r"(?m)^(version: ).*()$"),
        (CHART, r'(?m)^(appVersion: ").*(")$'),
    ):
        path = ROOT / name
        text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", path.read_text())
        if count != 1:
            raise ValueError(f"{name} has {count} lines with a version instead of one")
        path.write_text(text)


def release(version: str) -> None:
    if not VERSION.fullmatch(version):
        raise ValueError(f"VERSION={version!r} is not a version such as 0.2.0")
    if run("git", "status", "--porcelain"):
        raise ValueError("the tree has changes that are not committed")
    tag = f"v{version}"
    if run("git", "tag", "--list", tag):
        raise ValueError(f"the tag {tag} exists")
    log = ROOT / CHANGELOG
    today = time.strftime("%Y-%m-%d", time.gmtime())
    log.write_text(cut_changelog(log.read_text(), version, today))
    set_versions(version)
    if run("git", "status", "--porcelain"):
        run("git", "commit", "--quiet", "--all", "--message", f"Version {version}")
    # The artifacts come before the tag, so a failed build leaves no tag.
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ".")
    # The SBOM names the installed version, so install the new one first.
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", ".")
    run(sys.executable, "scripts/sbom.py", f"dist/hodei-{version}.cdx.json")
    image = f"hodei:{version}"
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        run("docker", "build", "--quiet", "--file", "deploy/Dockerfile", "--tag", image, ".")
    else:
        image = "no image, because no Docker daemon answers"
    run("git", "tag", "--annotate", tag, "--message", f"Version {version}")
    print(f"{tag}: dist/hodei-{version}-py3-none-any.whl, dist/hodei-{version}.cdx.json, {image}")
    print(f"  next: git push origin HEAD {tag}")


def main(version: str) -> int:
    try:
        release(version)
    except (ValueError, subprocess.CalledProcessError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
