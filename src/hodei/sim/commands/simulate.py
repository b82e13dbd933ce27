"""From the command line to a finished simulation: workload, cluster, configuration, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
from msgspec import Struct, structs

from hodei.cli.options import output_option
from hodei.control.capacity.scaling import CapacityPolicy
from hodei.model.config import EstimatesConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, parse_duration_ms
from hodei.sim.clusters import read_cluster, read_offer
from hodei.sim.driver import OnProgress, Simulation
from hodei.sim.metrics import Result
from hodei.sim.policies import policy
from hodei.sim.provider import FIXED, STRATEGIES, Provider, ProviderPolicy
from hodei.sim.traces import Workload, open_workload
from hodei.sim.traces.workload import PROCS_IGNORED, WHOLE, Estimates
from hodei.wiring import make_controller

EstimateSource = Literal["user", "actual", "learned"]
PathType = click.Path(path_type=Path)


class CapacityRequest(Struct, frozen=True):
    """Nodes of an offer are ordered by a strategy, or are a fixed cluster."""

    offer: str
    strategy: str
    provider: ProviderPolicy


class SimulationRequest(Struct, frozen=True):
    """One simulation as plain values, so that it can be sent to another process."""

    trace: str
    policy: str
    procs: int | None = None
    cluster: str = ""
    per_node: int | None = None
    estimates: EstimateSource = "user"
    until_ms: int | None = None
    capacity: CapacityRequest | None = None


class PreparedSimulation(Struct, frozen=True):
    request: SimulationRequest
    workload: Workload
    nodes: list[Node]
    config: SchedulingConfig
    capacity: CapacityPolicy | None = None

    @property
    def until_ms(self) -> int | None:
        """When to stop, in the trace's own time; `--until` counts from the first arrival."""
        until_ms = self.request.until_ms
        first = next(iter(self.workload.arrivals), None)
        return until_ms + first.at_ms if until_ms is not None and first is not None else until_ms

    def for_json(self, numbers: dict[str, Any]) -> dict[str, Any]:
        return {**numbers, "estimates": self.request.estimates, "nodes": len(self.nodes)}


def request_of(given: SimpleNamespace, policy: str) -> SimulationRequest:
    if given.procs and given.cluster:
        raise InvalidInput("--procs and --cluster exclude each other", hint="give one of them")
    return SimulationRequest(
        given.trace, policy, given.procs, given.cluster, given.per_node, given.estimates, given.until
    )


def prepare(request: SimulationRequest) -> PreparedSimulation:
    """Finds everything that is wrong with a request before anything runs."""
    config = policy(request.policy)
    if request.estimates == "learned":
        config = structs.replace(config, estimates=EstimatesConfig(source="learned"))
    estimates: Estimates = "actual" if request.estimates == "actual" else "user"
    capacity = None
    if request.capacity is not None:
        offer = read_offer(Path(request.capacity.offer))
        nodes = offer.fixed if request.capacity.strategy == FIXED else offer.nodes
        if not nodes:
            raise InvalidInput(
                f"the fixed cluster of {request.capacity.offer} has no nodes", hint="give a group fixed = 10"
            )
        # The same jobs for every strategy.
        workload, capacity = _open_for_cluster(offer.nodes, request, estimates), offer.capacity
    elif not request.cluster:
        workload = open_workload(request.trace, estimates=estimates, procs=request.procs, per_node=request.per_node)
        nodes = workload.nodes
    else:
        nodes = read_cluster(request.cluster)
        workload = _open_for_cluster(nodes, request, estimates)
    if not nodes:
        raise InvalidInput(f"{workload.name} defines no machine", hint="give --procs or --cluster")
    return PreparedSimulation(request, _with_default_profile(workload), nodes, config, capacity)


def simulate(prepared: PreparedSimulation, on_progress: OnProgress | None = None) -> Result:
    controller, provider, name = make_controller(prepared.config), None, prepared.request.policy
    if (wanted := prepared.request.capacity) is not None:
        if prepared.capacity is not None:
            controller.scaling.policy = prepared.capacity
        provider = Provider(prepared.nodes, wanted.provider, STRATEGIES[wanted.strategy])
        name = wanted.strategy
    return Simulation(
        prepared.workload,
        controller,
        prepared.nodes,
        policy=name,
        until_ms=prepared.until_ms,
        on_progress=on_progress,
        provider=provider,
    ).run()


def _open_for_cluster(nodes: list[Node], request: SimulationRequest, estimates: Estimates) -> Workload:
    """A trace counts in processors or in GPUs. The cluster's total of them decides which jobs are too large, and its
    smallest node the size of a gang's members, so that a member fits on every node."""

    def open_by(resource: str) -> Workload:
        sizes = [size for node in nodes if (size := node.capacity.get(resource, 0) // WHOLE)]
        procs, smallest = sum(sizes) or None, min(sizes, default=None)
        return open_workload(request.trace, estimates=estimates, procs=procs, per_node=request.per_node or smallest)

    workload = open_by(GPU if request.trace.startswith("generate:gpu") else CPU)
    first = next(iter(workload.arrivals), None)
    if first is not None and all(GPU in task.request and CPU not in task.request for task in first.spec.tasks):
        workload = open_by(GPU)
    return structs.replace(workload, notes=[note for note in workload.notes if note != PROCS_IGNORED])


def _with_default_profile(workload: Workload) -> Workload:
    """Jobs of a decision log may name profiles of their server; a simulation has one profile."""
    arrivals = workload.arrivals
    if not isinstance(arrivals, list) or all(arrival.spec.profile == "default" for arrival in arrivals):
        return workload
    moved = [structs.replace(one, spec=structs.replace(one.spec, profile="default")) for one in arrivals]
    return structs.replace(workload, arrivals=moved)


def positive_int(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
        raise click.BadParameter(f"{text[:40]!r} is not a whole number from 1 to 1,000,000,000")
    return int(text)


def duration_ms(text: str) -> int:
    try:
        found = parse_duration_ms(text)
    except InvalidInput as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from error
    if found <= 0:
        raise click.BadParameter(f"{text[:40]!r} is not a positive duration; write it as 30m, 12h or 30d")
    return found


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The trace and the options of every simulation."""
    return _decorated(command, (_TRACE, *_CLUSTER_OPTIONS, *_COMMON_OPTIONS))


def elastic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same without a cluster."""
    return _decorated(command, (_TRACE, *_COMMON_OPTIONS))


def _decorated(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    for decorate in reversed(options):
        command = decorate(command)
    return command


_TRACE = click.argument("trace", metavar="TRACE")
_CLUSTER_OPTIONS = (
    click.option("--procs", type=positive_int, metavar="N", help="One pool of N processors (GPUs for GPU traces)."),
    click.option("--cluster", default="", metavar="FILE", help="Groups of nodes in YAML or TOML, or 100x64: nodes x cores."),
)  # fmt: skip
_COMMON_OPTIONS = (
    click.option(
        "--per-node", type=positive_int, metavar="N",
        help="Jobs of more processors become gangs of members of N [default with --cluster or --offer: the smallest node].",
    ),
    click.option(
        "--estimates", type=click.Choice(("user", "actual", "learned")), default="user",
        help="Run times known to the scheduler: the users' [default], the true ones, or learned ones.",
    ),
    click.option("--until", type=duration_ms, metavar="T", help="Stop this long after the first arrival: 30d, 12h, 1h30m."),
    click.option("-q", "--quiet", is_flag=True, help="Print neither progress nor notes."),
    output_option,
)  # fmt: skip
out_option = click.option(
    "--out", type=PathType, metavar="DIR", help="Write a report with pictures into this directory."
)
waits_option = click.option("--waits", type=PathType, metavar="FILE", help="Write the wait of each job, as CSV.")
