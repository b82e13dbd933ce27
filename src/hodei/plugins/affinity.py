"""Node affinity: selectors and required terms refuse, preferred terms score; and the nodes of a profile."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import convert, structs

from hodei.engine.explain import Change, sole_refusals
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.affinity import NodeTerm, Requirement, parse_selector
from hodei.model.job import Affinity, Reason


class NodeAffinity:
    """`added`: affinity that the operator adds to every member."""

    name = "affinity"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def __init__(self, added: Affinity | Mapping[str, Any] | None = None) -> None:
        self._added = added if isinstance(added, Affinity) else convert(added or {}, Affinity)

    def key(self, member: Member) -> Hashable:
        task = member.task
        return (tuple(sorted(task.node_selector.items())), task.affinity)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        task = member.task
        out: list[tuple[Mask, Reason]] = []
        for label, value in sorted(task.node_selector.items()):
            wanted = Requirement(label, "In", (value,))
            out.append((~nodes.matching(wanted), Reason(self.name, "SELECTOR_MISMATCH", f"label {wanted} required")))
        if task.affinity.required:
            hit = nodes.none()
            for term in task.affinity.required:
                hit = hit | term_mask(term, nodes)
            text = " or ".join(f"[{term}]" for term in task.affinity.required)
            out.append((~hit, Reason(self.name, "AFFINITY_MISMATCH", f"required affinity {text} not met"[:500])))
        if self._added.required:
            hit = np.logical_or.reduce([term_mask(term, nodes) for term in self._added.required])
            out.append((~hit, Reason(self.name, "ADDED_AFFINITY", "not one of the nodes that this scheduler may use")))
        return out

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        """Drop one label of the selector, or the required affinity, in the order of the refusals."""
        task = member.task
        labels, pairs = sorted(task.node_selector.items()), self.filter(member, nodes, view)
        for place, helps in enumerate(sole_refusals(pairs)):
            if helps and place < len(labels):
                dropped, value = labels[place]
                rest = {label: value for label, value in task.node_selector.items() if label != dropped}
                yield Change("drop", f"drop label {dropped}={value}", {"node_selector": rest})
            elif helps and place == len(labels) and task.affinity.required:
                terms = " or ".join(f"[{term}]" for term in task.affinity.required)
                without = structs.replace(task.affinity, required=())
                yield Change("drop", f"drop required affinity {terms}"[:500], {"affinity": without})

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        preferred = (*member.task.affinity.preferred, *self._added.preferred)
        if not preferred:
            return None
        raw = nodes.zeros()
        for preference in preferred:
            # An empty preference matches no node, as in Kubernetes.
            if preference.term.labels or preference.term.fields:
                raw = raw + term_mask(preference.term, nodes).astype(np.int64) * preference.weight
        return raw

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        top = int(raw[feasible].max()) if feasible.any() else 0
        return raw * MAX_SCORE // top if top > 0 else np.zeros_like(raw)


def term_mask(term: NodeTerm, nodes: Nodes) -> Mask:
    """Nodes that meet all conditions of a term; a term without conditions matches none, as in Kubernetes."""
    if not term.labels and not term.fields:
        return nodes.none()
    hit = ~nodes.none()
    for requirement in term.labels:
        hit = hit & nodes.matching(requirement)
    for requirement in term.fields:
        hit = hit & nodes.matching(requirement, field=True)
    return hit


class Scope:
    """Refuses nodes that the profile may not use. `nodes`: the profile's label selector; empty for all nodes."""

    name = "scope"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def __init__(self, nodes: str = "") -> None:
        self._wanted = parse_selector(nodes)
        shown = ", ".join(str(requirement) for requirement in self._wanted)
        self._reason = Reason(self.name, "OUTSIDE_PROFILE", f"not among the nodes of the profile ({shown})")

    def key(self, member: Member) -> Hashable:
        return None if self._wanted else NO_OPINION

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        if not self._wanted:
            return []
        inside = ~nodes.none()
        for requirement in self._wanted:
            inside = inside & nodes.matching(requirement)
        return [(~inside, self._reason)]
