"""Policies by name: each is a configuration of real plugins, the same that a server could be given."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from hodei.model.config import EstimatesConfig, PreemptionConfig, ProfileConfig, SchedulingConfig, SharesConfig
from hodei.model.errors import InvalidInput, did_you_mean


def _batch(**options: Any) -> ProfileConfig:
    # Of several nodes the fullest that has room, so that large holes stay large.
    return ProfileConfig(queue="batch", scores={"bin_packing": 100}, options={"batch": options})


def _gpu(scorer: str, **options: Any) -> ProfileConfig:
    return ProfileConfig(
        queue="fifo", scores={scorer: 100}, plugins=(scorer,), options={scorer: options} if options else {}
    )


POLICIES: dict[str, ProfileConfig] = {
    "fcfs": _batch(order="fcfs", backfill="none"),
    "easy": _batch(order="fcfs", backfill="easy"),
    "easy-sjbf": _batch(order="fcfs", backfill="easy", fill="shortest"),
    "conservative": _batch(order="fcfs", backfill="conservative"),
    **{name: _batch(order=name, backfill="easy") for name in ("sjf", "saf", "wfp3", "unicef", "f1", "f2", "f3", "f4")},
    "hodei": _batch(order="hodei", backfill="easy", doubling="14h"),
    "hodei-plain": _batch(order="hodei", backfill="easy", doubling="20h"),
    "gang-easy": _batch(order="fcfs", backfill="easy"),
    "easy-deadline": _batch(order="fcfs", backfill="easy", fill="deadline"),
    "largest-fill": _batch(order="fcfs", backfill="easy", fill="largest"),
    "easy-resource": _batch(order="fcfs", backfill="easy", fill="balanced"),
    "random": _gpu("gpu_random"),
    "dotprod": _gpu("gpu_dotprod"),
    "clustering": _gpu("gpu_clustering"),
    "packing": _gpu("gpu_packing"),
    "bestfit": _gpu("gpu_bestfit"),
    "fgd": _gpu("fgd"),
    "fifo": ProfileConfig(queue="fifo"),
    "fair-share": ProfileConfig(
        queue="multifactor", options={"multifactor": {"age_per_hour": 10, "age_max": 250, "share": 1000}}
    ),
    "priority": ProfileConfig(),
}

# One line for each, for those who choose.
ABOUT: dict[str, str] = {
    "fcfs": "first come, first served; nobody passes",
    "easy": "first come, first served; others pass if that does not delay the first (EASY backfilling)",
    "easy-sjbf": "as easy, the shortest of those that may pass first",
    "conservative": "first come, first served; others pass if that delays nobody in front",
    "sjf": "shortest estimate first, with EASY backfilling; long jobs may starve",
    "saf": "smallest estimate times processors first, with EASY backfilling; large jobs may starve",
    "wfp3": "by (wait / estimate) cubed times processors, with EASY backfilling",
    "unicef": "by wait / (estimate times log of processors), with EASY backfilling",
    "f1": "learned formula F1: log10(r) n + 870 log10(s), with EASY backfilling",
    "f2": "learned formula F2: sqrt(r) n + 25600 log10(s), with EASY backfilling",
    "f3": "learned formula F3: r n + 6.86e6 log10(s), with EASY backfilling",
    "f4": "learned formula F4: r sqrt(n) + 5.3e5 log10(s), with EASY backfilling",
    "hodei": "our own: twice the time costs 14 hours in line, by estimates corrected by users' past runs; EASY backfilling",
    "hodei-plain": "our own without history: asking for twice the time costs 20 hours in line; EASY backfilling",
    "gang-easy": "as easy, for workloads of gangs over many nodes",
    "easy-deadline": "as easy, of those that may pass the one first that must start soonest to meet its deadline",
    "largest-fill": "as easy, the largest of those that may pass first",
    "easy-resource": "as easy, of those that may pass whoever uses most of what is least in use first",
    "random": "in order of arrival, GPUs wherever there is room",
    "dotprod": "in order of arrival, GPUs on the node whose free amounts are most like the request",
    "clustering": "in order of arrival, GPUs beside jobs of the same kind",
    "packing": "in order of arrival, GPUs on those that are in use already",
    "bestfit": "in order of arrival, GPUs on the node with the least left over",
    "fgd": "in order of arrival, GPUs where free ones are fragmented least (fragmentation gradient descent)",
    "fifo": "in order of arrival; who does not fit is passed by those who do",
    "fair-share": "who has had least of the cluster goes first; all accounts have one share, use counts half after a week",
    "priority": "a server's default: by priority, higher classes take the place of lower ones",
}


def policy(name: str) -> SchedulingConfig:
    """The configuration of a policy: its profile is the default one, so that every job of a trace is under it."""
    if name not in POLICIES:
        raise InvalidInput(
            f"there is no policy {name!r}{did_you_mean(name, POLICIES)}", hint=f"one of: {', '.join(POLICIES)}"
        )
    return SchedulingConfig(
        profiles={"default": POLICIES[name]},
        preemption=PreemptionConfig(enabled=name == "priority"),
        estimates=EstimatesConfig(source="corrected" if name == "hodei" else "user"),
        shares=SharesConfig(enabled=name == "fair-share"),
    )


def with_learned_estimates(config: SchedulingConfig) -> SchedulingConfig:
    """The same, but run times are learned from runs that have ended; what users say is where it begins."""
    return structs.replace(config, estimates=EstimatesConfig(source="learned"))
