"""Compares expectations with what happened. A failed one comes with what happened instead, the scheduler's explanation
(`why`) and an expectation that would hold (`revised`; None to delete it).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.job import JOB_ENDED
from hodei.model.resources import format_duration
from hodei.sim.scenario.parse import line_of
from hodei.sim.scenario.runner import History, JobHistory, JobStart, ScenarioRunner, run_scenario
from hodei.sim.scenario.schema import ABOUT_MS, Expectation, Scenario, Times


class Finding(Struct):
    """`place`: index in `expect`; -1 for a rule of every scenario."""

    place: int
    line: int
    expected: str
    held: bool
    happened: str = ""
    why: str = ""
    revised: dict[str, Any] | None = None


class Outcome(Struct):
    scenario: Scenario
    history: History
    findings: list[Finding]

    @property
    def held(self) -> bool:
        return all(finding.held for finding in self.findings)


def check_scenario(scenario: Scenario) -> Outcome:
    history = run_scenario(scenario)
    findings = [_Check(scenario, history, one).finding() for one in scenario.expect]
    if history.violations and not any(one.never == "over-commit" for one in scenario.expect):
        findings.append(Finding(-1, 0, "never over-commit", False, "; ".join(history.violations)))
    return Outcome(scenario, history, findings)


class _Check:
    def __init__(self, scenario: Scenario, history: History, expected: Expectation) -> None:
        self.scenario, self.history, self.expected = scenario, history, expected
        self.expected_text: list[str] = []
        self.actual: list[str] = []
        self.why_at_ms: int | None = None
        self.revised: dict[str, Any] = {}

    def finding(self) -> Finding:
        it = self.expected
        if it.job:
            self._job(self.history.jobs[it.job])
        elif it.preempted:
            self._preempted()
        elif it.never:
            self._never()
        else:
            self._start_reservations()
        held = not self.actual
        why = "" if held or self.why_at_ms is None or not it.job else why_at(self.scenario, it.job, self.why_at_ms)
        line = line_of(self.scenario.text, f"expect[{it.place}]") if self.scenario.text else 0
        revised = None if held else self.revised or None
        return Finding(it.place, line, " ".join(self.expected_text), held, "; ".join(self.actual), why, revised)

    def _fail(self, actual: str, why_at_ms: int | None = None) -> None:
        if actual not in self.actual:
            self.actual.append(actual)
        if self.why_at_ms is None:
            self.why_at_ms = why_at_ms

    def _job(self, record: JobHistory) -> None:
        it = self.expected
        self.expected_text.append(it.job)
        self.revised["job"] = it.job
        if it.at_ms is not None:
            self._state_at(record, it.at_ms)
        else:
            if it.attempt > 1:
                self.revised["attempt"] = it.attempt
            start = record.starts[it.attempt - 1] if len(record.starts) >= it.attempt else None
            if it.starts is not None:
                self._starts(record, start, it.starts)
            self._nodes(record, start)
            if it.ends:
                self._ends(record)

    def _state_at(self, record: JobHistory, at_ms: int) -> None:
        it = self.expected
        state, reason = record.state_at(at_ms)
        when = format_duration(at_ms)
        self.expected_text.append(f"at {when} is")
        self.revised["at"] = when
        shown = state if not reason else f"{state} ({reason})"
        if it.state:
            self.expected_text.append(it.state)
            self.revised["state"] = state
            if state != it.state:
                self._fail(f"it was {shown}", at_ms)
        if it.reason:
            self.expected_text.append(f"for the reason {it.reason}")
            if reason:
                self.revised["reason"] = reason
            if reason != it.reason:
                self._fail(f"it was {shown}", at_ms)
        running = next(
            (s for s in record.starts if s.at_ms <= at_ms and (s.ended_ms is None or s.ended_ms > at_ms)), None
        )
        self._nodes(record, running, at_ms)

    def _starts(self, record: JobHistory, start: JobStart | None, times: Times) -> None:
        again = "" if self.expected.attempt == 1 else f" (attempt {self.expected.attempt})"
        self.expected_text.append(f"starts{again} {_describe_times(times)}")
        self.revised["starts"] = "never" if start is None else format_duration(start.at_ms)
        at_ms = start.at_ms if start is not None else None
        if _matches(at_ms, times):
            return
        bounds = [ms for ms in (times.exactly_ms, times.before_ms, times.after_ms, times.about_ms) if ms is not None]
        if start is None:
            self._fail(_never_started(record), bounds[0] if bounds else self.history.end_ms)
        else:
            late = times.never or start.at_ms > bounds[0]
            why_ms = bounds[0] if late and bounds else start.at_ms
            self._fail(f"it started at {format_duration(start.at_ms)} on {', '.join(start.nodes)}", why_ms)

    def _nodes(self, record: JobHistory, start: JobStart | None, at_ms: int | None = None) -> None:
        it = self.expected
        if not it.on and not it.not_on:
            return
        nodes = [] if start is None else start.nodes if at_ms is None else start.nodes_at(at_ms)
        for key, words, names in (("on", "on", it.on), ("not_on", "not on", it.not_on)):
            if names:
                self.expected_text.append(f"{words} {', '.join(names)}")
                wrong = nodes != sorted(set(names)) if key == "on" else bool(set(nodes) & set(names))
                if wrong or start is None:
                    failed_ms = start.at_ms if start is not None and at_ms is None else at_ms
                    was = f"it was on {', '.join(nodes)}" if nodes else _not_placed(record, at_ms)
                    reported = bool(nodes and self.actual)  # the text of a wrong start names the nodes
                    self._fail(
                        self.actual[0] if reported else was, self.history.end_ms if failed_ms is None else failed_ms
                    )
                    if nodes:
                        self.revised["on"] = nodes[0] if len(nodes) == 1 else nodes
                    elif at_ms is not None:
                        self.revised["state"] = record.state_at(at_ms)[0]
                    else:
                        self.revised["starts"] = "never"
                else:
                    self.revised[key] = names[0] if len(names) == 1 else list(names)

    def _ends(self, record: JobHistory) -> None:
        it = self.expected
        state, end_ms = "never", self.history.end_ms
        reason = record.refused.code if record.refused is not None else ""
        if record.refused is not None:
            state, end_ms = "refused", record.job.at_ms
        elif record.end is not None:
            end_ms, job = record.end
            state, reason = job.state, job.reason_code
        took_ms = end_ms - record.job.at_ms
        self.expected_text.append("never ends" if it.ends == "never" else f"ends {it.ends}")
        self.revised["ends"] = state
        shown = f"it was {state}" if state == "refused" else f"it {state} at {format_duration(end_ms)}"
        shown = f"{shown} ({reason})" if reason else shown
        shown = (
            f"it has not ended: {record.state_at(end_ms)[0]} at {format_duration(end_ms)}"
            if state == "never"
            else shown
        )
        if state != it.ends:
            self._fail(shown, end_ms)
        if it.reason:
            self.expected_text.append(f"for the reason {it.reason}")
            if reason:
                self.revised["reason"] = reason
            if reason != it.reason:
                self._fail(shown, end_ms)
        if it.within_ms is not None:
            self.expected_text.append(f"within {format_duration(it.within_ms)}")
            if state not in JOB_ENDED or took_ms > it.within_ms:
                self._fail(shown, record.job.at_ms + it.within_ms)
            if state in JOB_ENDED:
                self.revised["within"] = format_duration(max(took_ms, it.within_ms))

    def _preempted(self) -> None:
        it = self.expected
        self.expected_text.append(f"{it.preempted} is preempted{f' by {it.by}' if it.by else ''}")
        found = [one for one in self.history.preemptions if one.job == it.preempted]
        if any(not it.by or one.by == it.by for one in found):
            return
        self._fail(f"it was preempted by {', '.join(e.by for e in found)}" if found else "it was not preempted")
        if found:
            self.revised |= {"preempted": it.preempted, "by": found[0].by}

    def _never(self) -> None:
        self.expected_text.append(f"never {self.expected.never}")
        self.revised["never"] = self.expected.never
        if self.expected.never == "over-commit":
            if self.history.violations:
                self._fail("; ".join(self.history.violations))
        elif self.history.preemptions:
            listed = [f"{e.job} by {e.by} at {format_duration(e.at_ms)}" for e in self.history.preemptions]
            self._fail(f"preempted: {', '.join(listed)}")
            self.revised = {}

    def _start_reservations(self) -> None:
        wanted, broken = self.expected.start_reservations_broken, self.history.broken
        self.expected_text.append(f"{wanted} start reservations are broken")
        self.revised["start_reservations_broken"] = len(broken)
        if len(broken) != wanted:
            listed = "; ".join(
                f"{one.job} had a start reserved for {format_duration(one.reserved_start_ms)} and was still pending"
                for one in broken
            )
            self._fail(f"{len(broken)} were{': ' + listed if listed else ''}")


def why_at(scenario: Scenario, name: str, at_ms: int) -> str:
    """The scheduler's own explanation of the job at that moment; empty before its submission."""
    runner = ScenarioRunner(scenario).until(at_ms)
    found = runner.why(name, at_ms)
    if found is None:
        record = runner.history.jobs[name]
        if record.refused is not None:
            return record.refused.message
        job = record.at(at_ms)
        return f"at {format_duration(at_ms)}: {job.state}{': ' + job.reason if job.reason else ''}" if job else ""
    text = f"at {format_duration(at_ms)}: {found.summary}"
    for place in found.placements[:1]:
        if place.decision is not None:
            best = place.decision.chosen
            others = [f"{other.node} {other.score / 100:g}" for other in place.decision.runners_up[:3]]
            text += f"; {best.node} scored {best.score / 100:g}" + (f", {', '.join(others)}" if others else "")
    return f"{text}; {found.hint}" if found.hint else text


def _matches(at_ms: int | None, times: Times) -> bool:
    if at_ms is None or times.never:
        return at_ms is None and times.never
    return (
        (times.exactly_ms is None or at_ms == times.exactly_ms)
        and (times.before_ms is None or at_ms < times.before_ms)
        and (times.after_ms is None or at_ms > times.after_ms)
        and (times.about_ms is None or abs(at_ms - times.about_ms) <= ABOUT_MS)
    )


def _describe_times(times: Times) -> str:
    if times.never:
        return "never"
    parts = [f"at {format_duration(times.exactly_ms)}"] if times.exactly_ms is not None else []
    for word, ms in (("after", times.after_ms), ("before", times.before_ms), ("at about", times.about_ms)):
        if ms is not None:
            parts.append(f"{word} {format_duration(ms)}")
    return " and ".join(parts)


def _not_placed(record: JobHistory, at_ms: int | None) -> str:
    return _never_started(record) if at_ms is None else f"it was {record.state_at(at_ms)[0]}, on no node"


def _never_started(record: JobHistory) -> str:
    if record.refused is not None:
        return f"it was refused ({record.refused.code})"
    return "it never started" if not record.starts else f"it started {len(record.starts)} times in all"
