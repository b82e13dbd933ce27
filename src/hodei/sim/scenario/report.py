"""What came out of a scenario, for people (a line for each expectation, a picture of a failure) and for programs."""

from __future__ import annotations

from typing import Any

from hodei.model.quantity import format_duration
from hodei.sim.scenario.check import Finding, Outcome
from hodei.sim.scenario.history import Course, History

_WIDTH = 60
_MOST_JOBS = 30
WAITS, RUNS = "·", "█"


def told(outcome: Outcome) -> str:
    """The whole report of one scenario."""
    lines = [f"{outcome.scenario.title}  ({outcome.scenario.source})"]
    for finding in outcome.findings:
        lines += [f"  {line}" for line in lines_of(finding)]
    lines += [f"  note          {note}" for note in outcome.story.notes]
    if not outcome.findings:
        lines.append("  nothing is expected; `hodei test --update` writes down what happens")
    if not outcome.held:
        lines += ["", *(f"  {line}" for line in timeline(outcome.story))]
    return "\n".join(lines)


def lines_of(finding: Finding) -> list[str]:
    if finding.held:
        return [f"held          {finding.expected}"]
    out = [f"DID NOT HOLD  {finding.expected}{f'  (line {finding.line})' if finding.line else ''}"]
    out.append(f"              instead: {finding.happened}")
    if finding.why:
        out.append(f"              why: {finding.why}")
    return out


def timeline(story: History) -> list[str]:
    """A line for each job: when it waited, when it ran, and where."""
    span_ms = max(1, story.end_ms)
    courses = sorted(story.courses.values(), key=lambda course: (course.job.at_ms, course.job.id))
    shown = courses[:_MOST_JOBS]
    margin = min(24, max(len(course.job.name) for course in shown))
    out = []
    for course in shown:
        where = "; ".join(
            f"{format_duration(max(start.at_ms, 0))} {','.join(start.places[:4])}" for start in course.starts[:4]
        )
        out.append(f"{course.job.name[:margin]:<{margin}} │{_bar(course, story, span_ms)}│ {where or 'never started'}")
    out.append(f"{'':<{margin}} └0{'─' * (_WIDTH - 1 - len(format_duration(span_ms)))}{format_duration(span_ms)}┘")
    if len(courses) > len(shown):
        out.append(f"and {len(courses) - len(shown)} more jobs")
    return out


def _bar(course: Course, story: History, span_ms: int) -> str:
    cells = [" "] * _WIDTH

    def fill(from_ms: int, to_ms: int, mark: str) -> None:
        first = min(max(from_ms, 0) * _WIDTH // span_ms, _WIDTH - 1)
        for cell in range(first, min(max(first + 1, -(-to_ms * _WIDTH // span_ms)), _WIDTH)):
            cells[cell] = mark

    end_ms = course.end[0] if course.end is not None else story.end_ms
    if course.refused is None and end_ms > course.job.at_ms:
        fill(course.job.at_ms, end_ms, WAITS)
    for start in course.starts:
        fill(start.at_ms, story.end_ms if start.over_ms is None else start.over_ms, RUNS)
    return "".join(cells)


def as_data(outcome: Outcome) -> dict[str, Any]:
    return {
        "path": outcome.scenario.source,
        "scenario": outcome.scenario.title,
        "policy": outcome.scenario.policy,
        "held": outcome.held,
        "expectations": [
            {key: getattr(finding, key) for key in ("line", "expected", "held", "happened", "why")}
            for finding in outcome.findings
        ],
        "jobs": [
            {
                "name": course.job.name,
                "state": course.state_at(outcome.story.end_ms)[0],
                "starts": [
                    {"at_ms": start.at_ms, "nodes": start.places, "over_ms": start.over_ms} for start in course.starts
                ],
            }
            for course in outcome.story.courses.values()
        ],
        "notes": outcome.story.notes,
        "promises_broken": len(outcome.story.broken),
        "seconds": outcome.story.end_ms / 1000,
    }
