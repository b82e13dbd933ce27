"""What came out of a scenario, for people (a line for each expectation, a picture of a failure) and for programs."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from hodei.jobfile.yaml_reader import flow
from hodei.model.resources import format_duration
from hodei.sim.scenario.check import Finding, Outcome
from hodei.sim.scenario.history import Course, History
from hodei.sim.scenario.parse import piece_at

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
        "start_reservations_broken": len(outcome.story.broken),
        "seconds": outcome.story.end_ms / 1000,
    }


# ---------------------------------------------------------------------------------------------- golden
# Writes what happened back into a scenario file: only the expectations that did not hold, everything else stays as it
# is, comments included. A file that expects nothing gets a line for every job.


def updated(outcome: Outcome) -> str:
    """The text of the file with expectations that hold."""
    text = outcome.scenario.text
    if not outcome.scenario.expect:
        return _with_all(text, outcome.story)
    wrong = [finding for finding in outcome.findings if not finding.held and finding.place >= 0]
    for finding in sorted(wrong, key=lambda finding: -finding.place):
        text = _rewritten(text, finding)
    return text


def difference(before: str, after: str, path: Path) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), f"{path} (what happened)")
    return "".join(lines)


def everything(story: History) -> list[dict[str, Any]]:
    """What happened to every job, as expectations."""
    out: list[dict[str, Any]] = []
    for name, course in story.courses.items():
        for number, start in enumerate(course.starts, 1):
            if start.at_ms < 0 or (course.job.running and number == 1):
                continue  # it ran before the scenario began
            again: dict[str, Any] = {} if number == 1 else {"attempt": number}
            nodes = start.places[0] if len(start.places) == 1 else start.places
            out.append({"job": name, **again, "starts": format_duration(start.at_ms), "on": nodes})
        state, reason = course.state_at(story.end_ms)
        if course.refused is None and course.end is None:
            out.append({"job": name, "ends": "never"})
        else:
            out.append({"job": name, "ends": state, **({"reason": reason} if reason else {})})
    out += [{"preempted": one.job, "by": one.by} for one in story.evictions]
    out.append({"start_reservations_broken": len(story.broken)})
    return [one for place, one in enumerate(out) if one not in out[:place]]


def _with_all(text: str, story: History) -> str:
    kept = text
    if (piece := piece_at(text, "expect")) is not None and "expect" in _top_keys(text):
        kept = "\n".join(text.split("\n")[: piece.line - 1]) + "\n"
    lines = "".join(f"  - {flow(one)}\n" for one in everything(story))
    return f"{kept.rstrip()}\nexpect:\n{lines}"


def _top_keys(text: str) -> set[str]:
    return {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}


def _rewritten(text: str, finding: Finding) -> str:
    piece = piece_at(text, f"expect[{finding.place}]")
    assert piece is not None
    end = piece.end
    if not piece.is_flow:
        # A block ends where the next thing begins; blank lines and comments in between are not part of it.
        lines = text[piece.start : piece.end].splitlines(True)
        while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
            lines.pop()
        end = piece.start + len("".join(lines).rstrip())
    if finding.revised is not None:
        return text[: piece.start] + flow(finding.revised) + text[end:]
    begin = text.rfind("\n", 0, piece.start) + 1
    after = text.find("\n", end)
    return text[:begin] + (text[after + 1 :] if after >= 0 else "")
