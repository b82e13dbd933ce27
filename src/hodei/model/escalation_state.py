"""What the scheduler may change about a job that waits too long, what it has changed, and the text for people.

The stored spec stays as submitted. `Job.escalation_state` holds the changes, so that they survive a restart; the spec
in memory has them applied while the job is pending.
"""

from __future__ import annotations

from msgspec import Struct, structs

from hodei.model.job import PRIORITY_CLASSES, RELAXABLE_RULES, EscalationState, JobSpec, RelaxableRule

_RULE_TEXTS = {"spread": "its spread rule", "topology": "its gang topology rule", "backend": "its choice of backends"}


class EscalationStep(Struct, frozen=True, omit_defaults=True):
    """One change, for people; `at_ms` 0: at submission."""

    text: str
    at_ms: int = 0


def apply_escalation(spec: JobSpec, escalation: EscalationState) -> JobSpec:
    """The spec with the changes applied; the same object without any. Idempotent."""
    if escalation.profile:
        spec = structs.replace(spec, profile=escalation.profile)
    if escalation.priority >= 0:
        spec = structs.replace(spec, priority=escalation.priority)
    if escalation.failed_on:
        spec = structs.replace(spec, failed_on=escalation.failed_on)
    return relax(spec, escalation.rules)


def relax(spec: JobSpec, rules: tuple[RelaxableRule, ...]) -> JobSpec:
    """The spec with these rules turned into preferences; the same object if it has none of them."""
    if "spread" in rules and any(rule.hard for task in spec.tasks for rule in task.spread):
        tasks = tuple(
            structs.replace(task, spread=tuple(structs.replace(rule, hard=False) for rule in task.spread))
            for task in spec.tasks
        )
        spec = structs.replace(spec, tasks=tasks)
    if "topology" in rules and spec.gang.topology and spec.gang.topology_required:
        spec = structs.replace(spec, gang=structs.replace(spec.gang, topology_required=False))
    if "backend" in rules and spec.backend.mode == "specific":
        spec = structs.replace(spec, backend=structs.replace(spec.backend, mode="preferred"))
    return spec


def relaxable_rules(spec: JobSpec, rules: tuple[RelaxableRule, ...]) -> tuple[RelaxableRule, ...]:
    """Those of `rules` that the spec has a hard rule for."""
    return tuple(rule for rule in RELAXABLE_RULES if rule in rules and relax(spec, (rule,)) is not spec)


def next_priority_class(priority: int, cap: int) -> int:
    """The next named class above `priority`, at most `cap`; `priority` itself if there is none."""
    above = [value for value in PRIORITY_CLASSES.values() if priority < value <= cap]
    return min(above, default=max(priority, cap) if priority < cap else priority)


def priority_class_name(priority: int) -> str:
    return next((name for name, value in PRIORITY_CLASSES.items() if value == priority), str(priority))


def escalation_steps(spec: JobSpec, escalation: EscalationState) -> tuple[EscalationStep, ...]:
    """All changes to a job, oldest first."""
    out = list[EscalationStep]()
    if spec.routed_by:
        came_to = escalation.profile_before or spec.profile
        out.append(EscalationStep(f"routed to profile {came_to} by {spec.routed_by}"))
    if escalation.profile:
        moved = f"moved from profile {escalation.profile_before} to {escalation.profile}: {escalation.cause}"
        out.append(EscalationStep(moved, escalation.moved_ms))
    if escalation.rules:
        rules = " and ".join(_RULE_TEXTS[rule] for rule in escalation.rules)
        out.append(EscalationStep(f"{rules} relaxed to a preference", escalation.relaxed_ms))
    if escalation.priority >= 0:
        step = f"{priority_class_name(escalation.priority_before)} to {priority_class_name(escalation.priority)}"
        out.append(EscalationStep(f"promoted from {step} for its long wait", escalation.promoted_ms))
    if escalation.failed_on:
        failed = ", ".join(escalation.failed_on)
        out.append(
            EscalationStep(f"failed on backend {failed}: others of the fallback chain go first", escalation.failed_ms)
        )
    return tuple(sorted(out, key=lambda step: step.at_ms))
