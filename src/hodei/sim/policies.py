"""Policies by name: each is a configuration of real plugins, the same that a server could be given."""

from __future__ import annotations

from typing import Any

from hodei.model.config import PreemptionConfig, ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.text import did_you_mean


def _batch(**options: Any) -> ProfileConfig:
    return ProfileConfig(queue="batch", options={"batch": options})


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
    "gang-easy": _batch(order="fcfs", backfill="easy"),
    "deadline": _batch(order="fcfs", backfill="easy", fill="deadline"),
    "largest-fill": _batch(order="fcfs", backfill="easy", fill="largest"),
    "random": _gpu("gpu_random"),
    "dotprod": _gpu("gpu_dotprod"),
    "clustering": _gpu("gpu_clustering"),
    "packing": _gpu("gpu_packing"),
    "bestfit": _gpu("gpu_bestfit"),
    "fgd": _gpu("fgd"),
    "priority": ProfileConfig(),
}


def policy(name: str) -> SchedulingConfig:
    """The configuration of a policy: its profile is the default one, so that every job of a trace is under it."""
    if name not in POLICIES:
        raise InvalidInput(
            f"there is no policy {name!r}{did_you_mean(name, POLICIES)}", hint=f"one of: {', '.join(POLICIES)}"
        )
    return SchedulingConfig(
        profiles={"default": POLICIES[name]}, preemption=PreemptionConfig(enabled=name == "priority")
    )
