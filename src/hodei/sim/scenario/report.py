"""The result of a scenario: as text, as JSON, and written back into the file as expectations."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from hodei.jobfile.yaml_reader import flow
from hodei.model.resources import format_duration
from hodei.sim.scenario.check import Finding, Outcome
from hodei.sim.scenario.parse import piece_at
from hodei.sim.scenario.runner import History, JobHistory

_WIDTH = 60
_MAX_JOBS = 30
PENDING, RUNNING = "·", "█"


def format_report(outcome: Outcome) -> str:
    """A line per expectation; a timeline if one failed."""
    lines = [f"{outcome.scenario.title}  ({outcome.scenario.source})"]
    for finding in outcome.findings:
        lines += [f"  {line}" for line in format_finding(finding)]
    lines += [f"  note          {note}" for note in outcome.history.notes]
    if not outcome.findings:
        lines.append("  no expectations; `hodei test --update` writes what happened into the file")
    if not outcome.held:
        lines += ["", *(f"  {line}" for line in timeline(outcome.history))]
    return "\n".join(lines)


def format_finding(finding: Finding) -> list[str]:
    if finding.held:
        return [f"held          {finding.expected}"]
    out = [f"DID NOT HOLD  {finding.expected}{f'  (line {finding.line})' if finding.line else ''}"]
    out.append(f"              instead: {finding.happened}")
    if finding.why:
        out.append(f"              why: {finding.why}")
    return out


def timeline(history: History) -> list[str]:
    """A line per job: when it was pending, when it ran, and where."""
    span_ms = max(1, history.end_ms)
    jobs = sorted(history.jobs.values(), key=lambda record: (record.job.at_ms, record.job.id))
    shown = jobs[:_MAX_JOBS]
    margin = min(24, max(len(record.job.name) for record in shown))
    out = []
    for record in shown:
        where = "; ".join(
            f"{format_duration(max(start.at_ms, 0))} {','.join(start.nodes[:4])}" for start in record.starts[:4]
        )
        out.append(
            f"{record.job.name[:margin]:<{margin}} │{_bar(record, history, span_ms)}│ {where or 'never started'}"
        )
    out.append(f"{'':<{margin}} └0{'─' * (_WIDTH - 1 - len(format_duration(span_ms)))}{format_duration(span_ms)}┘")
    if len(jobs) > len(shown):
        out.append(f"and {len(jobs) - len(shown)} more jobs")
    return out


def _bar(record: JobHistory, history: History, span_ms: int) -> str:
    cells = [" "] * _WIDTH

    def fill(from_ms: int, to_ms: int, mark: str) -> None:
        first = min(max(from_ms, 0) * _WIDTH // span_ms, _WIDTH - 1)
        for cell in range(first, min(max(first + 1, -(-to_ms * _WIDTH // span_ms)), _WIDTH)):
            cells[cell] = mark

    end_ms = record.end[0] if record.end is not None else history.end_ms
    if record.refused is None and end_ms > record.job.at_ms:
        fill(record.job.at_ms, end_ms, PENDING)
    for start in record.starts:
        fill(start.at_ms, history.end_ms if start.ended_ms is None else start.ended_ms, RUNNING)
    return "".join(cells)


def to_json(outcome: Outcome) -> dict[str, Any]:
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
                "name": record.job.name,
                "state": record.state_at(outcome.history.end_ms)[0],
                "starts": [
                    {"at_ms": start.at_ms, "nodes": start.nodes, "ended_ms": start.ended_ms} for start in record.starts
                ],
            }
            for record in outcome.history.jobs.values()
        ],
        "notes": outcome.history.notes,
        "start_reservations_broken": len(outcome.history.broken),
        "seconds": outcome.history.end_ms / 1000,
    }


# Rewrites the failed expectations of a scenario file; everything else stays, including comments. A file without
# expectations gets a line for every job.


def update_expectations(outcome: Outcome) -> str:
    """The text of the file, with expectations that hold."""
    text = outcome.scenario.text
    if not outcome.scenario.expect:
        return _with_all_expectations(text, outcome.history)
    failed = [finding for finding in outcome.findings if not finding.held and finding.place >= 0]
    for finding in sorted(failed, key=lambda finding: -finding.place):
        text = _rewrite(text, finding)
    return text


def unified_diff(before: str, after: str, path: Path) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), f"{path} (what happened)")
    return "".join(lines)


def expectations_from(history: History) -> list[dict[str, Any]]:
    """What happened to every job, as expectations."""
    out: list[dict[str, Any]] = []
    for name, record in history.jobs.items():
        for number, start in enumerate(record.starts, 1):
            if start.at_ms < 0 or (record.job.running and number == 1):
                continue  # it ran before the scenario
            again: dict[str, Any] = {} if number == 1 else {"attempt": number}
            nodes = start.nodes[0] if len(start.nodes) == 1 else start.nodes
            out.append({"job": name, **again, "starts": format_duration(start.at_ms), "on": nodes})
        state, reason = record.state_at(history.end_ms)
        if record.refused is None and record.end is None:
            out.append({"job": name, "ends": "never"})
        else:
            out.append({"job": name, "ends": state, **({"reason": reason} if reason else {})})
    out += [{"preempted": one.job, "by": one.by} for one in history.preemptions]
    out.append({"start_reservations_broken": len(history.broken)})
    return [one for place, one in enumerate(out) if one not in out[:place]]


def _with_all_expectations(text: str, history: History) -> str:
    kept = text
    if (piece := piece_at(text, "expect")) is not None and "expect" in _top_keys(text):
        kept = "\n".join(text.split("\n")[: piece.line - 1]) + "\n"
    lines = "".join(f"  - {flow(one)}\n" for one in expectations_from(history))
    return f"{kept.rstrip()}\nexpect:\n{lines}"


def _top_keys(text: str) -> set[str]:
    return {line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()}


def _rewrite(text: str, finding: Finding) -> str:
    piece = piece_at(text, f"expect[{finding.place}]")
    assert piece is not None
    end = piece.end
    if not piece.is_flow:
        # A YAML block ends where the next one begins; trailing blank lines and comments do not belong to it.
        lines = text[piece.start : piece.end].splitlines(True)
        while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
            lines.pop()
        end = piece.start + len("".join(lines).rstrip())
    if finding.revised is not None:
        return text[: piece.start] + flow(finding.revised) + text[end:]
    begin = text.rfind("\n", 0, piece.start) + 1
    after = text.find("\n", end)
    return text[:begin] + (text[after + 1 :] if after >= 0 else "")
