"""From the command line to a finished simulation: workload, cluster, configuration, run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
import msgspec
from msgspec import Struct, structs

from hodei.cli.options import output_option
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.config import EstimatesConfig, NodeConfig, SchedulingConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, parse_duration_ms, parse_quantity
from hodei.sim.driver import OnProgress, Simulation
from hodei.sim.metrics import Result
from hodei.sim.policies import policy
from hodei.sim.traces import Workload, open_workload
from hodei.sim.traces.workload import BACKEND, PROCS_IGNORED, WHOLE, Estimates, uniform_nodes
from hodei.wiring import instant_node, make_controller, node_offer

EstimateSource = Literal["user", "actual", "learned"]
PathType = click.Path(path_type=Path)


class SimulationRequest(Struct, frozen=True):
    """One simulation as plain values, so that it can be sent to another process."""

    trace: str
    policy: str
    procs: int | None = None
    cluster: str = ""
    per_node: int | None = None
    estimates: EstimateSource = "user"
    until_ms: int | None = None


class PreparedSimulation(Struct, frozen=True):
    request: SimulationRequest
    workload: Workload
    nodes: list[Node]
    config: SchedulingConfig

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
    if not request.cluster:
        workload = open_workload(request.trace, estimates=estimates, procs=request.procs, per_node=request.per_node)
        nodes = workload.nodes
    else:
        nodes = read_cluster(request.cluster)
        workload = _open_for_cluster(nodes, request, estimates)
    if not nodes:
        raise InvalidInput(f"{workload.name} defines no machine", hint="give --procs or --cluster")
    return PreparedSimulation(request, _with_default_profile(workload), nodes, config)


def simulate(prepared: PreparedSimulation, on_progress: OnProgress | None = None) -> Result:
    return Simulation(
        prepared.workload,
        make_controller(prepared.config),
        prepared.nodes,
        policy=prepared.request.policy,
        until_ms=prepared.until_ms,
        on_progress=on_progress,
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


MAX_NODES = 1_000_000
_SHORT = re.compile(r"(?P<count>\d+)x(?P<cpus>\d+)(?:x(?P<memory>\d\S*))?")
_MEMORY_PER_CPU = 4 * 2**30
_HINT = "write groups like {name: big, count: 100, cpu: 64, memory: 256Gi}; see docs/how-to/replay-a-trace.md"
# Other tables of a server's configuration file, so that the file can be given as it is.
_OTHER_TABLES = ("server", "scheduling")


class NodeGroup(NodeConfig, frozen=True, forbid_unknown_fields=True):
    """`count` equal nodes called NAME, or NAME-00, NAME-01 and so on. Other keys are those of a server's configuration."""

    count: int = 1


def read_cluster(text: str) -> list[Node]:
    """The nodes of a file with groups of equal nodes, or of the short form COUNTxCPUS[xMEMORY]."""
    path = Path(text)
    short = _SHORT.fullmatch(text)
    if short and not path.exists():
        return _short_cluster(text, int(short["count"]), int(short["cpus"]), short["memory"] or "")
    groups = _read_groups(path)
    total = sum(max(group.count, 0) for group in groups)
    if not 1 <= total <= MAX_NODES:
        raise InvalidInput(f"{path} has {total:,} nodes", hint=f"give from 1 to {MAX_NODES:,}")
    nodes = [node for group in groups for node in _nodes_of(group, path)]
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{path} has two nodes called {duplicate!r}", hint="give each group a name of its own")
    return nodes


def _short_cluster(text: str, count: int, cpus: int, memory: str) -> list[Node]:
    if not 1 <= count <= MAX_NODES or not 1 <= cpus <= 1_000_000:
        raise InvalidInput(f"invalid cluster {text!r}", hint="write it like 100x64: nodes, then cores of each")
    per_cpu = parse_quantity(memory) // cpus if memory else _MEMORY_PER_CPU
    return uniform_nodes(count * cpus, per_node=cpus, per_unit={MEMORY: per_cpu})


def _read_groups(path: Path) -> list[NodeGroup]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        hint = f"name a file, or write 100x64 for 100 nodes of 64 cores; in a file {_HINT}"
        raise InvalidInput(f"cannot read the cluster {path}: {error.strerror}", hint=hint) from error
    found = _decode(raw, path)
    if isinstance(found, dict):
        for key in found:
            if key not in ("nodes", *_OTHER_TABLES):
                raise InvalidInput(f"{path}: unknown key {key!r}{did_you_mean(str(key), ['nodes'])}", hint=_HINT)
        found = found.get("nodes", [])
    if not isinstance(found, list) or not found:
        raise InvalidInput(f"{path} lists no nodes", hint=_HINT)
    groups = []
    for number, group in enumerate(found, 1):
        try:
            groups.append(msgspec.convert(group, NodeGroup))
        except msgspec.ValidationError as error:
            unknown = re.search(r"unknown field `([^`]*)`", str(error))
            guess = did_you_mean(unknown[1], NodeGroup.__struct_fields__) if unknown else ""
            raise InvalidInput(f"{path}, group {number}: {error}{guess}", hint=_HINT) from error
    return groups


def _decode(raw: bytes, path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(raw.decode())
        except ValueError as error:
            raise InvalidInput(f"{path} is not TOML: {error}", hint=_HINT) from error
    documents = load_yaml(raw, name=str(path))
    if len(documents) > 1:
        raise InvalidInput(f"{path} has {len(documents)} documents", hint="keep one list of groups")
    return documents[0] if documents else []


def _nodes_of(group: NodeGroup, path: Path) -> list[Node]:
    if group.count < 1:
        raise InvalidInput(f"{path}: group {group.name!r} has a count of {group.count}", hint="give 1 or more")
    node = structs.replace(instant_node(node_offer(group)), backend=BACKEND, kind=BACKEND)
    if group.count == 1:
        return [node]
    width = len(str(group.count - 1))
    return [structs.replace(node, name=f"{group.name}-{number:0{width}}") for number in range(group.count)]


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
    for decorate in reversed(_RUN_OPTIONS):
        command = decorate(command)
    return command


_RUN_OPTIONS = (
    click.argument("trace", metavar="TRACE"),
    click.option("--procs", type=positive_int, metavar="N", help="One pool of N processors (GPUs for GPU traces)."),
    click.option("--cluster", default="", metavar="FILE", help="Groups of nodes in YAML or TOML, or 100x64: nodes x cores."),
    click.option(
        "--per-node", type=positive_int, metavar="N",
        help="Jobs of more processors become gangs of members of N [default with --cluster: the smallest node].",
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
