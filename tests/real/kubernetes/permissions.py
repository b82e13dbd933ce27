"""Which permissions of deploy/kubernetes were used, by the audit log of the tests' API server.

    HODEI_KUBE_AUDIT=/tmp/audit.log pytest tests/real/kubernetes
    cd tests && python -m real.kubernetes.permissions /tmp/audit.log

It tells what is granted and was never asked for, and what was asked for and is not granted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
FILES = ("rbac.yaml", "rbac-forecast.yaml", "rbac-reclaim.yaml")
Right = tuple[str, str, str]  # the API group, the resource, the verb


def granted(files: Iterable[str] = FILES) -> set[Right]:
    out: set[Right] = set()
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


def used(log: Path) -> set[Right]:
    out: set[Right] = set()
    for line in log.read_text().splitlines():
        about = json.loads(line).get("objectRef")
        if about:
            sub = f"/{about['subresource']}" if about.get("subresource") else ""
            out.add((about.get("apiGroup", ""), about.get("resource", "") + sub, json.loads(line)["verb"]))
    return out


if __name__ == "__main__":
    have, need = granted(), used(Path(sys.argv[1]))
    for title, rights in (("granted and never asked for", have - need), ("asked for and not granted", need - have)):
        print(f"{title}:", *[" ".join(right) for right in sorted(rights)], sep="\n  ")
