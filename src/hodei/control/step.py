"""What one step of the controller comes to, and what its refusals mean."""

from __future__ import annotations

from msgspec import Struct

from hodei.engine.plan import Plan, Refusal
from hodei.engine.runner import PLUGIN_FAILED
from hodei.model.effects import Act, Save


class Step(Struct):
    """What one step decided and what is to be done about it: first all `saves` in one commit, then the `acts`."""

    plan: Plan
    saves: list[Save]
    acts: list[Act]

    @property
    def empty(self) -> bool:
        return self.plan.empty and not self.saves and not self.acts


def beyond_help(refusal: Refusal) -> bool:
    """Whether nobody's going could help: a plugin failed, or it is not room that is missing."""
    return any(verdict.reason.code == PLUGIN_FAILED or verdict.reason.plugin == "quota" for verdict in refusal.verdicts)


def failed(refusal: Refusal) -> bool:
    return any(verdict.reason.code == PLUGIN_FAILED for verdict in refusal.verdicts)
