"""Reservations of the configuration file: room that belongs to a namespace for a window of time.

A file is read again at every start, so its times must not be counted from "now". What cannot be had yet (nodes that are
still to come, room that another reservation has) is tried again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from hodei.api.config import parse_config
from hodei.api.resources import ReservationRequest, parse_moment_ms, parse_reservation
from hodei.control.controller import Controller
from hodei.control.reservations.reservations import choose
from hodei.jobfile.check import convert, refuse
from hodei.jobfile.values import Problems
from hodei.kube.scheduler.background import NoBackground
from hodei.model.affinity import Requirement, all_match, parse_selector
from hodei.model.config import Config
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.facts import Fact, JobRestored, NodeJoined, ReservationCancelled, ReservationMade
from hodei.model.ids import NodeName
from hodei.model.reservation import ReservationSpec

_log = logging.getLogger(__name__)
EVERY_S = 10.0
_DOCS = "docs/how-to/kubernetes.md#reservations"
_FIRST = (NodeJoined, JobRestored)
_DAY_MS = 86_400_000
_LONG_AGO_MS = 1


class Reserved(Struct, frozen=True):
    """A wish of the file. `selector`: all nodes that it picks, whenever they come."""

    wish: ReservationSpec
    selector: tuple[Requirement, ...] = ()


def read_file(path: Path | None) -> tuple[Config, tuple[Reserved, ...]]:
    """A configuration, and the `[[reservations]]` in it. InvalidInput names all that is wrong."""
    if path is None:
        return Config(), ()
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        hint = "it is a TOML file, see docs/reference/configuration.md"
        raise InvalidInput(f"cannot read the configuration {path}: {error}", hint=hint) from error
    tables = found.pop("reservations", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidInput("reservations is not a list of tables", hint=f"write [[reservations]]; see {_DOCS}")
    return parse_config(found)[0], tuple(_reserved(tables))


def _reserved(tables: Sequence[dict[str, Any]]) -> list[Reserved]:
    problems: Problems = []
    out: list[Reserved] = []
    for number, table in enumerate(tables):
        where = f"reservations[{number}]"
        try:
            out.append(_one(table, where))
        except InvalidInput as error:
            told = error.problems or (("", f"{error.message}{f' ({error.hint})' if error.hint else ''}"),)
            problems += [
                (path if path.startswith(where) else f"{where}.{path}".rstrip("."), text) for path, text in told
            ]
    names = [one.wish.name for one in out]
    problems += [(f"reservations.{name}", "is there twice") for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        refusal = refuse(problems, "the configuration")
        refusal.hint = _DOCS
        raise refusal
    return out


def _one(table: dict[str, Any], where: str) -> Reserved:
    words = {key: _plain(value) for key, value in table.items()}
    selector = words.pop("selector", "")
    if "namespace" in words:
        if "project" in words:
            raise InvalidInput("both namespace and project are given", hint="they are the same; give one")
        words["project"] = words.pop("namespace")
    if selector:
        if words.get("nodes") or words.get("node"):
            raise InvalidInput("a selector, and nodes besides", hint="give selector, nodes or node")
        words["nodes"] = 1  # as many as it picks
    problems: Problems = []
    request = convert(words, ReservationRequest, where, problems)
    if problems:
        raise refuse(problems, "the reservation")
    assert isinstance(request, ReservationRequest)
    for key, said in (("from", request.start), ("until", request.until)):
        if str(said).strip().startswith("+") or (key == "until" and str(said).strip() == "now"):
            raise InvalidInput(f"{key} = {said!r} is counted from now", hint="give a time: 2026-01-31T14:00:00Z")
    if request.start == "now" and not request.until:
        raise InvalidInput("nobody says when it begins, nor when it ends", hint="give from and for, or until")
    # As if it were read when it begins: its end must not move with each start of the scheduler. One that began whenever the
    # scheduler did is read a day before it ends, and has begun long ago.
    begun = request.start == "now"
    begins_ms = parse_moment_ms(request.until or 0, 0) - _DAY_MS if begun else parse_moment_ms(request.start, 0)
    wish = parse_reservation(request, begins_ms, "the configuration file")
    if begun:
        wish = structs.replace(wish, start_ms=_LONG_AGO_MS)
    if not isinstance(selector, str):
        raise InvalidInput("the selector is not a text", hint='selector = "pool=gpu"')
    return Reserved(wish, parse_selector(selector))


def _plain(value: Any) -> Any:
    """TOML has times of its own."""
    return value.isoformat() if isinstance(value, datetime | date | time) else value


class Reservations(NoBackground):
    """`take` and `tell`: the facts that wait for the next step, and more of them. `step`: how a step is taken, so that what
    it decides is done; None where nothing is ever done."""

    def __init__(
        self,
        reserved: Sequence[Reserved],
        controller: Controller,
        take: Callable[[], list[Fact]],
        tell: Callable[[Sequence[Fact]], None],
        now_ms: Callable[[], int],
        step: Callable[[Sequence[Fact]], object] | None = None,
    ) -> None:
        self._controller, self._take, self._tell, self._now_ms = controller, take, tell, now_ms
        self._step = step or (lambda facts: controller.step(now_ms(), facts))
        self._open = [one for one in reserved if one.wish.end_ms > now_ms()]
        self._made: dict[str, tuple[NodeName, ...]] = {}
        self._told: dict[str, str] = {}

    async def begin(self) -> None:
        """All nodes and what runs there, then the reservations, and only then whoever waits."""
        facts = self._take()
        self._step([fact for fact in facts if isinstance(fact, _FIRST)])
        self._step(self.look())
        self._tell([fact for fact in facts if not isinstance(fact, _FIRST)])

    async def run(self) -> None:
        while self._open:
            await asyncio.sleep(EVERY_S)
            facts = self.look()
            if facts:
                self._tell(facts)

    def look(self) -> list[Fact]:
        """Reservations that can be made now, or whose nodes are others than they were."""
        now_ms, facts = self._now_ms(), list[Fact]()
        self._open = [one for one in self._open if one.wish.end_ms > now_ms]
        for one in self._open:
            name, before = one.wish.name, self._made.get(one.wish.name)
            if before is not None and (not one.selector or self._picked(one) == before):
                continue
            facts += self._availability(one, name, before, now_ms)
        return facts

    def _availability(self, one: Reserved, name: str, before: tuple[NodeName, ...] | None, now_ms: int) -> list[Fact]:
        wish, picked = one.wish, self._picked(one)
        if one.selector:
            if not picked:
                self._say(name, f"no node matches the selector of reservation {name} yet")
                return []
            wish = structs.replace(wish, count=0, named=picked)
        cluster = self._controller.cluster
        facts: list[Fact] = []
        old = (
            cluster.availability.remove_reservation(name) if before is not None else None
        )  # its own room is not in its way
        try:
            reservation = choose(cluster, wish, now_ms)
        except (Conflict, NotFound, InvalidInput) as error:
            if old is not None:
                cluster.availability.add_reservation(old)
            self._say(name, f"reservation {name} cannot be made yet: {error.message}")
            return []
        if old is not None:
            cluster.availability.add_reservation(old)
            facts.append(ReservationCancelled(name=name, by=wish.by))
        facts.append(ReservationMade(reservation=reservation))
        self._made[name] = picked if one.selector else tuple(node for node, _ in reservation.places)
        nodes = ", ".join(node for node, _ in reservation.places[:5]) + (
            " and more" if len(reservation.places) > 5 else ""
        )
        _log.info("reservation %s: %s for namespace %s", name, nodes, reservation.project)
        self._told.pop(name, None)
        return facts

    def _picked(self, one: Reserved) -> tuple[NodeName, ...]:
        if not one.selector:
            return ()
        nodes = self._controller.cluster.nodes
        return tuple(name for name in sorted(nodes) if all_match(one.selector, nodes[name].labels))

    def _say(self, name: str, text: str) -> None:
        """Once for each new cause."""
        if self._told.get(name) != text:
            self._told[name] = text
            _log.warning("%s; it is tried again", text)
