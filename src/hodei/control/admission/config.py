"""The profile router from the configuration: routes, scopes, fallbacks, escalation, breaker.

`find_problems` finds all mistakes at once, each with its path; `build_router` needs a configuration without any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hodei.control.admission.escalation import EscalationPolicy, Escalations, Fallback
from hodei.control.admission.routing import (
    ProfileAvailability,
    ProfileRouter,
    RouteRule,
    Routing,
    WaitDefaults,
    WaitLimits,
)
from hodei.control.lifecycle.retry import BreakerPolicy
from hodei.model.affinity import parse_selector
from hodei.model.config import EscalationConfig, RouteConfig, SchedulingConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.job import PRIORITY_CLASSES
from hodei.model.resources import parse_duration_ms

Problems = list[tuple[str, str]]
# Jobs that are tried in one step: many, so that one commit starts many; not all, because new facts are waiting too.
BATCH, MAX_BATCH = 1000, 100_000
# Names of profiles.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def build_router(
    config: SchedulingConfig, profiles: Collection[str], broken: Mapping[str, str] | None = None
) -> ProfileRouter:
    """InvalidInput, with all problems, if there are any. `broken`: profiles that could not be built, and why."""
    wrong = find_problems(config, {*profiles, *(broken or {})})
    if wrong:
        path, text = wrong[0]
        raise InvalidInput(f"scheduling.{path}: {text}", problems=tuple(wrong), hint="docs/reference/configuration.md")
    named = config.profiles.items()
    return ProfileRouter(
        Routing(
            [_rule(route) for route in config.routes],
            {name: profile.projects for name, profile in named},
            _wait_defaults(config),
            ProfileAvailability(
                config.unavailable_profile,
                profiles,
                {name: profile.fallback for name, profile in named if profile.fallback},
                [name for name, profile in named if profile.paused],
                broken,
            ),
        ),
        Escalations(
            _policy(config.escalation),
            {name: _policy(profile.escalation) for name, profile in named if profile.escalation is not None},
            {
                name: Fallback(profile.fallback, parse_duration_ms(profile.fallback_after))
                for name, profile in named
                if profile.fallback
            },
            chain=config.fallback if config.fallback_enabled else (),
        ),
        BreakerPolicy(
            config.breaker.rounds,
            parse_duration_ms(config.breaker.within),
            parse_duration_ms(config.breaker.pause),
            parse_duration_ms(config.breaker.max_pause),
        ),
    )


def _wait_defaults(config: SchedulingConfig) -> WaitDefaults:
    server = _wait_limits(config, "")
    return WaitDefaults({name: _wait_limits(config, name) for name in config.profiles}, server)


def _wait_limits(config: SchedulingConfig, name: str) -> WaitLimits:
    """The limits of a profile, or those of the server for what it leaves out."""
    profile = config.profiles.get(name)
    of_profile = (profile.scheduling_timeout, profile.max_queue_time) if profile is not None else ("", "")
    timeout, queue_time = of_profile[0] or config.scheduling_timeout, of_profile[1] or config.max_queue_time
    return WaitLimits(
        parse_duration_ms(timeout),
        parse_duration_ms(queue_time),
        f"profile {name}" if of_profile[0] else "the server",
        f"profile {name}" if of_profile[1] else "the server",
        parse_duration_ms(profile.grace) if profile is not None and profile.grace else 0,
    )


def _rule(route: RouteConfig) -> RouteRule:
    when = route.when
    return RouteRule(
        profile=route.profile,
        gpu=when.gpu,
        priority_at_least=None if when.priority_at_least is None else _priority(when.priority_at_least),
        project=when.project,
        user=when.user,
        labels=parse_selector(when.labels),
        workload=when.workload,
        text=", ".join(_conditions(route)) or "every job",
    )


def _conditions(route: RouteConfig) -> Iterator[str]:
    when = route.when
    if when.gpu is not None:
        yield "gpu" if when.gpu else "no gpu"
    if when.priority_at_least is not None:
        yield f"priority at least {when.priority_at_least}"
    for what in ("project", "user", "labels", "workload"):
        if getattr(when, what):
            yield f"{what} {getattr(when, what)}"


def _policy(config: EscalationConfig) -> EscalationPolicy:
    return EscalationPolicy(
        config.relax,
        parse_duration_ms(config.relax_after),
        parse_duration_ms(config.promote_after),
        _priority(config.promote_to),
    )


def _priority(given: str | int) -> int:
    if isinstance(given, int):
        return given
    if given not in PRIORITY_CLASSES:
        raise InvalidInput(
            f"there is no priority {given!r}{did_you_mean(given, PRIORITY_CLASSES)}",
            hint=f"one of: {', '.join(PRIORITY_CLASSES)}, or a whole number",
        )
    return PRIORITY_CLASSES[given]


def batch_of(parallel: bool | int) -> int:
    """How many jobs are tried in one step; InvalidInput for a number out of range."""
    if isinstance(parallel, bool):
        return BATCH if parallel else 1
    if not 1 <= parallel <= MAX_BATCH:
        raise InvalidInput(
            f"parallel_scheduling = {parallel} is out of range",
            hint=f"true, false, or how many jobs at once: 1 to {MAX_BATCH}",
        )
    return parallel


def find_problems(config: SchedulingConfig, profiles: Collection[str]) -> Problems:
    """The problems of what this module reads; paths are below `scheduling`."""
    out: Problems = []

    def check(path: str, read: Callable[[Any], object], value: Any) -> None:
        try:
            read(value)
        except InvalidInput as error:
            out.append((path, f"{error.message}{'; ' + error.hint if error.hint else ''}"))

    def known(path: str, name: str) -> None:
        if name not in profiles:
            near = did_you_mean(name, profiles)
            out.append((path, f"there is no profile {name!r}{near}; one of: {', '.join(sorted(profiles))}"))

    def escalation(path: str, given: EscalationConfig) -> None:
        check(f"{path}.relax_after", parse_duration_ms, given.relax_after)
        check(f"{path}.promote_after", parse_duration_ms, given.promote_after)
        check(f"{path}.promote_to", _priority, given.promote_to)
        if given.relax_after != EscalationConfig().relax_after and not given.relax:
            out.append((f"{path}.relax", "missing: name the rules that may be relaxed: spread, topology, backend"))

    for number, route in enumerate(config.routes):
        if config.unavailable_profile == "hold":
            known(f"routes[{number}].profile", route.profile)
        if route.when.priority_at_least is not None:
            check(f"routes[{number}].when.priority_at_least", _priority, route.when.priority_at_least)
        check(f"routes[{number}].when.labels", parse_selector, route.when.labels)
    for name, profile in sorted(config.profiles.items()):
        if not _NAME.fullmatch(name):
            text = "is not a name: up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
            out.append(("profiles", f"{name[:40]!a} {text}"))
        if profile.max_pending < 1:
            out.append((f"profiles.{name}.max_pending", f"{profile.max_pending} is below 1: no job could ever wait"))
        out += [
            (f"profiles.{name}.weights.{tenant}", f"{weight} is below 1: every tenant must get turns")
            for tenant, weight in profile.weights.items()
            if weight < 1
        ]
        check(f"profiles.{name}.nodes", parse_selector, profile.nodes)
        check(f"profiles.{name}.fallback_after", parse_duration_ms, profile.fallback_after)
        for key in ("scheduling_timeout", "max_queue_time", "grace"):
            if getattr(profile, key):
                check(f"profiles.{name}.{key}", parse_duration_ms, getattr(profile, key))
        if profile.escalation is not None:
            escalation(f"profiles.{name}.escalation", profile.escalation)
        if profile.fallback:
            known(f"profiles.{name}.fallback", profile.fallback)
            if _is_cyclic(config, name):
                out.append((f"profiles.{name}.fallback", "the fallbacks form a cycle; the last profile must have none"))
        elif profile.fallback_after != "0s":
            out.append((f"profiles.{name}.fallback_after", "needs a fallback: name the profile to go to"))
    escalation("escalation", config.escalation)
    check("parallel_scheduling", batch_of, config.parallel_scheduling)
    if len(set(config.fallback)) < len(config.fallback) or "" in config.fallback:
        out.append(("fallback", "names a backend twice, or an empty one"))
    for key in ("scheduling_timeout", "max_queue_time"):
        check(key, parse_duration_ms, getattr(config, key))
    for key in ("within", "pause", "max_pause"):
        check(f"breaker.{key}", parse_duration_ms, getattr(config.breaker, key))
    at_least_0 = (
        ("max_losses", config.max_losses, "a lost run is not tried again"),
        ("preemption.max_per_job", config.preemption.max_per_job, "no job is ever preempted"),
        ("preemption.budget", config.preemption.budget, "no limit"),
        ("breaker.rounds", config.breaker.rounds, "it never opens"),
    )
    out += [(path, f"{value} is below 0; 0 means: {meaning}") for path, value, meaning in at_least_0 if value < 0]
    return out


def _is_cyclic(config: SchedulingConfig, name: str) -> bool:
    at, seen = name, set[str]()
    while at in config.profiles and config.profiles[at].fallback and at not in seen:
        seen.add(at)
        at = config.profiles[at].fallback
    return at == name and bool(seen)
