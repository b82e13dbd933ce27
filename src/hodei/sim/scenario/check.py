"""Compares what was expected with what happened. An expectation that did not hold says what happened instead, what the
scheduler has to say about it (`why`), and how it would have to read (`revised`, None if it should go).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hodei.model.job import JOB_ENDED
from hodei.model.resources import format_duration
from hodei.sim.scenario.history import Course, History, Started
from hodei.sim.scenario.parse import line_of
from hodei.sim.scenario.play import Play, play
from hodei.sim.scenario.schema import ABOUT_MS, Expectation, Scenario, Times


class Finding(Struct):
    """`place` is the entry of `expect`, -1 for what must hold in every scenario."""

    place: int
    line: int
    expected: str
    held: bool
    happened: str = ""
    why: str = ""
    revised: dict[str, Any] | None = None


class Outcome(Struct):
    scenario: Scenario
    story: History
    findings: list[Finding]

    @property
    def held(self) -> bool:
        return all(finding.held for finding in self.findings)


def run(scenario: Scenario) -> Outcome:
    story = play(scenario)
    findings = [_Check(scenario, story, one).finding() for one in scenario.expect]
    if story.wrongs and not any(one.never == "over-commit" for one in scenario.expect):
        findings.append(Finding(-1, 0, "never over-commit", False, "; ".join(story.wrongs)))
    return Outcome(scenario, story, findings)


class _Check:
    def __init__(self, scenario: Scenario, story: History, expected: Expectation) -> None:
        self.scenario, self.story, self.expected = scenario, story, expected
        self.wanted: list[str] = []
        self.instead: list[str] = []
        self.ask_at_ms: int | None = None
        self.revised: dict[str, Any] = {}

    def finding(self) -> Finding:
        it = self.expected
        if it.job:
            self._job(self.story.courses[it.job])
        elif it.preempted:
            self._preempted()
        elif it.never:
            self._never()
        else:
            self._start_reservations()
        held = not self.instead
        why = "" if held or self.ask_at_ms is None or not it.job else why_at(self.scenario, it.job, self.ask_at_ms)
        line = line_of(self.scenario.text, f"expect[{it.place}]") if self.scenario.text else 0
        revised = None if held else self.revised or None
        return Finding(it.place, line, " ".join(self.wanted), held, "; ".join(self.instead), why, revised)

    def _no(self, instead: str, ask_at_ms: int | None = None) -> None:
        if instead not in self.instead:
            self.instead.append(instead)
        if self.ask_at_ms is None:
            self.ask_at_ms = ask_at_ms

    # ------------------------------------------------------------------------------------------- one job

    def _job(self, course: Course) -> None:
        it = self.expected
        self.wanted.append(it.job)
        self.revised["job"] = it.job
        if it.at_ms is not None:
            self._stands(course, it.at_ms)
        else:
            if it.attempt > 1:
                self.revised["attempt"] = it.attempt
            start = course.starts[it.attempt - 1] if len(course.starts) >= it.attempt else None
            if it.starts is not None:
                self._starts(course, start, it.starts)
            self._places(course, start)
            if it.ends:
                self._ends(course)

    def _stands(self, course: Course, at_ms: int) -> None:
        it = self.expected
        state, reason = course.state_at(at_ms)
        when = format_duration(at_ms)
        self.wanted.append(f"at {when} is")
        self.revised["at"] = when
        said = state if not reason else f"{state} ({reason})"
        if it.state:
            self.wanted.append(it.state)
            self.revised["state"] = state
            if state != it.state:
                self._no(f"it was {said}", at_ms)
        if it.reason:
            self.wanted.append(f"for the reason {it.reason}")
            if reason:
                self.revised["reason"] = reason
            if reason != it.reason:
                self._no(f"it was {said}", at_ms)
        running = next(
            (s for s in course.starts if s.at_ms <= at_ms and (s.over_ms is None or s.over_ms > at_ms)), None
        )
        self._places(course, running, at_ms)

    def _starts(self, course: Course, start: Started | None, times: Times) -> None:
        again = "" if self.expected.attempt == 1 else f" (attempt {self.expected.attempt})"
        self.wanted.append(f"starts{again} {_in_words(times)}")
        self.revised["starts"] = "never" if start is None else format_duration(start.at_ms)
        at_ms = start.at_ms if start is not None else None
        if _suits(at_ms, times):
            return
        bounds = [ms for ms in (times.exactly_ms, times.before_ms, times.after_ms, times.about_ms) if ms is not None]
        if start is None:
            self._no(_never_started(course), bounds[0] if bounds else self.story.end_ms)
        else:
            late = times.never or start.at_ms > bounds[0]
            ask_ms = bounds[0] if late and bounds else start.at_ms
            self._no(f"it started at {format_duration(start.at_ms)} on {', '.join(start.places)}", ask_ms)

    def _places(self, course: Course, start: Started | None, at_ms: int | None = None) -> None:
        it = self.expected
        if not it.on and not it.not_on:
            return
        nodes = [] if start is None else start.places if at_ms is None else start.places_at(at_ms)
        for key, words, names in (("on", "on", it.on), ("not_on", "not on", it.not_on)):
            if names:
                self.wanted.append(f"{words} {', '.join(names)}")
                wrong = nodes != sorted(set(names)) if key == "on" else bool(set(nodes) & set(names))
                if wrong or start is None:
                    then = start.at_ms if start is not None and at_ms is None else at_ms
                    was = f"it was on {', '.join(nodes)}" if nodes else _not_placed(course, at_ms)
                    told_already = bool(nodes and self.instead)  # when it started is told with where
                    self._no(self.instead[0] if told_already else was, self.story.end_ms if then is None else then)
                    if nodes:
                        self.revised["on"] = nodes[0] if len(nodes) == 1 else nodes
                    elif at_ms is not None:
                        self.revised["state"] = course.state_at(at_ms)[0]
                    else:
                        self.revised["starts"] = "never"
                else:
                    self.revised[key] = names[0] if len(names) == 1 else list(names)

    def _ends(self, course: Course) -> None:
        it = self.expected
        state, end_ms = "never", self.story.end_ms
        reason = course.refused.code if course.refused is not None else ""
        if course.refused is not None:
            state, end_ms = "refused", course.job.at_ms
        elif course.end is not None:
            end_ms, job = course.end
            state, reason = job.state, job.reason_code
        took_ms = end_ms - course.job.at_ms
        self.wanted.append("never ends" if it.ends == "never" else f"ends {it.ends}")
        self.revised["ends"] = state
        said = f"it was {state}" if state == "refused" else f"it {state} at {format_duration(end_ms)}"
        said = f"{said} ({reason})" if reason else said
        said = (
            f"it has not ended: {course.state_at(end_ms)[0]} at {format_duration(end_ms)}" if state == "never" else said
        )
        if state != it.ends:
            self._no(said, end_ms)
        if it.reason:
            self.wanted.append(f"for the reason {it.reason}")
            if reason:
                self.revised["reason"] = reason
            if reason != it.reason:
                self._no(said, end_ms)
        if it.within_ms is not None:
            self.wanted.append(f"within {format_duration(it.within_ms)}")
            if state not in JOB_ENDED or took_ms > it.within_ms:
                self._no(said, course.job.at_ms + it.within_ms)
            if state in JOB_ENDED:
                self.revised["within"] = format_duration(max(took_ms, it.within_ms))

    # ----------------------------------------------------------------------------------------- the whole

    def _preempted(self) -> None:
        it = self.expected
        self.wanted.append(f"{it.preempted} is preempted{f' by {it.by}' if it.by else ''}")
        found = [evicted for evicted in self.story.evictions if evicted.job == it.preempted]
        if any(not it.by or evicted.by == it.by for evicted in found):
            return
        self._no(f"it was preempted by {', '.join(e.by for e in found)}" if found else "it was not preempted")
        if found:
            self.revised |= {"preempted": it.preempted, "by": found[0].by}

    def _never(self) -> None:
        self.wanted.append(f"never {self.expected.never}")
        self.revised["never"] = self.expected.never
        if self.expected.never == "over-commit":
            if self.story.wrongs:
                self._no("; ".join(self.story.wrongs))
        elif self.story.evictions:
            told = [f"{e.job} by {e.by} at {format_duration(e.at_ms)}" for e in self.story.evictions]
            self._no(f"preempted: {', '.join(told)}")
            self.revised = {}

    def _start_reservations(self) -> None:
        wanted, broken = self.expected.start_reservations_broken, self.story.broken
        self.wanted.append(f"{wanted} promises are broken")
        self.revised["start_reservations_broken"] = len(broken)
        if len(broken) != wanted:
            told = "; ".join(
                f"{one.job} was promised {format_duration(one.reserved_start_ms)} and still waited then"
                for one in broken
            )
            self._no(f"{len(broken)} were{': ' + told if told else ''}")


def why_at(scenario: Scenario, name: str, at_ms: int) -> str:
    """What the scheduler itself says of the job at that moment; nothing of one that is not there then."""
    then = Play(scenario).until(at_ms)
    found = then.why(name, at_ms)
    if found is None:
        course = then.story.courses[name]
        if course.refused is not None:
            return course.refused.message
        job = course.at(at_ms)
        return f"at {format_duration(at_ms)}: {job.state}{': ' + job.reason if job.reason else ''}" if job else ""
    text = f"at {format_duration(at_ms)}: {found.summary}"
    for place in found.placements[:1]:
        if place.decision is not None:
            best = place.decision.chosen
            others = [f"{other.node} {other.score / 100:g}" for other in place.decision.runners_up[:3]]
            text += f"; {best.node} scored {best.score / 100:g}" + (f", {', '.join(others)}" if others else "")
    return f"{text}; {found.hint}" if found.hint else text


def _suits(at_ms: int | None, times: Times) -> bool:
    if at_ms is None or times.never:
        return at_ms is None and times.never
    return (
        (times.exactly_ms is None or at_ms == times.exactly_ms)
        and (times.before_ms is None or at_ms < times.before_ms)
        and (times.after_ms is None or at_ms > times.after_ms)
        and (times.about_ms is None or abs(at_ms - times.about_ms) <= ABOUT_MS)
    )


def _in_words(times: Times) -> str:
    if times.never:
        return "never"
    parts = [f"at {format_duration(times.exactly_ms)}"] if times.exactly_ms is not None else []
    for word, ms in (("after", times.after_ms), ("before", times.before_ms), ("at about", times.about_ms)):
        if ms is not None:
            parts.append(f"{word} {format_duration(ms)}")
    return " and ".join(parts)


def _not_placed(course: Course, at_ms: int | None) -> str:
    return _never_started(course) if at_ms is None else f"it was {course.state_at(at_ms)[0]}, on no node"


def _never_started(course: Course) -> str:
    if course.refused is not None:
        return f"it was refused ({course.refused.code})"
    return "it never started" if not course.starts else f"it started {len(course.starts)} times in all"
