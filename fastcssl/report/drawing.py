"""Draws figures: their style, their layout, and how they become PNG files and parts of a page.

The colours are Okabe and Ito's, which colour-blind readers can tell apart; each line also has its own marker and dash.
The SVG refers to colours by their names in the page's style sheet, so that a figure fits light pages, dark pages and
print. A report may have a hundred figures, so their layout is computed from a few lengths in inches instead of by
matplotlib, which draws every text for that; and a PNG file has a palette, which is quick to compress.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

# Colours of the light page; page.css defines the dark ones under the same names.
INK, MUTED, GRID, PAPER = "#1c2024", "#626b75", "#e2e6ea", "#ffffff"
LINES = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#56b4e9", "#7f7f7f")
NAMES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper"} | {
    color: f"--line{number}" for number, color in enumerate(LINES)
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.4, 1.2, 1.4)))
WIDTH, HEIGHT = 5.0, 2.45  # inches of 72 units: of a figure, and of its only panel
_GAP = 0.14  # inches between panels
_PNG_DPI = 200
_NUM_COLORS = 256
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.4,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPicture:
    """A figure as PNG and SVG."""

    name: str  # of its file, without extension
    title: str
    caption: str  # describes the figure in words
    png: bytes
    svg: str  # an element for a page: no prologue, no metadata, colours by name, identifiers of its own; or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure that can be drawn."""

    name: str
    title: str
    caption: str
    make: Callable[[], Figure]  # called with this module's style in effect
    is_on_page: bool = True  # whether it is drawn as SVG too

    def drawn(self) -> DrawnPicture:
        """Draws the figure and returns its files' contents."""
        svg = io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            figure = self.make()
            if self.is_on_page:
                FigureCanvasSVG(figure).print_svg(svg, metadata=_NO_METADATA)  # type: ignore[no-untyped-call]
                figure.set_layout_engine("none")  # print_svg has laid it out
            figure.set_dpi(_PNG_DPI)
            png = _png(figure)
        text = _for_page(svg.getvalue(), self.name, self.caption) if self.is_on_page else ""
        return DrawnPicture(name=self.name, title=self.title, caption=self.caption, png=png, svg=text)


def _png(figure: Figure) -> bytes:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    rgba_HW4 = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    picture = Image.fromarray(rgba_HW4).convert("RGB")
    picture = picture.quantize(_NUM_COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    file = io.BytesIO()
    picture.save(file, "PNG", dpi=(_PNG_DPI, _PNG_DPI))
    return file.getvalue()


def _for_page(svg: str, name: str, caption: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"(url\(#|href=\"#)", lambda m: f"{m[1]}{name}-", svg)
    svg = svg.replace("xlink:href", "href").replace("'DejaVu Sans'", "var(--font)")
    for color, variable in NAMES.items():
        svg = svg.replace(color, f"var({variable})")
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    label = caption.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    head = f'<svg viewBox="{box[1]}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)


def line_style(number: int) -> dict[str, Any]:
    """Returns a line's style. When colours repeat, markers and dashes are shifted by one."""
    shape = number + number // len(LINES)
    return {
        "color": LINES[number % len(LINES)],
        "marker": MARKERS[shape % len(MARKERS)],
        "linestyle": DASHES[shape % len(DASHES)],
    }


# ---- Layout ----------------------------------------------------------------------------------------------------------


def panels(count: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure of panels, one below the other, that share their horizontal axis. `arrange` places them."""
    figure = Figure(figsize=(WIDTH, WIDTH))
    above = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    more = [figure.add_axes((0.0, 0.0, 1.0, 1.0), sharex=above, label=str(number)) for number in range(1, count)]
    for axes in [above, *more][:-1]:
        axes.tick_params(labelbottom=False)
    return figure, [above, *more]


def arrange(figure: Figure, heights: Sequence[float] = (HEIGHT,), *, columns: int, top: float = 0.1) -> None:
    """Places panels of these heights, and a legend of so many columns below them. The figure's height follows."""
    entries = [entry for axes in figure.axes for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    num_rows = math.ceil(len(entries) / columns) if len(entries) > 1 else 0
    bottom = 0.48 + 0.2 * num_rows
    height = top + sum(heights) + _GAP * (len(heights) - 1) + bottom
    figure.set_size_inches(WIDTH, height)
    _place(figure, heights, height, top, left=0.7)
    # The ticks depend on the height of a panel, and the space for their labels on the ticks.
    longest = max(len(label) for axes in figure.axes for label in _tick_labels(axes))
    _place(figure, heights, height, top, left=0.34 + 0.086 * longest)
    if num_rows:
        handles, labels = zip(*entries, strict=True)
        figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), borderaxespad=0.2,
                      ncols=min(columns, len(labels)), columnspacing=1.4)  # fmt: skip


def _place(figure: Figure, heights: Sequence[float], height: float, top: float, left: float) -> None:
    upper = height - top
    for axes, own in zip(figure.axes, heights, strict=True):
        axes.set_position((left / WIDTH, (upper - own) / height, (WIDTH - left - 0.1) / WIDTH, own / height))
        upper -= own + _GAP


def _tick_labels(axes: Axes) -> list[str]:
    places = axes.yaxis.get_major_locator()()
    return axes.yaxis.get_major_formatter().format_ticks(list(places))
