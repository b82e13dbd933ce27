"""`hodei priority`: what a job's place in line comes from, term by term."""

from __future__ import annotations

import click

from hodei.cli.options import client, job_argument, output_option
from hodei.cli.output import Column, clean, emit_one, indent, table
from hodei.cli.refs import resolve_job
from hodei.model.priority import PriorityBreakdown, Term

COLUMNS = (
    Column("TERM", lambda term: clean(term.name)),
    Column("POINTS", lambda term: points(term.milli)),
    Column("HOW", lambda term: clean(term.text)),
)


@click.command()
@job_argument
@output_option
def priority(job: str, output: str) -> None:
    """Show every term of a waiting job's priority, and its place in line."""
    with client() as server:
        answer = server.priority(resolve_job(server, job))
    emit_one(answer, output, name=lambda a: str(a.job), text=render)


def render(answer: PriorityBreakdown) -> str:
    head = f"job {answer.job} is number {answer.position} of {answer.pending} in its line ({clean(answer.queue)})"
    rows = [*answer.terms, Term("together", answer.milli, "")]
    return f"{head}\n\n{indent(table(rows, COLUMNS))}"


def points(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")
