"""The filters of every profile, over all nodes at once, against the reference rules for one node after another."""

from __future__ import annotations

import os

from hypothesis import given

from builders import a_node
from hodei.engine.explain import objections
from hodei.engine.nodes import Table
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.plugins.registry import build_profile
from property import clusters
from property import reference_rules as naive
from property.examples import examples

CASES = int(os.environ.get("HODEI_CASES", "300"))
PROFILE = build_profile("default")


@examples(CASES)
@given(clusters.clusters(), clusters.specs())
def test_the_filters_refuse_the_same_nodes_as_the_reference_rules(cluster, spec):
    table = Table([*cluster, a_node("z-plain", 8, "16Gi")])
    table.settle()
    for task in spec.tasks:
        found = objections(PROFILE, Runner(), Member(spec, task), table, View(0))
        for node, refused in zip(table.nodes, found.refused.tolist(), strict=True):
            short = any(amount > node.capacity.get(name, 0) for name, amount in task.request.items())
            assert refused == (short or bool(naive.refusals(spec, task, node))), (node, task)
