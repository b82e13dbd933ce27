"""Nodes: what there is, and what operators say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei.model.errors import InvalidInput, NotFound
from hodei.model.facts import NodeMarked
from hodei.model.node import Taint
from hodei.server.params import closest
from hodei.server.route import ADMIN, API, READ, Call, Param, Route
from hodei.wire.render import node_view
from hodei.wire.views import NodeList, NodePatch, NodeView, TaintView

if TYPE_CHECKING:
    from hodei.runtime.service import NodeStatus

_NAME = Param("name", "the node's name", where="path", maximum=253)
_patch = msgspec.json.Decoder(NodePatch)


async def list_nodes(call: Call) -> NodeList:
    return NodeList([_view(status) for status in call.service.nodes()])


async def show_node(call: Call) -> NodeView:
    name, nodes = call.args["name"], call.service.nodes()
    for status in nodes:
        if status.node.name == name:
            return _view(status)
    near = closest(name, (status.node.name for status in nodes))
    raise NotFound(f"there is no node {name!r}", hint=f"did you mean {near!r}?" if near else "see 'hodei nodes'")


async def mark_node(call: Call) -> NodeView:
    patch = _patch.decode(call.body)
    for key, value in patch.labels.items():
        if not 0 < len(key) <= 317 or len(value or "") > 253 or not (key + (value or "")).isprintable():
            raise InvalidInput(f"the label {key[:80]!r} is empty, too long or not printable")
    change = NodeMarked(
        call.args["name"],
        cordon=True if patch.drain else patch.cordon,
        labels=patch.labels,
        add_taints=tuple(_taint(taint) for taint in patch.add_taints),
        remove_taints=tuple(_taint(taint) for taint in patch.remove_taints),
        drain=patch.drain,
    )
    return _view(await call.service.mark_node(change))


def _taint(view: TaintView) -> Taint:
    if not 0 < len(view.key) <= 317 or len(view.value) > 253 or not (view.key + view.value).isprintable():
        raise InvalidInput(f"the taint {view.key[:80]!r} is empty, too long or not printable")
    return msgspec.convert({"key": view.key, "value": view.value, "effect": view.effect}, Taint)


def _view(status: NodeStatus) -> NodeView:
    return node_view(status.node, status.used, status.runs, status.holds)


ROUTES = (
    Route("GET", f"{API}/nodes", READ, "Every node, with what is in use", list_nodes, response=NodeList),
    Route("GET", f"{API}/nodes/{{name}}", READ, "One node", show_node, response=NodeView, params=(_NAME,)),
    Route(
        "PATCH", f"{API}/nodes/{{name}}", ADMIN, "Cordon, drain, label or taint a node", mark_node,
        request=NodePatch, response=NodeView, params=(_NAME,),
    ),
)  # fmt: skip
