"""Nodes: what there is, and what operators say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei.api.views import NodeHistoryView, NodeList, NodePatch, NodeRunView, NodeView, TaintView
from hodei.jobfile.render import iso, node_view
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.facts import NodeOverridden
from hodei.model.node import Taint
from hodei.model.resources import format_resources
from hodei.ports import RunKey
from hodei.runtime.node_history import Held, node_history
from hodei.server.params import closest, read_since_ms
from hodei.server.route import ADMIN, API, READ, Call, Param, Route

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


async def show_history(call: Call) -> NodeHistoryView:
    args, now_ms = call.args, call.shared.now_ms()
    since_ms = read_since_ms(args["since"] or "24h", now_ms)
    until_ms = read_since_ms(args["until"], now_ms, "until") if args["until"] else now_ms
    if until_ms <= since_ms:
        raise InvalidInput("`until` is not after `since`", hint="without `since`: the last 24 hours")
    found = await node_history(call.service, args["name"], since_ms, until_ms, _key(args["after"]), args["limit"])
    if not found.known and not found.held and found.next_after is None and not args["after"]:
        await show_node(call)  # says that there is none, and which was perhaps meant
    return NodeHistoryView(
        node=args["name"], since=iso(found.since_ms), until=iso(found.until_ms),
        runs=[_held_view(held) for held in found.held], busy_ms=found.busy_ms,
        next=".".join(map(str, found.next_after)) if found.next_after else "",
    )  # fmt: skip


def _key(text: str) -> RunKey | None:
    if not text:
        return None
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise InvalidInput(f"after: {text[:80]!r} is not the `next` of a page")
    job, attempt, member = map(int, parts)
    return job, attempt, member


def _held_view(held: Held) -> NodeRunView:
    run, spec = held.run, held.job.spec if held.job is not None else None
    return NodeRunView(
        run=run.id, job=run.job, name=spec.name if spec else "", project=spec.project if spec else "",
        user=spec.user if spec else "", state=run.state, placed_at=iso(run.placed_ms), started_at=iso(run.started_ms),
        finished_at=iso(run.finished_ms), resources=format_resources(held.request), exit_code=run.exit_code,
        reason_code=run.reason_code,
    )  # fmt: skip


async def mark_node(call: Call) -> NodeView:
    patch = _patch.decode(call.body)
    for key, value in patch.labels.items():
        if not 0 < len(key) <= 317 or len(value or "") > 253 or not (key + (value or "")).isprintable():
            raise InvalidInput(f"the label {key[:80]!r} is empty, too long or not printable")
    change = NodeOverridden(
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
        "GET", f"{API}/nodes/{{name}}/history", READ, "Which runs held room on a node, and when: the newest job first",
        show_history, response=NodeHistoryView,
        params=(
            _NAME,
            Param("since", "from when on: ISO 8601, epoch milliseconds, or an age such as 90m; else the last 24 hours", default=""),
            Param("until", "up to when, in the same way; else now", default=""),
            Param("after", "the `next` of the page before", default=""),
            Param("limit", "runs per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
    Route(
        "PATCH", f"{API}/nodes/{{name}}", ADMIN, "Cordon, drain, label or taint a node", mark_node,
        request=NodePatch, response=NodeView, params=(_NAME,),
    ),
)  # fmt: skip
