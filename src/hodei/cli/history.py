"""`hodei job history`: the stored events of one job as a timeline, each line with its cause and whose act it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import click

from hodei.cli.events import detail_text
from hodei.cli.output import clean
from hodei.cli.times import short

_SAID = {
    "job.submitted": "submitted",
    "job.scheduled": "placed",
    "job.started": "started",
    "job.held": "held",
    "job.released": "released",
    "job.cancel_requested": "cancel requested",
    "job.requeue_requested": "requeue requested",
    "job.requeued": "back in the queue",
    "job.preempting": "room is being made for it",
    "job.preempted": "preempted",
    "run.ended": "run ended",
    "job.ended": "ended",
}
_OF_THE_HEAD = {"state", "by", "reason", "reason_code"}


def timeline(events: Iterable[dict[str, Any]], name: str) -> Iterator[str]:
    """One line for each event: its time, how long after the one before, what happened, why, and by whom."""
    first = before = 0
    for event in events:
        at_ms, detail = event["at_ms"], event["detail"]
        if not first:
            first = before = at_ms
            yield f"job {event['job']} {name}".rstrip()
        attempt = _attempt(event)
        what = _SAID.get(event["kind"], event["kind"].replace(".", " ").replace("_", " "))
        if detail.get("state"):
            what += f": {detail['state']}"
        where = f" on {event['node']}" if event["node"] else ""
        run = f" (attempt {attempt}, run {event['run']})" if event["run"] else ""
        why = detail.get("reason") or detail.get("reason_code") or ""
        rest = detail_text({key: value for key, value in detail.items() if key not in _OF_THE_HEAD})
        by = f", by {detail['by']}" if detail.get("by") else ""
        line = f"{event['at']}  {_since(at_ms - before):>8}  {what}{where}{run}{f': {why}' if why else ''}{by}"
        yield clean(f"{line}  [{rest}]" if rest else line)
        before = at_ms


def print_timeline(events: Iterable[dict[str, Any]], name: str) -> None:
    for line in timeline(events, name):
        click.echo(line)


def _attempt(event: dict[str, Any]) -> str:
    return str(event["run"]).rpartition(".")[2]


def _since(ms: int) -> str:
    return f"+{short(ms)}" if ms >= 1000 else f"+{ms}ms" if ms else ""
