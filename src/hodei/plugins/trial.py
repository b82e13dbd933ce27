"""Which policies anyone may try out on a running server: those made of what it has in use already, or could have.

A question must not make a server load code that its operator never named, nor build tables of any size.
"""

from __future__ import annotations

from typing import Any

from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import BUILT_IN

_MOST_PROFILES = 20
_MOST_ROUTES = 200
_LONGEST = 200


def check_trial_policy(config: SchedulingConfig, live: SchedulingConfig) -> SchedulingConfig:
    """The configuration as it is; InvalidInput for what is not in use, built in, or plain."""
    if len(config.profiles) > _MOST_PROFILES:
        raise InvalidInput(f"{len(config.profiles)} profiles", hint=f"try at most {_MOST_PROFILES}")
    if len(config.routes) > _MOST_ROUTES:
        raise InvalidInput(f"{len(config.routes)} routes", hint=f"try at most {_MOST_ROUTES}")
    known = BUILT_IN | in_use(live)
    for name, profile in config.profiles.items():
        for plugin in profile.plugin_names():
            if plugin not in known:
                raise InvalidInput(
                    f"profile {name!r}: plugin {plugin[:80]!r} is not in use on this server",
                    hint="built-in plugins and those of the server's own configuration can be tried",
                )
        used = live.profiles.get(name, ProfileConfig()).options
        for plugin, options in profile.options.items():
            if options != used.get(plugin) and not all(_plain(value) for value in options.values()):
                raise InvalidInput(
                    f"profile {name!r}: the options of {plugin[:80]!r} are too much to try",
                    hint="numbers and short words can be tried",
                )
    return config


def in_use(config: SchedulingConfig) -> frozenset[str]:
    """The plugins that its profiles name, and its estimator."""
    named = (name for profile in config.profiles.values() for name in profile.plugin_names())
    return frozenset((*named, config.estimates.source))


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) <= _LONGEST)
