"""Draws the figures of a report. Each is drawn once, as wide as a phone, and saved as PNG and as SVG for the page.

The colours are Okabe and Ito's, which colour-blind readers can tell apart; each line also has its own marker and dash.
The SVG refers to colours by their names in the page's style sheet, so that a figure fits light pages, dark pages and
print.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fastcssl.report.comparison import ComparisonRow, Value
from fastcssl.report.runs import RunRecord
from fastcssl.runs.log import StepReport
from fastcssl.runs.metrics import average_over_all
from fastcssl.runs.results import Evaluation

# Colours of the light page; page.css defines the dark ones under the same names.
INK, MUTED, GRID, PAPER = "#1c2024", "#626b75", "#e2e6ea", "#ffffff"
LINES = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#56b4e9", "#7f7f7f")
NAMES = {INK: "--ink", MUTED: "--muted", GRID: "--rule", PAPER: "--paper"} | {
    color: f"--line{number}" for number, color in enumerate(LINES)
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.4, 1.2, 1.4)))
_CELLS = LinearSegmentedColormap.from_list("cells", ["#f3f7fb", "#c9ddee", "#86b5d9", "#3d80b8", "#134f80"])
_ON_LIGHT, _ON_DARK = "#10151a", "#fdfdfe"
_WIDTH, _HEIGHT = 5.0, 3.1  # inches of 72 units
_MAX_POINTS = 300
_MAX_BANDS = 4
_PNG_DPI = 200
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
    svg: str  # an element for a page: no prologue, no metadata, colours by name, identifiers of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure that can be drawn."""

    name: str
    title: str
    caption: str
    make: Callable[[], Figure]  # called with this module's style in effect

    def drawn(self) -> DrawnPicture:
        """Draws the figure and returns its files' contents."""
        png, svg = io.BytesIO(), io.StringIO()
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            figure = self.make()
            FigureCanvasSVG(figure).print_svg(svg, metadata=_NO_METADATA)  # type: ignore[no-untyped-call]
            figure.set_layout_engine("none")  # print_svg has laid it out
            figure.set_dpi(_PNG_DPI)
            FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})  # type: ignore[no-untyped-call]
        text = _for_page(svg.getvalue(), self.name, self.caption)
        return DrawnPicture(name=self.name, title=self.title, caption=self.caption, png=png.getvalue(), svg=text)


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


def _axes(height: float = _HEIGHT, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(axes)


def _line(number: int) -> dict[str, Any]:
    """Returns a line's style. When colours repeat, markers and dashes are shifted by one."""
    shape = number + number // len(LINES)
    return {
        "color": LINES[number % len(LINES)],
        "marker": _MARKERS[shape % len(_MARKERS)],
        "linestyle": _DASHES[shape % len(_DASHES)],
    }


def _legend(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), columnspacing=1.4)


# ---- Accuracies ------------------------------------------------------------------------------------------------------


def short_names(found: Evaluation) -> list[str]:
    """Returns the columns' names if they are short enough for an axis, otherwise their numbers."""
    names = found.columns
    if max(map(len, names)) <= (9 if len(names) <= 7 else 4):
        return list(names)
    return [str(number) for number in range(len(names))]


def matrix(name: str, found: Evaluation, low: float, high: float) -> Picture:
    """Returns the table of accuracies. `low` and `high`: the range of colours, shared by comparable tables."""
    num_rows, num_columns = len(found.top1), len(found.columns)

    def make() -> Figure:
        width = _WIDTH * max(1.0, (num_columns + 2) / 14)
        figure = Figure(figsize=(width, 0.75 + 0.36 * num_rows), layout="constrained")
        axes = figure.subplots()
        axes.grid(False)
        aside = num_columns + (0.2 if num_columns < 6 else 0.6)  # position of column A
        size = 10 if num_columns <= 6 else 9 if num_columns <= 8 else 8
        for t, row in enumerate(found.top1):
            for i, value in enumerate(row):
                _cell(axes, i, t, 100 * value, low, high, size)
            axes.text(aside, t, f"{100 * found.metrics.A[t]:.1f}", ha="center", va="center",
                      fontsize=size, fontweight="bold")  # fmt: skip
        for (x0, y0), (x1, y1) in _border([set(c.seen) for c in found.checkpoints], num_columns):
            axes.plot([x0, x1], [y0, y1], color=INK, linewidth=1.6, solid_capstyle="round")
        axes.set_xlim(-0.5, aside + 0.5)
        axes.set_ylim(num_rows - 0.5, -0.5)
        axes.set_xticks([*range(num_columns), aside], [*short_names(found), "A"])
        axes.set_yticks(range(num_rows), [_after(found, t) for t in range(num_rows)])
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel("accuracy in % on task" if num_columns > 1 else "accuracy in %")
        axes.set_ylabel("after task")
        for spine in axes.spines.values():
            spine.set_visible(False)
        return figure

    caption = (
        "Top-1 accuracy in percent, with one row per checkpoint and one column per task that it is evaluated on. Tasks "
        "left of the line were already learnt; A is their mean."
    )
    return Picture(name=name, title="Accuracy on every task, after each task", caption=caption, make=make)


def _after(found: Evaluation, row: int) -> str:
    seen = found.checkpoints[row].seen
    return "all" if len(seen) > 1 and len(found.checkpoints) == 1 else str(found.checkpoints[row].task)


def _cell(axes: Axes, x: int, y: int, value: float, low: float, high: float, size: float) -> None:
    shade = (value - low) / (high - low) if high > low else 0.5
    color = _CELLS(min(max(shade, 0.0), 1.0))
    axes.add_patch(Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, facecolor=color, edgecolor="none"))
    red, green, blue, _ = color
    is_dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.28
    axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=size, color=_ON_DARK if is_dark else _ON_LIGHT)


def _border(seen: Sequence[set[int]], num_columns: int) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yields the edges between cells of learnt tasks and cells of later tasks."""
    for t, tasks in enumerate(seen):
        if not tasks:
            continue
        for i in range(num_columns - 1):
            if (i in tasks) != (i + 1 in tasks):
                yield (i + 0.5, max(t - 0.5, -0.46)), (i + 0.5, min(t + 0.5, len(seen) - 0.54))
        for i in range(num_columns):
            if t + 1 < len(seen) and (i in tasks) != (i in seen[t + 1]):
                yield (max(i - 0.5, -0.47), t + 0.5), (min(i + 0.5, num_columns - 0.53), t + 0.5)


def curves(name: str, found: Evaluation) -> Picture:
    """Returns the paper's figure 4: the accuracy on each task, and their mean, after each task."""

    def make() -> Figure:
        num_lines = len(found.columns)
        figure, (axes,) = _axes(_HEIGHT + 0.22 * math.ceil((num_lines + 1) / 4))
        rows = range(len(found.top1))
        for k, label in enumerate(short_names(found)):
            values = [100 * row[k] for row in found.top1]
            style = _line(k)
            axes.plot(rows, values, label=f"task {label}" if label.isdecimal() else label, **style)
            ahead = [t for t in rows if found.checkpoints[t].seen and k not in found.checkpoints[t].seen]
            axes.plot(ahead, [values[t] for t in ahead], linestyle="none", marker=style["marker"], color=style["color"],
                      markerfacecolor=PAPER, zorder=3)  # fmt: skip
        if num_lines > 1:
            means = [100 * mean for mean in average_over_all(found.top1)]
            axes.plot(rows, means, color=INK, linewidth=2.6, label="mean", zorder=4)
        axes.set_xticks(rows, [_after(found, t) for t in rows])
        axes.set_xlabel("after task")
        axes.set_ylabel("accuracy in %")
        _legend(figure, axes, 4)
        return figure

    caption = (
        "Accuracy in percent on each task as further tasks are learnt, and their mean. Hollow markers: before the task "
        "itself was learnt."
    )
    return Picture(name=name, title="Accuracy on each task over time", caption=caption, make=make)


def averages(name: str, rows: Sequence[ComparisonRow]) -> Picture:
    """Returns A after each task for every row, with bands of one standard deviation if there are few rows."""
    title, caption = "Average accuracy after each task", "A: mean accuracy in percent on the tasks learnt so far"
    return _compared(name, rows, [row.A_T for row in rows], title, f"{caption}, after each task.", "A in %")


def firsts(name: str, rows: Sequence[ComparisonRow]) -> Picture:
    """Returns the accuracy on the first task after each task for every row: whether it is kept or forgotten."""
    task = rows[0].results[0].columns[0]
    caption = f"Accuracy in percent on {task}, the first task, as further tasks are learnt."
    values = [row.first_T for row in rows]
    return _compared(name, rows, values, "The first task, kept or forgotten", caption, "accuracy in %")


def _compared(
    name: str, rows: Sequence[ComparisonRow], lines: Sequence[Sequence[Value]], title: str, caption: str, unit: str
) -> Picture:
    """Returns a line for each row, with one value after each task."""
    has_bands = len(rows) <= _MAX_BANDS and any(row.num_seeds > 1 for row in rows)

    def make() -> Figure:
        columns = 2 if max(len(row.title) for row in rows) < 26 else 1
        figure, (axes,) = _axes(_HEIGHT + 0.2 * math.ceil(len(rows) / columns))
        longest = max(len(line) for line in lines)
        for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
            style = _line(number)
            means = [value.mean for value in line]
            if len(means) == 1 and longest > 1:
                del style["marker"]
                axes.axhline(means[0], label=row.title, **style)
                continue
            axes.plot(range(len(means)), means, label=row.title, **style)
            deviations = [value.deviation for value in line]
            if has_bands and None not in deviations:
                spread = [(m - d, m + d) for m, d in zip(means, deviations, strict=True) if d is not None]
                axes.fill_between(range(len(means)), [a for a, _ in spread], [b for _, b in spread],
                                  color=style["color"], alpha=0.16, linewidth=0)  # fmt: skip
        axes.set_xticks(range(longest))
        axes.set_xlabel("after task")
        axes.set_ylabel(unit)
        _legend(figure, axes, columns)
        return figure

    bands = " Bands: one standard deviation over seeds." if has_bands else ""
    return Picture(name=name, title=title, caption=caption + bands, make=make)


# ---- Training --------------------------------------------------------------------------------------------------------


def training(name: str, run: RunRecord) -> Picture:
    """Returns the loss and its terms over the steps of a run."""
    steps = run.steps
    terms = list(dict.fromkeys(term for report in steps for term in report.terms if len(report.terms) > 1))

    def make() -> Figure:
        figure, (axes,) = _axes(_HEIGHT + 0.2 * math.ceil((len(terms) + 1) / 3))
        _plot(axes, steps, lambda report: report.loss, color=INK, linewidth=1.8, label="loss")
        for number, term in enumerate(terms):
            style = _line(number)
            del style["marker"]
            _plot(axes, steps, partial(_term, name=term), label=term, **style)
        _task_borders(axes, run)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        _legend(figure, axes, 3)
        return figure

    caption = "The loss and its terms during training. A new task begins at each vertical line."
    return Picture(name=name, title="Training", caption=caption, make=make)


def _term(report: StepReport, name: str) -> float:
    """Returns a term of the loss, or NaN if it is the only term and therefore equals the loss."""
    return report.terms.get(name, math.nan) if len(report.terms) > 1 else math.nan


def speed(name: str, run: RunRecord) -> Picture:
    """Returns the images per second and the waiting times over the steps of a run."""
    steps = run.steps
    on_gpu = any(report.device_idle_share is not None for report in steps)

    def make() -> Figure:
        figure, (above, below) = _axes(_HEIGHT + 0.5, rows=2)
        _plot(above, steps, lambda report: report.images_per_s, color=LINES[0], label="images/s")
        above.set_ylim(bottom=0)
        above.set_ylabel("images/s")
        _plot(below, steps, lambda report: 100 * report.data_wait_share, color=LINES[1], label="waited for data")
        if on_gpu:
            _plot(below, steps, lambda report: 100 * (report.device_idle_share or 0.0), color=LINES[2],
                  linestyle=_DASHES[1], label="GPU idle")  # fmt: skip
        below.set_ylim(0, max(10.0, below.get_ylim()[1]))
        below.set_ylabel("% of the time")
        below.set_xlabel("step")
        for axes in (above, below):
            _task_borders(axes, run, labelled=axes is above)
        _legend(figure, below, 2)
        return figure

    what = ", and in which the GPU was idle" if on_gpu else ""
    caption = f"Above: images per second. Below: the share of the time in which training waited for data{what}."
    return Picture(name=name, title="Throughput and waiting for data", caption=caption, make=make)


def _plot(axes: Axes, steps: Sequence[StepReport], value: Callable[[StepReport], float], **style: Any) -> None:
    """Plots means over groups of steps. A line ends with its task, and has a gap where a value is not finite."""
    size = max(1, math.ceil(len(steps) / _MAX_POINTS))
    first = True
    starts = [0, *(at + 1 for at, (a, b) in enumerate(pairwise(steps)) if a.task != b.task), len(steps)]
    for begin, end in pairwise(starts):
        parts = [steps[at : min(at + size, end)] for at in range(begin, end, size)]
        x = [part[-1].step for part in parts]
        y = [math.fsum(map(value, part)) / len(part) if all(map(math.isfinite, map(value, part))) else math.nan
             for part in parts]  # fmt: skip
        lone = {"marker": "o"} if len(x) == 1 else {}
        label = style["label"] if first else "_"
        axes.plot(x, y, **{**style, **lone, "label": label})
        first = False


def _task_borders(axes: Axes, run: RunRecord, *, labelled: bool = True) -> None:
    if not run.steps:
        return
    firsts = {report.task: report.step for report in reversed(run.steps)}
    for task, step in sorted(firsts.items()):
        if task > 0:
            axes.axvline(step, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        if labelled and 1 < len(firsts) <= 12:
            axes.annotate(f"task {task}" if len(firsts) <= 6 else str(task), (step, 1), (3, 1), fontsize=9,
                          xycoords=("data", "axes fraction"), textcoords="offset points", va="bottom",
                          color=MUTED)  # fmt: skip
