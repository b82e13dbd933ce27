"""What operators say of nodes, added up; and what events tell of nodes."""

from __future__ import annotations

from typing import Any

from hodei.model.facts import NodeOverridden
from hodei.model.node import Node, NodeOverrides
from hodei.model.resources import format_resources


def marked(marks: NodeOverrides, fact: NodeOverridden) -> NodeOverrides:
    """Marks with an operator's latest word in them."""
    labels, removed = dict(marks.labels), set(marks.removed_labels)
    for key, value in fact.labels.items():
        if value is None:
            labels.pop(key, None)
            removed.add(key)
        else:
            labels[key] = value
            removed.discard(key)
    taints = {(taint.key, taint.effect): taint for taint in marks.taints}
    gone = {(taint.key, taint.effect): taint for taint in marks.removed_taints}
    for taint in fact.remove_taints:
        taints.pop((taint.key, taint.effect), None)
        gone[taint.key, taint.effect] = taint
    for taint in fact.add_taints:
        taints[taint.key, taint.effect] = taint
        gone.pop((taint.key, taint.effect), None)
    cordoned = marks.cordoned if fact.cordon is None else fact.cordon
    return NodeOverrides(
        marks.node, cordoned or fact.drain, labels, tuple(sorted(removed)), tuple(taints.values()), tuple(gone.values())
    )


def said(fact: NodeOverridden) -> dict[str, Any]:
    """An operator's word, as it is told: only what it changes."""
    out: dict[str, Any] = {} if fact.cordon is None else {"cordon": fact.cordon}
    if fact.drain:
        out["drain"] = True
    for key, taints in (("add_taints", fact.add_taints), ("remove_taints", fact.remove_taints)):
        if taints:
            out[key] = [str(taint) for taint in taints]
    return out | ({"labels": fact.labels} if fact.labels else {})


def described(node: Node) -> dict[str, Any]:
    """What a node was, for those who look back after it has gone."""
    more = {"labels": node.labels, "taints": [str(taint) for taint in node.taints]}
    return {"capacity": format_resources(node.capacity)} | {key: value for key, value in more.items() if value}
