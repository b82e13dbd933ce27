"""Writes a report into a directory: the numbers as CSV and JSON, the pictures as files, and one HTML page with everything.

The page is self-contained: it makes no requests, and works without its script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.sim.metrics import Result
from hodei.sim.report.gantt import window_of
from hodei.sim.report.style import finish_svg, inline_svg, report_style, to_bytes, why_no_pictures
from hodei.sim.report.table import (
    Row,
    arrays_of,
    best_of,
    format_number,
    printable,
    rows_of,
    shown_columns,
    to_csv,
    to_json,
    unit_of,
)

FORMATS = ("svg", "png")
MAX_BARS = 2000  # on one Gantt chart
MAX_PAGE_BARS = 12_000  # on all charts, so that a browser can open the page


class PagePicture(Struct):
    """`svg`: ready for the page; `group`: the policy, if the picture shows one policy alone."""

    name: str
    title: str
    about: str
    svg: str
    group: str = ""


def write_report(results: Sequence[Result], out: Path, *, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write into `out` and return the files, the page last. Without Matplotlib there are no pictures."""
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise InvalidInput(f"{unknown[0][:40]!r} is not a picture format", hint=f"use {' or '.join(FORMATS)}")
    rows = [{**row, "label": printable(row["label"])} for row in rows_of(results)]
    out.mkdir(parents=True, exist_ok=True)
    written = [_write(out / "summary.csv", to_csv(rows)), _write(out / "summary.json", to_json(rows))]
    pictures: list[PagePicture] = []
    notes = [why_no_pictures()] if why_no_pictures() else []
    if not notes:
        for name, picture, files in _draw_pictures(results, rows, formats):
            pictures.append(picture)
            written += [_write(out / f"{name}.{form}", content) for form, content in files]
        notes = _missing_pictures(results, pictures)
    written.append(_write(out / "index.html", render_page(rows, pictures, notes)))
    return written


def _draw_pictures(
    results: Sequence[Result], rows: Sequence[Row], formats: Sequence[str]
) -> Iterator[tuple[str, PagePicture, list[tuple[str, bytes]]]]:
    # Only drawing needs Matplotlib.
    from hodei.sim.report import gantt, pictures

    all_arrays = [arrays_of(result, row["label"]) for result, row in zip(results, rows, strict=True)]
    bars = min(MAX_BARS, MAX_PAGE_BARS // (2 * max(len(results), 1)))
    names: set[str] = set()
    with report_style():
        drawings = [
            partial(pictures.key_figures, rows),
            partial(pictures.load_over_time, all_arrays),
            partial(pictures.nodes_over_time, all_arrays),
            partial(pictures.wait_cdf, all_arrays),
            partial(pictures.slowdown_cdf, all_arrays),
            partial(pictures.fairness, all_arrays),
            partial(pictures.fragmentation_over_time, all_arrays),
            partial(pictures.preemptions_over_time, all_arrays),
        ]
        window = window_of(all_arrays, bars)
        for arrays in all_arrays:
            drawings.append(partial(gantt.gantt_by_node, arrays, bars, window))
            drawings.append(partial(gantt.gantt_by_user, arrays, bars, window))
        for draw in drawings:
            picture = draw()
            if picture is None:
                continue
            name = _file_name(f"{picture.name}-{picture.group}" if picture.group else picture.name, names)
            raw = to_bytes(picture.figure, "svg").decode()
            svg = finish_svg(raw, picture.title, picture.about, picture.titles)
            files = [(f, svg.encode() if f == "svg" else to_bytes(picture.figure, f)) for f in dict.fromkeys(formats)]
            inline = inline_svg(svg, name, picture.title)
            yield name, PagePicture(name, picture.title, picture.about, inline, picture.group), files


def _missing_pictures(results: Sequence[Result], pictures: Sequence[PagePicture]) -> list[str]:
    """Why expected pictures are missing."""
    if not results:
        return []
    names = {picture.name for picture in pictures}
    reasons = {
        "load": "No samples were recorded, so there is no picture of utilisation.",
        "wait-cdf": "No job was started, so there is no picture of waits.",
        "preemptions": "No job was preempted under any policy.",
        "fragmentation": "There was no fragmentation: free capacity could be used at all times.",
    }
    return [reason for name, reason in reasons.items() if name not in names]


def _file_name(wanted: str, taken: set[str]) -> str:
    base = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:80]
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def render_page(rows: Sequence[Row], pictures: Sequence[PagePicture], notes: Sequence[str]) -> str:
    workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
    listed = ", ".join(workloads[:5]) + (f" and {len(workloads) - 5} more" if len(workloads) > 5 else "")
    about = f"{len(rows)} run{'s' * (len(rows) != 1)} of {listed}" if rows else "No runs were given."
    title = "A simulated run" if len(rows) == 1 else "Policies compared"
    shared = [picture for picture in pictures if not picture.group]
    links = [("numbers-table", "Table"), *((p.name, p.title) for p in shared)]
    if len(shared) < len(pictures):
        links.append(("gantt", "Gantt charts"))
    menu = "".join(f'<li><a href="#{name}">{html.escape(title)}</a></li>' for name, title in links)
    body = [
        f"<header><h1>{title}</h1>",
        f"<p>{html.escape(about)}</p></header>",
        f'<nav aria-label="Contents"><ul>{menu}</ul></nav>',
        "<main>",
        *(f'<p role="note">{html.escape(note)}</p>' for note in notes),
        '<h2 id="numbers-table">Table</h2>',
        _table(rows),
    ]
    for picture in shared:
        body += [f'<h2 id="{picture.name}">{html.escape(picture.title)}</h2>', _figure(picture)]
    body += _charts([picture for picture in pictures if picture.group])
    body.append("</main>")
    return _document(title, "\n".join(body))


def _table(rows: Sequence[Row]) -> str:
    columns = shown_columns(rows)
    heads = ['<th scope="col">policy</th>']
    for column in columns:
        unit = unit_of(column, rows)[0]
        small = f" <small>{unit}</small>" if unit else ""
        heads.append(f'<th scope="col" title="{html.escape(column.about)}">{html.escape(column.title)}{small}</th>')
    meanings = "".join(f"<dt>{html.escape(c.title)}</dt><dd>{html.escape(c.about)}</dd>" for c in columns)
    best = {column.key: best_of(column, rows) for column in columns}
    lines = []
    for number, row in enumerate(rows):
        cells = [f'<th scope="row">{html.escape(row["label"])}</th>']
        for column in columns:
            value = row.get(column.key)
            text = html.escape(format_number(value, column, unit_of(column, rows)[1]))
            is_best = number in best[column.key]
            mark = ' class="best"' if is_best else ""
            star = ' <span title="best of its column" aria-label="best">★</span>' if is_best else ""
            cells.append(f'<td{mark} data-value="{html.escape("" if value is None else str(value))}">{text}{star}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="The numbers of every run"><table class="numbers">'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
        f"<p>{'★ is the best of its column. ' * any(best.values())}Unrounded values are in summary.csv and summary.json.</p>"
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _charts(pictures: Sequence[PagePicture]) -> Iterable[str]:
    if not pictures:
        return
    yield '<h2 id="gantt">Gantt charts</h2>\n<p>Point at a bar to see its job.</p>'
    for number, (label, charts) in enumerate(groupby(pictures, key=lambda picture: picture.group)):
        yield f"<details{'' if number else ' open'}><summary>{html.escape(label)}</summary>"
        yield from (_figure(picture) for picture in charts)
        yield "</details>"


def _figure(picture: PagePicture) -> str:
    """Scrollable, because its text would be too small on a narrow screen."""
    title = html.escape(picture.title)
    return (
        f'<figure>\n<div class="scroll" tabindex="0" role="region" aria-label="{title}">\n{picture.svg}\n</div>\n'
        f"<figcaption>{html.escape(picture.about)}</figcaption></figure>"
    )


def _document(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
<script>{SCRIPT}</script>
</body>
</html>
"""


STYLE = """
:root { --ink: #1f2933; --paper: #fefefe; --grid: #d5dbe1; --soft: #52606d; --best: #e3f4ec; color-scheme: light dark }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #161b20; --grid: #36414b; --soft: #a6b1bd; --best: #17392c }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, "DejaVu Sans", Verdana, sans-serif }
h1 { margin: 0 0 .25rem; font-size: 1.6rem } h2 { margin: 2.5rem 0 .5rem; font-size: 1.25rem }
p { margin: .25rem 0 1rem; color: var(--soft) }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; list-style: none }
a { color: inherit } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .4rem .5rem; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
th small { display: block; color: var(--soft); font-weight: normal }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; text-align: inherit }
th[aria-sort=ascending] button::after { content: " \\25B2" } th[aria-sort=descending] button::after { content: " \\25BC" }
td { white-space: nowrap }
td.best { background: var(--best); font-weight: bold }
figure { margin: 1rem 0 2rem } figure svg { display: block; width: 100%; min-width: 40rem; height: auto }
figure svg * { stroke-linejoin: round; stroke-linecap: butt }
dt { font-weight: bold } dd { margin: 0 0 .4rem; color: var(--soft) }
figcaption { color: var(--soft); font-size: .9rem; max-width: 50rem }
details { border-top: 1px solid var(--grid) } summary { cursor: pointer; padding: .6rem 0; font-weight: bold }
svg .job:hover { stroke: var(--ink) !important; stroke-width: 1.2 }
#tip { position: fixed; z-index: 1; max-width: 24rem; padding: .4rem .6rem; white-space: pre-line; pointer-events: none;
  font-size: .85rem; color: var(--paper); background: var(--ink); border-radius: .3rem }
@media print { #tip, nav { display: none } }
"""

SCRIPT = """
(() => {
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; document.body.append(tip);
  let bar = null, title = null;
  const leave = () => { if (bar) bar.append(title); bar = null; tip.hidden = true; };
  document.addEventListener("pointermove", event => {
    const over = event.target.closest ? event.target.closest("path.job") : null;
    if (over !== bar) {
      leave();
      title = over && over.querySelector("title");
      if (title) { bar = over; tip.textContent = title.textContent; tip.hidden = false; title.remove(); }
    }
    if (bar) {
      tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
    }
  });
  document.addEventListener("pointerleave", leave);
  document.addEventListener("keydown", event => { if (event.key === "Escape") leave(); });
  const value = (row, at) => {
    const raw = row.cells[at].dataset.value;
    return raw === undefined ? row.cells[at].textContent : raw === "" ? NaN : Number(raw);
  };
  document.querySelectorAll("table.numbers").forEach(table => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, at) => {
      const button = document.createElement("button");
      button.type = "button"; button.append(...head.childNodes); head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => {
          const x = value(a, at), y = value(b, at);
          if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
          return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
        };
        body.append(...[...body.rows].sort(order));
      });
    });
  });
})();
"""
