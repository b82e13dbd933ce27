"""What kube-scheduler's own tests say, said again by our plugins: which nodes are refused, and the scores of the rest.

The recorded cases live beside the repository; without them there is nothing to compare and the tests are skipped.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hodei.engine.runner import Runner
from hodei.engine.view import View
from hodei.plugins.affinity import NodeAffinity
from hodei.plugins.health import Health
from hodei.plugins.job_affinity import CompanyRules
from hodei.plugins.ports import Ports
from hodei.plugins.spread import Spread
from hodei.plugins.taints import Taints
from vectors import translate

VECTORS = Path(__file__).resolve().parents[3] / "shared" / "vectors"
PLUGINS = {
    "InterPodAffinity": CompanyRules,
    "PodTopologySpread": Spread,
    "NodePorts": Ports,
    "TaintToleration": Taints,
    "NodeAffinity": NodeAffinity,
    "NodeUnschedulable": Health,
}
VIEW = View(0)
# Part of a case's name -> why it is not compared.
_NUMERIC = "tolerations that compare numbers (Gt, Lt) are not in the model"
_ADDED = "affinity added by the scheduler's own configuration is not in the model"
_TERMINATING = "a member that is being stopped still holds its place here, until it has ended"
_INTERNAL = "about a call order inside kube-scheduler, not about a decision"
LEFT_OUT: dict[str, str] = {
    "Gt_toleration": _NUMERIC,
    "Lt_toleration": _NUMERIC,
    "Doesn't_match_added_affinity": _ADDED,
    "Matches_added_affinity": _ADDED,
    "Matches_node_selector_but_not_added": _ADDED,
    "NodeAffinityPriority/added_affinity": _ADDED,
    "invalid_value_in_Affinity_term": "such a value is refused when the job is submitted",
    "terminating_Pods": _TERMINATING,
    "TestPreFilterDisabled": _INTERNAL,
    "TestRemovePodHostScopedAffinityCount": "recorded after a pod was taken out again",
    "TestPreFilterState/default": "rules of the scheduler's own configuration for pods of a service: there are no services",
    "system_defaulting": "rules of the scheduler's own configuration for pods of a service: there are no services",
    "TestPodTopoSignatures": _INTERNAL,
    "feature_gate_disabled": "records a disabled feature gate",
}


def _cases(kind: str) -> list[Any]:
    path = VECTORS / f"kubernetes_{kind}.jsonl.gz"
    if not path.exists():
        return [
            pytest.param(
                None, marks=pytest.mark.skip(reason=f"{path} is not there: the recordings are no part of the project")
            )
        ]
    with gzip.open(path, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    out = []
    for number, case in enumerate(case for case in cases if case["plugin"] in PLUGINS):
        why = next((reason for part, reason in LEFT_OUT.items() if part in case["case"]), None)
        if case["plugin"] == "NodeUnschedulable" and (case["pod"].get("spec") or {}).get("tolerations"):
            why = "an operator's cordon cannot be tolerated here"
        marks = [pytest.mark.skip(reason=why)] if why else []
        out.append(pytest.param(case, id=f"{case['plugin']}-{number}", marks=marks))
    return out


@pytest.mark.parametrize("case", _cases("filter"))
def test_the_same_nodes_are_refused(case):
    plugin, table = PLUGINS[case["plugin"]](), translate.table(case)
    runner = Runner()
    curable: dict[str, set[bool]] = {}
    for mask, reason in runner.refusals(plugin, translate.member(case["pod"]), table.view(), VIEW):
        for row in mask.nonzero()[0]:
            curable.setdefault(table.names[row], set()).add(reason.evictable)
    assert not runner.faults
    ours = set(curable)
    theirs = {name for name, verdict in case["filter"].items() if verdict["code"] != "Success"}
    if (case.get("prefilter") or {}).get("code", "Success") not in ("Success", "Skip"):
        theirs = set(table.names)
    assert ours & set(case["filter"]) == theirs & set(case["filter"]), case["case"]
    # Unschedulable: stopping others could help; with "and unresolvable" behind it: it could not.
    for name in ours & set(case["filter"]):
        if len(curable[name]) == 1 and case["filter"][name]["code"] != "Success":
            assert curable[name] == {case["filter"][name]["code"] == "Unschedulable"}, case["case"]


@pytest.mark.parametrize("case", _cases("score"))
def test_the_scores_are_the_same(case):
    made, table = PLUGINS[case["plugin"]], translate.table(case)
    hard = re.search(r"HardPodAffinityWeight:(\d+)", str(case.get("cfg")))
    plugin = CompanyRules(hard_weight=int(hard[1])) if hard else made()
    runner = Runner()
    raw = runner.score(plugin, translate.member(case["pod"]), table.view(), VIEW)
    candidates = {one["node"]["metadata"]["name"] for one in case["candidate_nodes"]}
    feasible = np.array([name in candidates for name in table.names])
    theirs = case["normalized"]
    if raw is None:
        assert len(set(theirs.values())) <= 1, case["case"]
        return
    ours = runner.normalize(plugin, raw, feasible)
    assert not runner.faults
    # A score that counts down from the top is rounded up there, where ours still has two more digits.
    up = 99 if made is Taints else 0
    got = {name: (int(points) + up) // 100 for name, points in zip(table.names, ours, strict=True) if name in theirs}
    assert got == theirs, case["case"]
