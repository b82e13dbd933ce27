"""The profile router from the configuration: routes, scopes, fallbacks, escalation, breaker.

`find_problems` finds all mistakes at once, each with its path; `build_router` needs a configuration without any.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

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
from hodei.model.config import EscalationConfig, ProfileConfig, RouteConfig, SchedulingConfig, parse_priority
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.resources import parse_duration_ms

Problems = list[tuple[str, str]]
# Jobs that are tried in one step: many, so that one commit starts many; not all, because new facts are waiting too.
BATCH = 1000
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
        priority_at_least=None if when.priority_at_least is None else parse_priority(when.priority_at_least),
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
        parse_priority(config.promote_to),
    )


def batch_of(parallel: bool | int) -> int:
    """How many jobs are tried in one step."""
    if isinstance(parallel, bool):
        return BATCH if parallel else 1
    return parallel


def find_problems(config: SchedulingConfig, profiles: Collection[str]) -> Problems:
    """The problems of what this module reads; paths are below `scheduling`."""
    checker = _Checker(config, profiles)
    for number, route in enumerate(config.routes):
        checker.check_route(f"routes[{number}]", route)
    for name, profile in sorted(config.profiles.items()):
        checker.check_profile(name, profile)
    checker.check_server()
    return checker.problems


class _Checker:
    def __init__(self, config: SchedulingConfig, profiles: Collection[str]) -> None:
        self._config, self._profiles = config, profiles
        self.problems: Problems = []

    def _require(self, valid: bool, path: str, problem: str) -> None:
        if not valid:
            self.problems.append((path, problem))

    def _check_profile_exists(self, path: str, name: str) -> None:
        if name not in self._profiles:
            known = f"{did_you_mean(name, self._profiles)}; one of: {', '.join(sorted(self._profiles))}"
            self.problems.append((path, f"there is no profile {name!r}{known}"))

    def check_route(self, path: str, route: RouteConfig) -> None:
        if self._config.unavailable_profile == "hold":
            self._check_profile_exists(f"{path}.profile", route.profile)

    def check_profile(self, name: str, profile: ProfileConfig) -> None:
        path = f"profiles.{name}"
        rule = "is not a name: up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
        self._require(_NAME.fullmatch(name) is not None, "profiles", f"{name[:40]!a} {rule}")
        if profile.escalation is not None:
            self._check_escalation(f"{path}.escalation", profile.escalation)
        if profile.fallback:
            self._check_profile_exists(f"{path}.fallback", profile.fallback)
            cycle = "the fallbacks form a cycle; the last profile must have none"
            self._require(not _is_cyclic(self._config, name), f"{path}.fallback", cycle)
        else:
            text = "needs a fallback: name the profile to go to"
            self._require(profile.fallback_after == "0s", f"{path}.fallback_after", text)

    def _check_escalation(self, path: str, given: EscalationConfig) -> None:
        text = "missing: name the rules that may be relaxed: spread, topology, backend"
        self._require(bool(given.relax) or given.relax_after == EscalationConfig().relax_after, f"{path}.relax", text)

    def check_server(self) -> None:
        config = self._config
        self._check_escalation("escalation", config.escalation)
        unique = len(set(config.fallback)) == len(config.fallback) and "" not in config.fallback
        self._require(unique, "fallback", "names a backend twice, or an empty one")


def _is_cyclic(config: SchedulingConfig, name: str) -> bool:
    at, seen = name, set[str]()
    while at in config.profiles and config.profiles[at].fallback and at not in seen:
        seen.add(at)
        at = config.profiles[at].fallback
    return at == name and bool(seen)
