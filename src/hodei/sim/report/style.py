"""The style of all pictures, and their conversion to SVG or PNG: equal figures give equal bytes.

Matplotlib is imported only when a picture is drawn, without a window system and without its global state.
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

from hodei.sim.report.table import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER = "#1f2933", "#d5dbe1", "#fefefe"  # the page replaces these three by its own colours
REST = "#9aa5b1"
# The colours of Okabe and Ito, which colour-blind readers can distinguish, without the yellow, which is too faint on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 1.5), (3, 1.2), (8, 1.5, 2, 1.5))
FONT = "DejaVu Sans"
WIDTH_IN = 9.0
LEGEND_COLUMNS = 7
_SALT = "hodei"
_MISSING = "Pictures need Matplotlib, which is not installed. Install it with: pip install 'hodei[plots]'"
_RC: dict[str, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": _SALT,
    "text.parse_math": False,  # names may contain $
    "font.family": [FONT],  # part of Matplotlib, so every machine draws the same
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
    """What is missing to draw pictures and how to install it; "" if nothing is."""
    return "" if importlib.util.find_spec("matplotlib") is not None else _MISSING


@contextmanager
def report_style() -> Iterator[None]:
    """The settings of reports on top of Matplotlib's defaults, without the user's matplotlibrc."""
    import matplotlib.style

    with matplotlib.style.context(_RC, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names may need other fonts
        yield


def new_figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def to_bytes(figure: Figure, form: str) -> bytes:
    out = io.BytesIO()
    # No date and no version, so that files can be compared.
    metadata = {"Date": None, "Creator": "Hodei"} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, metadata=metadata)
    figure.set_layout_engine("none")  # the slowest part of drawing; the result is reused for other formats
    return out.getvalue()


def colour_of(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def dashes_of(number: int) -> tuple[float, tuple[float, ...]] | str:
    """A dash pattern per line, so that lines can be distinguished without colour."""
    pattern = DASHES[(number + number // len(PALETTE)) % len(DASHES)]
    return (0, pattern) if pattern else "-"


def shorten(text: str, most: int = 18) -> str:
    text = printable(text) or "(none)"
    text = f" {text}" if text.startswith("_") else text  # Matplotlib hides names with an underscore from legends
    return text if len(text) <= most else text[: most - 1] + "…"


def time_unit(span_ms: float) -> tuple[str, int]:
    return next((name, size) for name, size, least in _TIME_UNITS if span_ms >= least * size)


def time_axis(axes: Axes, end_ms: float, *, start: float = 0, labelled: bool = True) -> None:
    """An axis from `start` to `end_ms` in days, hours, minutes or seconds."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    name, size = time_unit(end_ms)
    end_ms = end_ms if end_ms > start else start + 1000
    steps = {"days": [1, 2, 5, 7, 10], "hours": [1, 2, 3, 4, 6, 8, 10], "minutes": [1, 1.5, 2, 3, 5, 10]}
    short = end_ms - start < 10 * size  # ticks are fractions of the unit
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
    """Place the legend between title and picture, where it covers nothing."""
    entries = list(handles) if handles is not None else list(axes.get_legend_handles_labels()[0])
    if not entries:
        return
    # A legend wider than the picture would shrink it.
    widest = max(len(str(entry.get_label())) for entry in entries)
    across = max(1, min(len(entries), LEGEND_COLUMNS, int(WIDTH_IN * 72 * 0.85 / (widest * 5.6 + 34))))
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


_LINKED = re.compile(
    r'<a xlink:href="(job:\d+)"[^>]*>\s*<path d="([^"]*)"[^>]*?style="fill: ([^;"]+)[^"]*"\s*/>\s*</a>'
)
_BARS = re.compile(r'<g id="bars">')
_OPENING = re.compile(r"<svg\b[^>]*>")
_PROLOGUE = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|xlink:href="#)')
_STYLE = re.compile(r"\s*<defs>\s*<style\b.*?</style>\s*</defs>", re.DOTALL)  # would apply to the whole page
_SIZE = re.compile(r'\s(?:width|height)="[^"]*"')


def finish_svg(svg: str, title: str, about: str, titles: Mapping[str, str]) -> str:
    """Add title and description, and replace Matplotlib's links on bars by titles. The common style of bars moves to their
    group, which makes the file a third smaller."""
    if titles:
        svg = _LINKED.sub(lambda found: _bar(found, titles), svg)
        svg = _BARS.sub(f'<g id="bars" stroke="{PAPER}" stroke-width="0.25">', svg)
    svg = svg.replace(f"'{FONT}'", f"'{FONT}', Verdana, sans-serif")  # fallbacks
    head = f"<title>{html.escape(title)}</title>\n <desc>{html.escape(about)}</desc>"
    return _OPENING.sub(lambda found: f"{found[0]}\n {head}", svg, count=1)


def inline_svg(svg: str, name: str, title: str) -> str:
    """For the page: without the parts of a file, in the page's colours, and with ids unique to the picture."""
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
