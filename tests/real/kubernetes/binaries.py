"""Where the programs of the control plane are, and what to do where they are not.

`make kubernetes` builds them once, into a cache folder that is named after their version. Without them the tests are
skipped, except in CI: there they must be there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubectl", "etcd", "kwok")
NEXT = "next: make kubernetes (Go 1.26 or newer; some ten minutes, once)"


def version() -> str:
    """Of Kubernetes, as go.mod asks for it."""
    found = re.search(r"^\tk8s\.io/kubernetes (v[\d.]+)", (HERE / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod names no version of k8s.io/kubernetes"
    return found[1]


def folder() -> Path:
    cache = os.environ.get("HODEI_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hodei"
    return Path(cache) / f"kubernetes-{version()}"


def missing() -> str:
    """What is not here and what to do about it; empty if all is."""
    lacking = [name for name in PROGRAMS if not os.access(folder() / name, os.X_OK)]
    if lacking:
        return f"no {', '.join(lacking)} in {folder()}; {NEXT}"
    if shutil.which("openssl") is None:
        return "no openssl, which makes the certificates of the control plane; next: apt-get install openssl"
    return ""


def build_if_asked() -> None:
    """Build what is missing, where that is wanted (HODEI_BUILD_KUBERNETES=1, or CI) and Go is there."""
    wanted = os.environ.get("HODEI_BUILD_KUBERNETES") == "1" or os.environ.get("CI")
    if wanted and missing() and shutil.which("go"):
        subprocess.run(["sh", str(HERE / "build.sh"), str(folder())], check=False)  # `missing` says how it went


def need() -> None:
    """Go on only if all is here: else the test is skipped; in CI it fails."""
    build_if_asked()
    if why := missing():
        if os.environ.get("CI"):
            pytest.fail(f"in CI the control plane must be there: {why}")
        pytest.skip(why)
