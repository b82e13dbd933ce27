"""The look that all pictures share, and how one becomes SVG or PNG bytes: the same figure always gives the same bytes.

Matplotlib is imported here and in the modules that draw, only when a picture is drawn. No window system and no global
state of Matplotlib's is used.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hodei.sim.report.table import plain

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER = "#1f2933", "#d5dbe1", "#fefefe"  # a page may put its own colours in the place of these three
REST = "#9aa5b1"
# Okabe and Ito's colours, told apart by colour-blind readers; the yellow is left out, it is too faint on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 1.5), (3, 1.2), (8, 1.5, 2, 1.5))
FONT = "DejaVu Sans"
WIDTH_IN = 9.0
LEGEND_WIDE = 7  # entries in one line
_SALT = "hodei"
_MISSING = "Pictures need Matplotlib, which is not installed. Install it with: pip install 'hodei[plots]'"
_RC: dict[str, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": _SALT,
    "text.parse_math": False,  # a job may be called $x$
    "font.family": [FONT],  # the one that Matplotlib brings along, so that every machine draws the same
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "figure.dpi": 100,
    "savefig.dpi": 130,
    "path.simplify": True,
}
_TIME_UNITS = (("days", 86_400_000, 3), ("hours", 3_600_000, 3), ("minutes", 60_000, 3), ("seconds", 1000, 0))


def why_no_pictures() -> str:
    """Empty if pictures can be drawn; else what is missing and how to install it."""
    return "" if importlib.util.find_spec("matplotlib") is not None else _MISSING


@contextmanager
def house_style() -> Iterator[None]:
    """Our settings on top of Matplotlib's own defaults, whatever the user's matplotlibrc says; undone afterwards."""
    import matplotlib.style

    with matplotlib.style.context(_RC, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font does not have
        yield


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def to_bytes(figure: Figure, form: str) -> bytes:
    out = io.BytesIO()
    # No date and no version: they would make every run's files differ.
    metadata = {"Date": None, "Creator": "Hodei"} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, metadata=metadata)
    figure.set_layout_engine("none")  # found once, kept for further formats: it is the slowest part of drawing
    return out.getvalue()


def colour_of(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def dashes_of(number: int) -> tuple[float, tuple[float, ...]] | str:
    """Another dash pattern for every line, so that lines are told apart without colour and when they repeat it."""
    pattern = DASHES[(number + number // len(PALETTE)) % len(DASHES)]
    return (0, pattern) if pattern else "-"


def clipped(text: str, most: int = 18) -> str:
    text = plain(text) or "(none)"
    text = f" {text}" if text.startswith("_") else text  # Matplotlib keeps such names out of legends
    return text if len(text) <= most else text[: most - 1] + "…"


def time_unit(span_ms: float) -> tuple[str, int]:
    return next((name, size) for name, size, least in _TIME_UNITS if span_ms >= least * size)


def time_axis(axes: Axes, end_ms: float, *, start: float = 0, labelled: bool = True) -> None:
    """Milliseconds from `start` to `end_ms` written in days, hours, minutes or seconds."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    name, size = time_unit(end_ms)
    end_ms = end_ms if end_ms > start else start + 1000
    steps = {"days": [1, 2, 5, 7, 10], "hours": [1, 2, 3, 4, 6, 8, 10], "minutes": [1, 1.5, 2, 3, 5, 10]}
    short = end_ms - start < 10 * size  # then ticks fall between whole units, where steps of a clock look odd
    locator = MaxNLocator(nbins=10, steps=[1, 2, 5, 10] if short else steps.get(name, [1, 2, 5, 10]))
    axes.set_xlim(start, end_ms)
    ticks = [float(tick) * size for tick in locator.tick_values(start / size, end_ms / size)]
    axes.set_xticks([tick for tick in ticks if start <= tick <= end_ms])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / size:,.6g}"))
    if labelled:
        axes.set_xlabel(f"Time since the first submission ({name})")
    else:
        axes.tick_params(labelbottom=False)


def legend_below_title(axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """In one or more lines between title and picture, where it can cover nothing."""
    entries = list(handles) if handles is not None else list(axes.get_legend_handles_labels()[0])
    if not entries:
        return
    # As many in a line as fit: a legend wider than the picture would take its room.
    widest = max(len(str(entry.get_label())) for entry in entries)
    across = max(1, min(len(entries), LEGEND_WIDE, int(WIDTH_IN * 72 * 0.85 / (widest * 5.6 + 34))))
    axes.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=across,
        borderaxespad=0.1,
        fontsize=8.5,
        handlelength=2.2,
        columnspacing=1.2,
    )
    axes.set_title(axes.get_title(loc="left"), pad=10 + 14 * -(-len(entries) // across))


# ------------------------------------------------------------------------------------------------- svg
# SVG text as Matplotlib wrote it, made ready: bars that say what they are, and a form that fits into a page.


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
