"""Writes what happened back into a scenario file: only the expectations that did not hold, everything else stays as it
is, comments included. A file that expects nothing gets a line for every job.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from hodei.jobfile.flow_yaml import flow
from hodei.model.quantity import format_duration
from hodei.sim.scenario.check import Finding, Outcome
from hodei.sim.scenario.history import History
from hodei.sim.scenario.yaml_positions import piece_at


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
    out.append({"promises_broken": len(story.broken)})
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
