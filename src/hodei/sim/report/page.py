"""The page: one HTML file that needs nothing else, no network and no scripts, though a script makes it nicer."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import Struct

from hodei.sim.report.table import Row, best_of, shown_columns, unit_of, write_number

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


class Drawn(Struct):
    """A picture on the page: `svg` ready to be put in, `group` a policy's name if it is about that one alone."""

    name: str
    title: str
    about: str
    svg: str
    group: str = ""


def page(rows: Sequence[Row], drawn: Sequence[Drawn], notes: Sequence[str]) -> str:
    workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
    about = f"{_count(len(rows), 'run')} of {_listed(workloads)}" if rows else "No runs were given."
    title = "A simulated run" if len(rows) == 1 else "Policies compared"
    shared = [picture for picture in drawn if not picture.group]
    links = [("numbers-table", "Table"), *((p.name, p.title) for p in shared)]
    if len(shared) < len(drawn):
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
    body += _charts([picture for picture in drawn if picture.group])
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
            text = html.escape(write_number(value, column, unit_of(column, rows)[1]))
            won = number in best[column.key]
            mark = ' class="best"' if won else ""
            star = ' <span title="best of its column" aria-label="best">★</span>' if won else ""
            cells.append(f'<td{mark} data-value="{html.escape("" if value is None else str(value))}">{text}{star}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="The numbers of every run"><table class="numbers">'
        f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
        f"<p>{'★ is the best of its column. ' * any(best.values())}Unrounded values are in summary.csv and summary.json.</p>"
        f"<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _charts(drawn: Sequence[Drawn]) -> Iterable[str]:
    if not drawn:
        return
    yield '<h2 id="gantt">Gantt charts</h2>\n<p>Point at a bar to see its job.</p>'
    for number, (label, pictures) in enumerate(groupby(drawn, key=lambda picture: picture.group)):
        yield f"<details{'' if number else ' open'}><summary>{html.escape(label)}</summary>"
        yield from (_figure(picture) for picture in pictures)
        yield "</details>"


def _figure(picture: Drawn) -> str:
    """Its letters would be too small on a narrow screen; there one can push it sideways."""
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
