"""What operators say of nodes, added up."""

from __future__ import annotations

from hodei.model.facts import NodeMarked
from hodei.model.node import NodeMarks


def marked(marks: NodeMarks, fact: NodeMarked) -> NodeMarks:
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
    return NodeMarks(
        marks.node, cordoned or fact.drain, labels, tuple(sorted(removed)), tuple(taints.values()), tuple(gone.values())
    )
