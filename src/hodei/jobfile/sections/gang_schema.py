"""What may be written about the members of a job together: the gang, its tasks over backends, saving work."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hodei.jobfile.types import Command, Duration, Form, Key, Short, Word, about


class TopologyForm(Form, frozen=True):
    """A label of nodes of which all members share one value, as a must or a wish."""

    key: Annotated[Key, about("A label of nodes, or region, zone, datacenter, rack, host, backend.", "rack", "backend")]
    required: Annotated[bool, about("Refuse, or (false) only prefer. Default true.")] = True


class GangForm(Form, frozen=True):
    """How the members of a job belong together."""

    topology: (
        Annotated[
            Key | TopologyForm,
            about("All members in one of these: rack, zone, ...", "rack", {"key": "rack", "required": False}),
        ]
        | None
    ) = None
    on_failure: (
        Annotated[
            Literal["restart", "repair"],
            about("When one member fails or is lost: start all again, or that one alone. Default `restart`."),
        ]
        | None
    ) = None
    assembly_timeout: (
        Annotated[Duration, about("So long after placing all members must run, or all are stopped.", "5m")] | None
    ) = None
    elastic: (
        Annotated[bool, about("Take in more members while it runs, and give them up first. Default false.")] | None
    ) = None


class TransferCostForm(Form, frozen=True):
    """What moving the data of one member between two backends costs, either way."""

    between: Annotated[list[Word], Meta(max_length=64), about("Two backends.", ["cluster-a", "cluster-b"])]
    cost: Annotated[float, Meta(ge=0, le=1_000_000), about("In any unit, to a thousandth.", 0.09)]


class DistributionForm(Form, frozen=True):
    """How the tasks of a job lie over backends."""

    model: Annotated[
        Literal["colocated", "distributed", "hub_and_spoke"],
        about("All on one backend; each on any of its own, the cheapest way; or the same with costs to a hub alone."),
    ]
    hub: Annotated[Word, about("The task in the middle; needed for `hub_and_spoke`.")] | None = None
    transfer_costs: (
        Annotated[
            list[TransferCostForm],
            Meta(max_length=1024),
            about("What moving data costs; 0 between backends that are not named."),
        ]
        | None
    ) = None


class CheckpointForm(Form, frozen=True):
    """How a run is told to save its work before it is stopped."""

    signal: Annotated[Short, about("A signal to the run; not together with `command`.", "USR1")] | None = None
    command: Command | None = None
    timeout: Annotated[Duration, about("How long saving may take. Default `30s`.", "2m")] | None = None
    file: (
        Annotated[
            Annotated[str, Meta(max_length=4096)],
            about("A file whose time of change says when the work was last saved.", "/srv/model/checkpoint.json"),
        ]
        | None
    ) = None
    every: (
        Annotated[Duration, about("Save also while it runs, this often; needs `signal` or `command`.", "10m")] | None
    ) = None
