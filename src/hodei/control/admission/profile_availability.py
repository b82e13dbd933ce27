"""A scheduler profile that is not available: not configured, paused, or with a plugin that fails. What becomes of its jobs.

`hold`: they wait for it, and say why. `fallback`: they go to the profile that theirs names as its fallback, else to
`default`; a chain of fallbacks is followed to the first that is available. A job that was moved stays where it went.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

DEFAULT = "default"
# A plugin that has failed in so many rounds one after another is taken to be broken.
FAULTS = 3


class ProfileAvailability:
    """`profiles`: those that there are. `fallbacks`: where a profile's jobs go. `paused`: names. `broken`: profiles that
    could not be made, and why."""

    def __init__(
        self,
        mode: Literal["hold", "fallback"] = "hold",
        profiles: Collection[str] = (),
        fallbacks: Mapping[str, str] | None = None,
        paused: Collection[str] = (),
        broken: Mapping[str, str] | None = None,
    ) -> None:
        self.mode = mode
        self.paused = frozenset(paused)
        self._profiles, self._fallbacks, self._broken = frozenset(profiles), dict(fallbacks or {}), dict(broken or {})
        # Whether there is anything to look at: most servers have every profile at work.
        self.idle = mode == "hold" and not self.paused

    def problem(self, profile: str) -> str:
        """Why it is not available; "" if it is."""
        if profile in self.paused:
            return f"profile {profile} is paused"
        if profile in self._broken:
            return f"profile {profile} cannot be used: {self._broken[profile]}"
        if self._profiles and profile not in self._profiles:
            return f"profile {profile} is not configured"
        return ""

    def instead_of(self, profile: str) -> str:
        """The first available profile after this one; "" if there is none."""
        seen = {profile}
        at = profile
        while (at := self._fallbacks.get(at, DEFAULT)) not in seen:
            if not self.problem(at):
                return at
            seen.add(at)
        return ""
