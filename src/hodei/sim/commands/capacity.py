"""`hodei sim capacity TRACE --offer FILE`: one workload on nodes that are ordered and released, by several strategies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from hodei.model.errors import InvalidInput, did_you_mean
from hodei.sim.commands.compare import compare_runs, policy_names
from hodei.sim.commands.simulate import (
    CapacityRequest,
    PathType,
    SimulationRequest,
    elastic_options,
    out_option,
    positive_int,
    waits_option,
)
from hodei.sim.policies import policy
from hodei.sim.provider import STRATEGIES, ProviderPolicy

_COLUMNS = (
    "jobs", "never_started", "mean_wait_s", "p95_wait_s", "cost", "node_hours", "wasted_hours", "used_part",
    "nodes_started", "boots_failed", "orders_refused", "reclaimed",
)  # fmt: skip
_PERCENT = click.IntRange(0, 100)


@click.command()
@elastic_options
@click.option(
    "--offer",
    required=True,
    type=PathType,
    metavar="FILE",
    help="Groups of nodes that can be ordered, in TOML or YAML.",
)
@click.option(
    "--strategies", type=policy_names, default=",".join(STRATEGIES), metavar="A,B,C",
    help=f"Of {', '.join(STRATEGIES)} [default: all].",
)  # fmt: skip
@click.option(
    "--policy",
    "policy_name",
    default="easy",
    metavar="NAME",
    help="Order of the jobs [default: easy]; see: hodei sim policies.",
)
@click.option(
    "--boot-jitter",
    type=_PERCENT,
    default=20,
    metavar="P",
    help="Boot times vary by up to this many percent [default: 20].",
)
@click.option(
    "--failed-boots",
    type=_PERCENT,
    default=0,
    metavar="P",
    help="Percent of ordered nodes that never become ready [default: 0].",
)
@click.option(
    "--refused",
    type=_PERCENT,
    default=0,
    metavar="P",
    help="Percent of orders that are refused for lack of capacity [default: 0].",
)
@click.option(
    "--seed", type=positive_int, default="1", metavar="N", help="Of boot times, failures and losses [default: 1]."
)
@out_option
@waits_option
@click.option("--workers", type=positive_int, metavar="N", help="Number of parallel runs [default: one for each core].")
def capacity(**options: Any) -> int:
    """Run a workload on nodes that are ordered when jobs need them, and compare waits and costs.

    \b
    fixed         the nodes marked as such in the offer, paid from beginning to end
    planner       as a server does: ordered for what fits together, released when idle
    node-per-job  a node for each pending job, released when idle

    TRACE: see hodei sim traces.
    """  # fmt: skip
    given = SimpleNamespace(**options)
    for name in given.strategies:
        if name not in STRATEGIES:
            raise InvalidInput(
                f"there is no strategy {name!r}{did_you_mean(name, list(STRATEGIES))}",
                hint=f"use {', '.join(STRATEGIES)}",
            )
    policy(given.policy_name)
    provider = ProviderPolicy(given.seed, given.boot_jitter, given.failed_boots, given.refused)
    requests = {
        name: SimulationRequest(
            given.trace, given.policy_name, per_node=given.per_node, estimates=given.estimates, until_ms=given.until,
            capacity=CapacityRequest(str(given.offer), name, provider),
        )
        for name in given.strategies
    }  # fmt: skip
    return compare_runs(requests, given, _COLUMNS)
