"""`hodei job graph`: the dependencies and dependents of a job as a text tree, Graphviz, Mermaid or SVG."""

from __future__ import annotations

from html import escape

import click

from hodei.api.views import GraphEdge, GraphJob, JobGraph
from hodei.cli.options import client, job_argument, output_option
from hodei.cli.output import clean, emit_one, is_unicode, note, paint
from hodei.cli.refs import resolve_job

# A deeper tree is not readable.
_MAX_DEPTH = 40
_FILL = {
    "succeeded": "#cdebd0", "failed": "#f6c9c6", "cancelled": "#dddddd", "running": "#c7e3f5", "scheduled": "#c7e3f5",
    "pending": "#fbedc3", "held": "#e6d4f2",
}  # fmt: skip
_WIDTH, _HEIGHT, _ACROSS, _DOWN = 190, 40, 90, 16


def tree(graph: JobGraph, *, lines: bool = True) -> str:
    """From the jobs without dependencies downwards. A job with several dependencies is shown in full below the first."""
    jobs = {job.id: job for job in graph.jobs}
    below: dict[int, list[GraphEdge]] = {}
    for edge in graph.edges:
        if edge.awaited:
            below.setdefault(edge.awaited, []).append(edge)
    has_above = {edge.job for edge in graph.edges if edge.awaited}
    data: dict[int, list[str]] = {}
    for edge in graph.edges:
        if edge.what:
            data.setdefault(edge.job, []).append(edge.what)
    branch, last, on, off = ("├─ ", "└─ ", "│  ", "   ") if lines else ("|- ", "`- ", "|  ", "   ")
    out: list[str] = []
    seen: set[int] = set()
    # (job, edge to it, prefix of its line, prefix of the lines below it, depth)
    roots = [id for id in jobs if id not in has_above]
    pending: list[tuple[int, GraphEdge | None, str, str, int]] = [(id, None, "", "", 0) for id in reversed(roots)]
    while pending:
        id, edge_here, prefix, prefix_below, depth = pending.pop()
        job = jobs[id]
        condition = "" if edge_here is None or edge_here.on == "succeeded" else f"if {edge_here.on}: "
        head = f"{prefix}{condition}{_line(job, job.id == graph.job)}"
        if id in seen:
            out.append(f"{head}  (see above)")
            continue
        seen.add(id)
        needs = "".join(f", needs {clean(what)}" for what in data.get(id, ()))
        out.append(f"{head}{f'  ({job.need} are enough)' if job.need else ''}{needs}")
        dependents = below.get(id, [])
        if dependents and depth >= _MAX_DEPTH:
            out.append(f"{prefix_below}{last}... and its dependents (--format svg draws all)")
            continue
        for number, edge in enumerate(reversed(dependents)):
            line, rest = (last, off) if number == 0 else (branch, on)
            pending.append((edge.job, edge, prefix_below + line, prefix_below + rest, depth + 1))
    return "\n".join(out)


def _line(job: GraphJob, selected: bool) -> str:
    why = f": {clean(job.reason)}" if job.reason and job.state in ("pending", "held", "failed", "cancelled") else ""
    return f"{'* ' if selected else ''}{job.id} {clean(job.name)}  {paint(job.state, job.state)}{why}"


def dot(graph: JobGraph) -> str:
    out = ["digraph jobs {", "  rankdir=LR;", '  node [shape=box, style="rounded,filled", fontname="sans-serif"];']
    for job in graph.jobs:
        label = _quoted(f"{job.id} {clean(job.name)}\n{job.state}{f' (needs {job.need})' if job.need else ''}")
        wide = ", penwidth=3" if job.id == graph.job else ""
        out.append(f'  {job.id} [label={label}, fillcolor="{_FILL.get(job.state, "#ffffff")}"{wide}];')
    data = _data(graph)
    for what, number in data.items():
        out.append(f"  data{number} [label={_quoted(clean(what))}, shape=note, fillcolor=white];")
    for edge in graph.edges:
        begin = str(edge.awaited) if edge.awaited else f"data{data[edge.what]}"
        label = "" if edge.on == "succeeded" else f" [label={_quoted(edge.on)}]"
        out.append(f"  {begin} -> {edge.job}{label};")
    return "\n".join([*out, "}"])


def mermaid(graph: JobGraph) -> str:
    out, data = ["graph LR"], _data(graph)
    out += [
        f'  j{job.id}["{_mermaid_text(f"{job.id} {job.name}")}<br/>{job.state}"]:::{job.state}' for job in graph.jobs
    ]
    out += [f'  d{number}[("{_mermaid_text(what)}")]' for what, number in data.items()]
    for edge in graph.edges:
        begin = f"j{edge.awaited}" if edge.awaited else f"d{data[edge.what]}"
        out.append(f"  {begin} {'-->' if edge.on == 'succeeded' else f'-->|{edge.on}|'} j{edge.job}")
    used = sorted({job.state for job in graph.jobs})
    out += [f"  classDef {state} fill:{_FILL.get(state, '#ffffff')},stroke:#555,color:#222" for state in used]
    return "\n".join([*out, f"  style j{graph.job} stroke-width:3px"])


def svg(graph: JobGraph) -> str:
    """Layers from left to right: each job is to the right of its dependencies."""
    places = _places(graph)
    right = max((x for x, _ in places.values()), default=0) + _WIDTH + 20
    bottom = max((y for _, y in places.values()), default=0) + _HEIGHT + 20
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{bottom}" viewBox="0 0 {right} {bottom}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>Dependencies and dependents of job {graph.job}</title>",
        f'<rect width="{right}" height="{bottom}" fill="#ffffff"/>',
    ]
    for edge in graph.edges:
        x1, y1 = places[edge.awaited or edge.what]
        x2, y2 = places[edge.job]
        x1, y1, y2 = x1 + _WIDTH, y1 + _HEIGHT // 2, y2 + _HEIGHT // 2
        bend = max((x2 - x1) // 2, 20)
        out.append(
            f'<path d="M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}" fill="none" stroke="#777777"/>'
            f'<path d="M{x2} {y2} l-7 -4 v8 z" fill="#777777"/>'
        )
        if edge.on not in ("succeeded", "exists"):
            text = f'<text x="{(x1 + x2) // 2}" y="{(y1 + y2) // 2 - 4}" text-anchor="middle" font-size="10"'
            out.append(f'{text} fill="#555555">{escape(edge.on)}</text>')
    for job in graph.jobs:
        x, y = places[job.id]
        name, wide = _cut(f"{job.id} {clean(job.name)}"), 3 if job.id == graph.job else 1
        out.append(
            f'<g><title>{escape(clean(job.reason) or job.state)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" rx="6" fill="{_FILL.get(job.state, "#ffffff")}" stroke="#555555" stroke-width="{wide}"/>'
            f'<text x="{x + 10}" y="{y + 17}" fill="#222222">{escape(name)}</text>'
            f'<text x="{x + 10}" y="{y + 32}" font-size="10" fill="#444444">{escape(job.state)}</text></g>'
        )
    for what in _data(graph):
        x, y = places[what]
        out.append(
            f'<g><title>{escape(clean(what))}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
            'fill="#ffffff" stroke="#555555" stroke-dasharray="4 3"/>'
            f'<text x="{x + 10}" y="{y + 24}" fill="#222222">{escape(_cut(clean(what)))}</text></g>'
        )
    return "\n".join([*out, "</svg>"])


def _places(graph: JobGraph) -> dict[int | str, tuple[int, int]]:
    """The position of each box. A job's layer is the longest path to it from a job without dependencies."""
    above: dict[int, list[int | str]] = {job.id: [] for job in graph.jobs}
    below: dict[int | str, list[int]] = {}
    for edge in graph.edges:
        above[edge.job].append(edge.awaited or edge.what)
        below.setdefault(edge.awaited or edge.what, []).append(edge.job)
    layer: dict[int | str, int] = dict.fromkeys([*_data(graph), *(id for id, before in above.items() if not before)], 0)
    left = {id: len(before) for id, before in above.items()}
    ready: list[int | str] = list(layer)
    for one in ready:  # grows during the loop
        for after in below.get(one, ()):
            layer[after] = max(layer.get(after, 0), layer[one] + 1)
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    rows: dict[int, int] = {}
    heights: dict[int | str, float] = {}
    places: dict[int | str, tuple[int, int]] = {}
    for one in sorted(ready, key=lambda one: layer[one]):
        before = above[one] if isinstance(one, int) else []
        heights[one] = sum(heights.get(each, 0.0) for each in before) / len(before) if before else len(heights)
    for one in sorted(ready, key=lambda one: (layer[one], heights[one])):
        row = rows[layer[one]] = rows.get(layer[one], -1) + 1
        places[one] = (10 + layer[one] * (_WIDTH + _ACROSS), 10 + row * (_HEIGHT + _DOWN))
    return places


def _data(graph: JobGraph) -> dict[str, int]:
    return {what: number for number, what in enumerate(sorted({edge.what for edge in graph.edges if edge.what}))}


def _cut(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:27]}…"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _mermaid_text(text: str) -> str:
    """Mermaid has no quoting except HTML entities."""
    return escape(clean(text), quote=True)


@click.command()
@job_argument
@click.option(
    "--format", "form", type=click.Choice(("tree", "dot", "mermaid", "svg")), default="tree", show_default=True,
    help="A text tree, Graphviz, Mermaid, or an image.",
)  # fmt: skip
@output_option
def graph(job: str, form: str, output: str) -> None:
    """Draw the dependencies and dependents of a job.

    \b
      hodei job graph 12
      hodei job graph 12 --format svg > graph.svg
      hodei job graph 12 --format dot | dot -Tpng > graph.png
    """

    with client() as server:
        found = server.graph(resolve_job(server, job))
    draw = {"dot": dot, "mermaid": mermaid, "svg": svg}.get(form)
    emit_one(
        found, output, name=lambda g: "\n".join(str(one.id) for one in g.jobs),
        text=lambda g: draw(g) if draw is not None else tree(g, lines=is_unicode()),
    )  # fmt: skip
    if found.truncated:
        note(f"these are the closest {len(found.jobs)} jobs; there are more")
