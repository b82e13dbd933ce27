"""`hodei job graph`: what a job waits for and who waits for it, as a tree, or drawn."""

from __future__ import annotations

import sys

import click

from hodei.cli.options import client, job_argument, output_option
from hodei.cli.output import emit_one, note
from hodei.cli.refs import resolve_job


@click.command()
@job_argument
@click.option(
    "--format", "form", type=click.Choice(("tree", "dot", "mermaid", "svg")), default="tree", show_default=True,
    help="A tree for people, the text of Graphviz or Mermaid, or a picture.",
)  # fmt: skip
@output_option
def graph(job: str, form: str, output: str) -> None:
    """Draw what a job waits for and who waits for it.

    \b
      hodei job graph 12
      hodei job graph 12 --format svg > graph.svg
      hodei job graph 12 --format dot | dot -Tpng > graph.png
    """
    from hodei.cli import graph_drawing as drawing

    with client() as server:
        found = server.graph(resolve_job(server, job))
    utf = (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "").startswith("utf")
    draw = {"dot": drawing.dot, "mermaid": drawing.mermaid, "svg": drawing.svg}.get(form)
    emit_one(
        found, output, name=lambda g: "\n".join(str(one.id) for one in g.jobs),
        text=lambda g: draw(g) if draw is not None else drawing.tree(g, lines=utf),
    )  # fmt: skip
    if found.truncated:
        note(f"these are the nearest {len(found.jobs)} jobs; there are more")
