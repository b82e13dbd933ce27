"""SVG text as Matplotlib wrote it, made ready: bars that say what they are, and a form that fits into a page."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

from hodei.sim.report.style import FONT, GRID, INK, PAPER

_LINKED = re.compile(
    r'<a xlink:href="(job:\d+)"[^>]*>\s*<path d="([^"]*)"[^>]*?style="fill: ([^;"]+)[^"]*"\s*/>\s*</a>'
)
_BARS = re.compile(r'<g id="bars">')
_OPENING = re.compile(r"<svg\b[^>]*>")
_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|xlink:href="#)')
_STYLE = re.compile(r"\s*<defs>\s*<style\b.*?</style>\s*</defs>", re.DOTALL)  # would hold for the whole page
_SIZE = re.compile(r'\s(?:width|height)="[^"]*"')


def finished(svg: str, title: str, about: str, titles: Mapping[str, str]) -> str:
    """A file of its own: with a title and a description, and a title on each bar in the place of Matplotlib's link.

    What all bars have in common moves to their group, which keeps the file a third smaller.
    """
    if titles:
        svg = _LINKED.sub(lambda found: _bar(found, titles), svg)
        svg = _BARS.sub(f'<g id="bars" stroke="{PAPER}" stroke-width="0.25">', svg)
    svg = svg.replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif")  # for readers without it
    words = f"<title>{html.escape(title)}</title>\n <desc>{html.escape(about)}</desc>"
    return _OPENING.sub(lambda found: f"{found[0]}\n {words}", svg, count=1)


def for_page(svg: str, name: str, title: str) -> str:
    """Without what only a file needs, in the page's colours, and with ids that no other picture has."""
    svg = _METADATA.sub("", _PROLOGUE.sub("", svg, count=1), count=1)
    svg = re.sub(r"<title>.*?</title>\s*<desc>.*?</desc>", "", svg, count=1, flags=re.DOTALL)
    svg = _STYLE.sub("", svg, count=1)
    svg = _ID.sub(rf'id="{name}.\1"', svg)
    svg = _REFERENCE.sub(rf"\g<1>{name}.", svg)
    for colour, variable in ((INK, "ink"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(f": {colour}", f": var(--{variable})")
        svg = svg.replace(f'stroke="{colour}"', f'style="stroke: var(--{variable})"')
    opening = f'role="img" aria-label="{html.escape(title)}"'
    return _OPENING.sub(lambda found: f"{_SIZE.sub('', found[0][:-1])} {opening}>", svg, count=1).strip()


def _bar(found: re.Match[str], titles: Mapping[str, str]) -> str:
    key, outline, fill = found.groups()
    drawn = " ".join(outline.split())
    return f'<path class="job" d="{drawn}" fill="{fill}"><title>{html.escape(titles[key])}</title></path>'
