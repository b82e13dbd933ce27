"""Policies by name: configurations of the real plugins, valid for a server too."""

from __future__ import annotations

from typing import Any

from hodei.model.config import EstimatesConfig, PreemptionConfig, ProfileConfig, SchedulingConfig, SharesConfig
from hodei.model.errors import InvalidInput, did_you_mean


def _batch(**options: Any) -> ProfileConfig:
    # The fullest node that fits, so that large free blocks stay whole.
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

# For `hodei sim policies`.
ABOUT: dict[str, str] = {
    "fcfs": "first come, first served; no backfilling",
    "easy": "first come, first served; later jobs backfill if that does not delay the first (EASY)",
    "easy-sjbf": "easy, shortest backfill candidate first",
    "conservative": "first come, first served; later jobs backfill if that delays no job ahead of them",
    "sjf": "shortest estimate first, EASY backfilling; long jobs may starve",
    "saf": "smallest estimate times processors first, EASY backfilling; large jobs may starve",
    "wfp3": "by (wait / estimate) cubed times processors, EASY backfilling",
    "unicef": "by wait / (estimate times log of processors), EASY backfilling",
    "f1": "learned formula F1: log10(r) n + 870 log10(s), EASY backfilling",
    "f2": "learned formula F2: sqrt(r) n + 25600 log10(s), EASY backfilling",
    "f3": "learned formula F3: r n + 6.86e6 log10(s), EASY backfilling",
    "f4": "learned formula F4: r sqrt(n) + 5.3e5 log10(s), EASY backfilling",
    "hodei": "Hodei's own: doubling the run time costs 14 hours of waiting; estimates corrected from past runs of the user",
    "hodei-plain": "hodei with the users' estimates: doubling the run time costs 20 hours of waiting",
    "gang-easy": "easy, for gangs over many nodes",
    "easy-deadline": "easy, backfill candidate with the earliest latest start for its deadline first",
    "largest-fill": "easy, largest backfill candidate first",
    "easy-resource": "easy, backfill candidate that uses most of the least used resource first",
    "random": "in order of arrival, GPUs on a random node",
    "dotprod": "in order of arrival, GPUs on the node whose free amounts are most similar to the request",
    "clustering": "in order of arrival, GPUs on nodes with jobs of the same kind",
    "packing": "in order of arrival, GPUs that are partly used first",
    "bestfit": "in order of arrival, GPUs on the node with the least left over",
    "fgd": "in order of arrival, GPUs where the least fragmentation results (fragmentation gradient descent)",
    "fifo": "in order of arrival; a job that does not fit blocks no other",
    "fair-share": "least past use of the cluster first; equal shares, half-life one week",
    "priority": "the server's default: by priority, with preemption",
}


def policy(name: str) -> SchedulingConfig:
    """The configuration of a policy. Its profile is the default one, so that it applies to every job of a trace."""
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
