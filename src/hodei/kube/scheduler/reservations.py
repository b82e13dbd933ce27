"""Reservations of the configuration file: capacity for a namespace in a time window.

The file is read at every start, so its times must not be relative to now. What cannot be reserved yet, because nodes are
missing or another reservation holds them, is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from hodei import configuration
from hodei.api.resources import ReservationRequest, parse_moment_ms, parse_reservation
from hodei.control.controller import Controller
from hodei.control.reservations.reservations import choose_nodes
from hodei.jobfile.check import convert, refuse
from hodei.jobfile.values import Problems
from hodei.kube.scheduler.background import BackgroundTask
from hodei.model.affinity import Requirement, all_match, parse_selector
from hodei.model.config import Config
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.facts import Fact, JobRestored, NodeJoined, ReservationDeleted, ReservationMade
from hodei.model.ids import NodeName
from hodei.model.reservation import ReservationSpec

_log = logging.getLogger(__name__)
RETRY_EVERY_S = 10.0
_DOCS = "docs/how-to/kubernetes.md#reservations"
_CLUSTER_FACTS = (NodeJoined, JobRestored)
_DAY_MS = 86_400_000
_PAST_MS = 1


class ConfiguredReservation(Struct, frozen=True):
    """A reservation of the file. `selector`: all matching nodes, whenever they join."""

    spec: ReservationSpec
    selector: tuple[Requirement, ...] = ()


def read_file(path: Path | None) -> tuple[Config, tuple[ConfiguredReservation, ...]]:
    """A configuration and its `[[reservations]]`. InvalidInput names everything that is wrong."""
    if path is None:
        return Config(), ()
    found, lines = configuration.read_file(path)
    tables = found.pop("reservations", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidInput("reservations is not a list of tables", hint=f"write [[reservations]]; see {_DOCS}")
    return configuration.read_config(found, lines)[0], tuple(_read_tables(tables))


def _read_tables(tables: Sequence[dict[str, Any]]) -> list[ConfiguredReservation]:
    problems: Problems = []
    out: list[ConfiguredReservation] = []
    for number, table in enumerate(tables):
        where = f"reservations[{number}]"
        try:
            out.append(_read_table(table, where))
        except InvalidInput as error:
            problems_here = error.problems or (("", f"{error.message}{f' ({error.hint})' if error.hint else ''}"),)
            problems += [
                (path if path.startswith(where) else f"{where}.{path}".rstrip("."), text)
                for path, text in problems_here
            ]
    names = [reservation.spec.name for reservation in out]
    problems += [(f"reservations.{name}", "is given twice") for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        refusal = refuse(problems, "the configuration")
        refusal.hint = _DOCS
        raise refusal
    return out


def _read_table(table: dict[str, Any], where: str) -> ConfiguredReservation:
    fields = {key: _toml_value(value) for key, value in table.items()}
    selector = fields.pop("selector", "")
    if "namespace" in fields:
        if "project" in fields:
            raise InvalidInput("both namespace and project are given", hint="they mean the same; give one")
        fields["project"] = fields.pop("namespace")
    if selector:
        if fields.get("nodes") or fields.get("node"):
            raise InvalidInput("both a selector and nodes are given", hint="give selector, nodes or node")
        fields["nodes"] = 1  # replaced by the number of matching nodes
    problems: Problems = []
    request = convert(fields, ReservationRequest, where, problems)
    if problems:
        raise refuse(problems, "the reservation")
    assert isinstance(request, ReservationRequest)
    for key, value in (("from", request.start), ("until", request.until)):
        if str(value).strip().startswith("+") or (key == "until" and str(value).strip() == "now"):
            raise InvalidInput(
                f"{key} = {value!r} is relative to now, which changes with every restart",
                hint="give a time: 2026-01-31T14:00:00Z",
            )
    if request.start == "now" and not request.until:
        raise InvalidInput("neither its start nor its end is given", hint="give from and for, or until")
    # Its end must not move with each restart, so it is parsed relative to its start, or to a day before its end if it starts
    # at once (then it has started long ago).
    starts_at_once = request.start == "now"
    start_ms = parse_moment_ms(request.until or 0, 0) - _DAY_MS if starts_at_once else parse_moment_ms(request.start, 0)
    spec = parse_reservation(request, start_ms, "the configuration file")
    if starts_at_once:
        spec = structs.replace(spec, start_ms=_PAST_MS)
    if not isinstance(selector, str):
        raise InvalidInput("the selector is not a string", hint='selector = "pool=gpu"')
    return ConfiguredReservation(spec, parse_selector(selector))


def _toml_value(value: Any) -> Any:
    """TOML has date and time types."""
    return value.isoformat() if isinstance(value, datetime | date | time) else value


class Reservations(BackgroundTask):
    """Makes the reservations of the file, and follows nodes that come and go.

    `take_facts` and `add_facts`: the facts of the next step. `step`: runs a step and carries it out; by default only decides."""

    def __init__(
        self,
        reservations: Sequence[ConfiguredReservation],
        controller: Controller,
        take_facts: Callable[[], list[Fact]],
        add_facts: Callable[[Sequence[Fact]], None],
        now_ms: Callable[[], int],
        step: Callable[[Sequence[Fact]], object] | None = None,
    ) -> None:
        self._controller, self._take_facts, self._add_facts, self._now_ms = controller, take_facts, add_facts, now_ms
        self._step = step or (lambda facts: controller.step(now_ms(), facts))
        self._current = [one for one in reservations if one.spec.end_ms > now_ms()]
        self._nodes_of: dict[str, tuple[NodeName, ...]] = {}
        self._logged: dict[str, str] = {}

    async def start(self) -> None:
        """Nodes and running pods first, then the reservations, then pending pods."""
        facts = self._take_facts()
        self._step([fact for fact in facts if isinstance(fact, _CLUSTER_FACTS)])
        self._step(self.reconcile())
        self._add_facts([fact for fact in facts if not isinstance(fact, _CLUSTER_FACTS)])

    async def run(self) -> None:
        while self._current:
            await asyncio.sleep(RETRY_EVERY_S)
            facts = self.reconcile()
            if facts:
                self._add_facts(facts)

    def reconcile(self) -> list[Fact]:
        """Make the reservations that can be made now, and again those whose nodes have changed."""
        now_ms, facts = self._now_ms(), list[Fact]()
        self._current = [one for one in self._current if one.spec.end_ms > now_ms]
        for one in self._current:
            before = self._nodes_of.get(one.spec.name)
            if before is None or (one.selector and self._matching_nodes(one) != before):
                facts += self._reserve(one, now_ms, again=before is not None)
        return facts

    def _reserve(self, configured: ConfiguredReservation, now_ms: int, *, again: bool) -> list[Fact]:
        spec, matching = configured.spec, self._matching_nodes(configured)
        name = spec.name
        if configured.selector:
            if not matching:
                self._log_once(name, f"no node matches the selector of reservation {name} yet")
                return []
            spec = structs.replace(spec, count=0, named=matching)
        availability = self._controller.cluster.availability
        # The old reservation must not block the new one.
        old = availability.remove_reservation(name) if again else None
        try:
            reservation = choose_nodes(self._controller.cluster, spec, now_ms)
        except (Conflict, NotFound, InvalidInput) as error:
            self._log_once(name, f"reservation {name} cannot be made yet: {error.message}")
            return []
        finally:
            if old is not None:
                availability.add_reservation(old)
        nodes = tuple(node for node, _ in reservation.places)
        self._nodes_of[name] = matching if configured.selector else nodes
        more = " and more" if len(nodes) > 5 else ""
        _log.info("reservation %s: %s for namespace %s", name, ", ".join(nodes[:5]) + more, reservation.project)
        self._logged.pop(name, None)
        made = ReservationMade(reservation=reservation)
        return [ReservationDeleted(name=name, by=spec.by), made] if old is not None else [made]

    def _matching_nodes(self, configured: ConfiguredReservation) -> tuple[NodeName, ...]:
        if not configured.selector:
            return ()
        nodes = self._controller.cluster.nodes
        return tuple(name for name in sorted(nodes) if all_match(configured.selector, nodes[name].labels))

    def _log_once(self, name: str, text: str) -> None:
        if self._logged.get(name) != text:
            self._logged[name] = text
            _log.warning("%s; it is tried again", text)
