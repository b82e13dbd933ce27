"""Compares the permissions of deploy/kubernetes with those used in the audit log of the tests' API server.

    HODEI_KUBE_AUDIT=/tmp/audit.log pytest tests/real/kubernetes
    cd tests && python -m real.kubernetes.permissions /tmp/audit.log

It prints permissions that are granted and unused, and those that were used and are not granted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
FILES = ("rbac.yaml", "rbac-forecast.yaml", "rbac-reclaim.yaml")
Permission = tuple[str, str, str]  # the API group, the resource, the verb


def granted(files: Iterable[str] = FILES) -> set[Permission]:
    out: set[Permission] = set()
    for file in files:
        for document in yaml.safe_load_all((ROLES / file).read_text()):
            for rule in (document or {}).get("rules", ()):
                out |= {
                    (group, resource, verb)
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
    return out


def used(log: Path) -> set[Permission]:
    out: set[Permission] = set()
    for line in log.read_text().splitlines():
        target = json.loads(line).get("objectRef")
        if target:
            sub = f"/{target['subresource']}" if target.get("subresource") else ""
            out.add((target.get("apiGroup", ""), target.get("resource", "") + sub, json.loads(line)["verb"]))
    return out


if __name__ == "__main__":
    have, needed = granted(), used(Path(sys.argv[1]))
    for title, permissions in (("granted and unused", have - needed), ("used and not granted", needed - have)):
        print(f"{title}:", *[" ".join(permission) for permission in sorted(permissions)], sep="\n  ")
