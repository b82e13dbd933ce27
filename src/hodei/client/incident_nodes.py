"""The cluster as it was when an incident began: today's nodes, with what has happened to them since taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import convert, to_builtins

from hodei.api.views import NodeView
from hodei.client.incident_jobs import whole
from hodei.model.effects import Event
from hodei.model.node import Taint
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE

Timed = tuple[int, dict[str, Any]]
_TOP = {CPU: "cpu", MEMORY: "memory", GPU: "gpu", STORAGE: "storage"}


class NodeStory:
    """`events`: all since the beginning, so that today's marks can be taken back; facts are those until `end_ms`."""

    def __init__(
        self, views: Sequence[NodeView], events: Sequence[Event], began_ms: int, end_ms: int, used: set[str]
    ) -> None:
        self._began_ms, self._end_ms = began_ms, end_ms
        self._views = {view.name: view for view in views}
        self._events = [event for event in events if event.kind in ("node.joined", "node.lost", "node.marked")]
        lost = {event.node: event for event in self._events if event.kind == "node.lost"}
        self._gone = {name: event for name, event in lost.items() if name not in self._views}
        joined_later = {event.node for event in self._events if event.kind == "node.joined" and event.at_ms > end_ms}
        self._names = sorted(({*self._views} - (joined_later - used - {*lost})) | {*self._gone})

    def cluster(self) -> list[dict[str, Any]]:
        out = []
        for name in self._names:
            entry = _of_view(self._views[name]) if name in self._views else _of_event(self._gone[name])
            taints = self._taints_then(name, entry.pop("taints", []))
            mine = [event for event in self._events if event.node == name and event.kind != "node.marked"]
            if mine and mine[0].kind == "node.joined":
                entry["there"] = False
            out.append(entry | ({"taints": taints} if taints else {}))
        return out

    def facts(self) -> list[Timed]:
        out: list[Timed] = [(0, {"cordon": name}) for name in self._names if self._cordoned_then(name)]
        for event in self._events:
            if event.node in self._names and event.at_ms <= self._end_ms:
                out += [(event.at_ms - self._began_ms, fact) for fact in _facts_of(event)]
        return out

    def _marks(self, name: str) -> Iterable[Event]:
        return (event for event in reversed(self._events) if event.kind == "node.marked" and event.node == name)

    def _cordoned_then(self, name: str) -> bool:
        cordoned = name in self._views and self._views[name].state == "cordoned"
        for event in self._marks(name):
            if event.detail.get("cordon") is not None or event.detail.get("drain"):
                cordoned = not (event.detail.get("cordon") or event.detail.get("drain"))
        return cordoned

    def _taints_then(self, name: str, now: list[str]) -> list[str]:
        taints = list(now)
        for event in self._marks(name):
            taints = [taint for taint in taints if taint not in event.detail.get("add_taints", ())]
            taints += event.detail.get("remove_taints", ())
        return taints


def _facts_of(event: Event) -> list[dict[str, Any]]:
    if event.kind != "node.marked":
        return [{"join" if event.kind == "node.joined" else "lose": event.node}]
    out: list[dict[str, Any]] = []
    detail = event.detail
    if detail.get("drain"):
        out.append({"drain": event.node})
    elif detail.get("cordon") is not None:
        out.append({"cordon" if detail["cordon"] else "uncordon": event.node})
    out += [{"taint": event.node, "as": taint} for taint in detail.get("add_taints", ())]
    out += [{"untaint": event.node, "as": taint} for taint in detail.get("remove_taints", ())]
    return out


def _of_view(view: NodeView) -> dict[str, Any]:
    place: dict[str, Any] = {
        key: view.location[key]
        for key in ("region", "zone", "datacenter", "rack", "lat", "lng")
        if key in view.location
    }
    taints = [str(convert(to_builtins(taint), Taint)) for taint in view.taints]
    sockets = [{"cpus": list(socket.cpus), "gpus": list(socket.gpus)} for socket in view.sockets]
    more: dict[str, Any] = {
        "labels": view.labels, "taints": taints, "arch": view.arch, "gpu_type": view.gpu_type, **place,
        "data": view.data, "cost": view.cost, "overcommit": view.overcommit, "sockets": sockets,
        "backend": view.backend if view.backend != "local" else "",
    }  # fmt: skip
    return {"name": view.name, **_amounts(view.capacity)} | {
        key: value for key, value in more.items() if value not in ("", 0, [], {}, None) or key in ("lat", "lng")
    }


def _of_event(event: Event) -> dict[str, Any]:
    """A node that is gone: its last event says what it was."""
    more = {"labels": event.detail.get("labels", {}), "taints": event.detail.get("taints", [])}
    entry: dict[str, Any] = {"name": event.node, **_amounts(event.detail.get("capacity", {}))}
    return entry | {key: value for key, value in more.items() if value}


def _amounts(capacity: dict[str, str]) -> dict[str, Any]:
    given = {name: whole(amount) for name, amount in capacity.items()}
    out: dict[str, Any] = {_TOP[name]: amount for name, amount in given.items() if name in _TOP and amount}
    rest = {name: amount for name, amount in given.items() if name not in _TOP}
    return out | ({"resources": rest} if rest else {})
