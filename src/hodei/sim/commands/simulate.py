"""From what was asked on the command line to a finished run: workload, cluster, configuration, simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
from msgspec import Struct, structs

from hodei.model.config import SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, parse_duration_ms
from hodei.sim.cluster import read_cluster
from hodei.sim.driver import Simulation, Tell
from hodei.sim.metrics import Result
from hodei.sim.policies import policy, with_learned_estimates
from hodei.sim.traces import Workload, open_workload
from hodei.sim.traces.workload import WHOLE, Estimates
from hodei.wiring import make_controller

EstimatesWord = Literal["user", "actual", "learned"]
_NOT_USED = "processors were given"


PathType = click.Path(path_type=Path)


class Order(Struct, frozen=True):
    """One run, in words that can be handed to another process."""

    trace: str
    policy: str
    procs: int | None = None
    cluster: str = ""
    per_node: int | None = None
    estimates: EstimatesWord = "user"
    until_ms: int | None = None


class Prepared(Struct, frozen=True):
    order: Order
    workload: Workload
    nodes: list[Node]
    config: SchedulingConfig


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The trace and the options that every simulation has."""
    for decorate in reversed(_RUN_OPTIONS):
        command = decorate(command)
    return command


def order_of(given: SimpleNamespace, name: str) -> Order:
    if given.procs and given.cluster:
        raise InvalidInput("--procs and --cluster exclude each other", hint="give one of them")
    return Order(given.trace, name, given.procs, given.cluster, given.per_node, given.estimates, given.until)


def prepare(order: Order) -> Prepared:
    """Everything that can be wrong with an order is found here, before anything is run."""
    config = policy(order.policy)
    if order.estimates == "learned":
        config = with_learned_estimates(config)
    estimates: Estimates = "actual" if order.estimates == "actual" else "user"
    if not order.cluster:
        workload = open_workload(order.trace, estimates=estimates, procs=order.procs, per_node=order.per_node)
        nodes = workload.nodes
    else:
        nodes = read_cluster(order.cluster)
        workload = _open_for(nodes, order, estimates)
    if not nodes:
        raise InvalidInput(f"{workload.name} does not say what it ran on", hint="give --procs or --cluster")
    return Prepared(order, _under_one_profile(workload), nodes, config)


def simulate(prepared: Prepared, tell: Tell | None = None) -> Result:
    return Simulation(
        prepared.workload,
        make_controller(prepared.config),
        prepared.nodes,
        policy=prepared.order.policy,
        until_ms=until_of(prepared),
        tell=tell,
    ).run()


def until_of(prepared: Prepared) -> int | None:
    """When the run is to stop, in the trace's own time; `--until` counts from the first arrival."""
    until_ms = prepared.order.until_ms
    first = next(iter(prepared.workload.arrivals), None)
    return until_ms + first.at_ms if until_ms is not None and first is not None else until_ms


def _open_for(nodes: list[Node], order: Order, estimates: Estimates) -> Workload:
    """A trace counts in processors or in GPUs; how many of them the cluster has decides which jobs are too large, and the
    smallest node's number how large a member of a gang may be, so that it fits everywhere."""

    def opened(resource: str) -> Workload:
        sizes = [size for node in nodes if (size := node.capacity.get(resource, 0) // WHOLE)]
        procs, smallest = sum(sizes) or None, min(sizes, default=None)
        return open_workload(order.trace, estimates=estimates, procs=procs, per_node=order.per_node or smallest)

    workload = opened(GPU if order.trace.startswith("generate:gpu") else CPU)
    first = next(iter(workload.arrivals), None)
    if first is not None and all(GPU in task.request and CPU not in task.request for task in first.spec.tasks):
        workload = opened(GPU)
    return structs.replace(workload, notes=[note for note in workload.notes if not note.startswith(_NOT_USED)])


def _under_one_profile(workload: Workload) -> Workload:
    """Jobs of a decision log may name profiles of the server that they ran under; here there is one for all."""
    arrivals = workload.arrivals
    if not isinstance(arrivals, list) or all(arrival.spec.profile == "default" for arrival in arrivals):
        return workload
    moved = [structs.replace(one, spec=structs.replace(one.spec, profile="default")) for one in arrivals]
    return structs.replace(workload, arrivals=moved)


def whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
        raise click.BadParameter(f"{text[:40]!r} is not a whole number from 1 to 1,000,000,000")
    return int(text)


def duration(text: str) -> int:
    try:
        return parse_duration_ms(text)
    except InvalidInput as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from error


def some_time(text: str) -> int:
    """A duration that is not 0: nothing happens in no time."""
    found = duration(text)
    if found <= 0:
        raise click.BadParameter(f"{text[:40]!r} is no time at all; write it as 30m, 12h or 30d")
    return found


def numbers_for_json(numbers: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    return {**numbers, "estimates": prepared.order.estimates, "nodes": len(prepared.nodes)}


_RUN_OPTIONS = (
    click.argument("trace", metavar="TRACE"),
    click.option("--procs", type=whole, metavar="N", help="One pool of N processors (GPUs for GPU traces)."),
    click.option("--cluster", default="", metavar="FILE", help="Groups of nodes in YAML or TOML, or 100x64: nodes x cores."),
    click.option(
        "--per-node", type=whole, metavar="N",
        help="Jobs of more processors become gangs of members of N [default with --cluster: the smallest node].",
    ),
    click.option(
        "--estimates", type=click.Choice(("user", "actual", "learned")), default="user",
        help="Run times known to the scheduler: the users' [default], the true ones, or learned ones.",
    ),
    click.option("--until", type=some_time, metavar="T", help="Stop this long after the first arrival: 30d, 12h, 1h30m."),
    click.option("--json", is_flag=True, help="Print the numbers as JSON."),
    click.option("-q", "--quiet", is_flag=True, help="Print neither progress nor notes."),
)  # fmt: skip
out_option = click.option(
    "--out", type=PathType, metavar="DIR", help="Write a report with pictures into this directory."
)
waits_option = click.option("--waits", type=PathType, metavar="FILE", help="Write the wait of each job, as CSV.")
