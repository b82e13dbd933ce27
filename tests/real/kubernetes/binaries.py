"""Paths of the control plane's programs, and a hint when they are missing.

`make kubernetes` builds them once, into a cache folder with their version in its name. Without them the tests are
skipped; in CI they fail.
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
NEXT = "next: make kubernetes (Go 1.26 or newer; about ten minutes, once)"


def version() -> str:
    """The version of Kubernetes in go.mod."""
    found = re.search(r"^\tk8s\.io/kubernetes (v[\d.]+)", (HERE / "go.mod").read_text(), re.MULTILINE)
    assert found, "go.mod names no version of k8s.io/kubernetes"
    return found[1]


def folder() -> Path:
    cache = os.environ.get("HODEI_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hodei"
    return Path(cache) / f"kubernetes-{version()}"


def missing() -> str:
    """What is missing and how to get it; empty if nothing is."""
    lacking = [name for name in PROGRAMS if not os.access(folder() / name, os.X_OK)]
    if lacking:
        return f"no {', '.join(lacking)} in {folder()}; {NEXT}"
    if shutil.which("openssl") is None:
        return "no openssl, which makes the certificates of the control plane; next: apt-get install openssl"
    return ""


def build_if_enabled() -> None:
    """Build missing programs with HODEI_BUILD_KUBERNETES=1 or in CI, if Go is installed."""
    wanted = os.environ.get("HODEI_BUILD_KUBERNETES") == "1" or os.environ.get("CI")
    if wanted and missing() and shutil.which("go"):
        subprocess.run(["sh", str(HERE / "build.sh"), str(folder())], check=False)  # `missing` reports a failed build


def require() -> None:
    """Skip the test if a program is missing; in CI, fail."""
    build_if_enabled()
    if why := missing():
        if os.environ.get("CI"):
            pytest.fail(f"the control plane is missing in CI: {why}")
        pytest.skip(why)
