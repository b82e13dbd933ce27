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
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
CHANGELOG, PACKAGE, CHART = "CHANGELOG.md", "src/hodei/__init__.py", "deploy/helm/hodei/Chart.yaml"
UNRELEASED = "## [Unreleased]\n"
PLACES = {
    PACKAGE: [r'(?m)^(__version__ = ").*(")$'],
    CHART: [r"(?m)^(version: ).*()$", r'(?m)^(appVersion: ").*(")$'],
}


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


def set_version(name: str, text: str, version: str) -> str:
    """TEXT, the content of the file NAME, with the version in the places that hold it."""
    for pattern in PLACES[name]:
        text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", text)
        if count != 1:
            raise ValueError(f"{name} has {count} lines with a version instead of one")
    return text


def check_version(version: str, tags: list[str], merged: list[str]) -> None:
    """TAGS are all of the repository, MERGED those of this branch: another branch may have newer ones."""
    if not VERSION.fullmatch(version):
        raise ValueError(f"VERSION={version!r} is not a version such as 0.2.0")
    if f"v{version}" in tags:
        raise ValueError(f"the tag v{version} exists")
    for tag in merged:
        released = tag.removeprefix("v")
        if VERSION.fullmatch(released) and numbers(version) < numbers(released):
            raise ValueError(f"{version} is older than {released}, which this branch contains")


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def release(version: str) -> None:
    check_version(version, run("git", "tag").split(), run("git", "tag", "--merged").split())
    if run("git", "status", "--porcelain"):
        raise ValueError("the tree has changes that are not committed")
    run("git", "var", "GIT_COMMITTER_IDENT")  # fails if git has no name to commit under
    # Nothing is written before everything is checked.
    today = time.strftime("%Y-%m-%d", time.gmtime())
    contents = {CHANGELOG: cut_changelog((ROOT / CHANGELOG).read_text(), version, today)}
    contents |= {name: set_version(name, (ROOT / name).read_text(), version) for name in PLACES}
    for name, text in contents.items():
        (ROOT / name).write_text(text)
    tag = f"v{version}"
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
