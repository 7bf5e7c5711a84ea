"""The figures of a report. Each is drawn once, as wide as a phone, and saved as PNG and mostly as SVG for the page."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from fastcssl.report.comparison import Comparison, ComparisonRow, Value
from fastcssl.report.drawing import (
    DASHES,
    HEIGHT,
    INK,
    LINES,
    MUTED,
    PAPER,
    WIDTH,
    Picture,
    arrange,
    line_style,
    panels,
)
from fastcssl.report.matrix import after, border, references, short_names
from fastcssl.report.runs import RunRecord
from fastcssl.runs.log import StepReport
from fastcssl.runs.metrics import average_over_all
from fastcssl.runs.results import Evaluation

_CELLS = LinearSegmentedColormap.from_list("cells", ["#f3f7fb", "#c9ddee", "#86b5d9", "#3d80b8", "#134f80"])
_ON_LIGHT, _ON_DARK = "#10151a", "#fdfdfe"
_MAX_POINTS = 300
_MAX_BANDS = 4
_THIN: dict[str, dict[str, Any]] = {  # the lines of references
    "random encoder": {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (5, 3))},
    "chance": {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2))},
}

# ---- Accuracies ------------------------------------------------------------------------------------------------------


def matrix(name: str, found: Evaluation, low: float, high: float) -> Picture:
    """Returns the table of accuracies as a file. `low` and `high`: the range of colours, shared by comparable tables.

    The page has the same table as text.
    """
    num_rows, num_columns = len(found.top1), len(found.columns)
    below = references(found)
    labels = [*(after(found, t) for t in range(num_rows)), *(title for title, _ in below)]

    def make() -> Figure:
        left = 0.34 + 0.076 * max(map(len, labels))
        cell = max(0.4, 0.08 + 0.08 * max(map(len, short_names(found))))
        width = max(WIDTH, left + cell * (num_columns + 1.7))
        height = 0.75 + 0.34 * len(labels)
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((left / width, 0.05 / height, 1 - (left + 0.05) / width, 1 - 0.72 / height))
        axes.grid(False)
        aside = num_columns + (0.2 if num_columns < 6 else 0.6)  # position of column A
        size = 10 if num_columns <= 6 else 9 if num_columns <= 8 else 8
        edges = (np.arange(num_columns + 1) - 0.5, np.arange(num_rows + 1) - 0.5)
        a_TC = 100 * np.asarray(found.top1)
        axes.pcolormesh(*edges, a_TC, cmap=_CELLS, vmin=low, vmax=max(high, low + 1e-9), edgecolor=PAPER, linewidth=2)
        for t, row in enumerate(a_TC.tolist()):
            for i, value in enumerate(row):
                _text(axes, i, t, value, size, color=_on_cell((value - low) / max(high - low, 1e-9)))
        for t, mean in enumerate(found.metrics.A):
            _text(axes, aside, t, 100 * mean, size, fontweight="bold")
        for t, (_, known) in enumerate(below, start=num_rows):
            for i, share in enumerate(known):
                if share is not None:
                    _text(axes, i, t, 100 * share, size, color=MUTED)
        for (x0, y0), (x1, y1) in border([set(c.seen) for c in found.checkpoints], num_columns):
            axes.plot([x0, x1], [y0, y1], color=INK, linewidth=1.6, solid_capstyle="round")
        axes.set_xlim(-0.5, aside + 0.5)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xticks([*range(num_columns), aside], [*short_names(found), "A"])
        axes.set_yticks(range(len(labels)), labels)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xlabel("accuracy in % on task" if num_columns > 1 else "accuracy in %")
        axes.set_ylabel("after task")
        axes.spines[:].set_visible(False)
        return figure

    return Picture(name=name, title="Accuracy on every task, after each task", caption="", make=make, is_on_page=False)


def _text(axes: Axes, x: float, y: float, value: float, size: float, **style: Any) -> None:
    axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize=size, **style)


def _on_cell(shade: float) -> str:
    red, green, blue, _ = _CELLS(min(max(shade, 0.0), 1.0))
    is_dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.28
    return _ON_DARK if is_dark else _ON_LIGHT


def curves(name: str, found: Evaluation) -> Picture:
    """Returns the paper's figure 4: the accuracy on each task, and their mean, after each task."""

    def make() -> Figure:
        num_lines = len(found.columns)
        figure, (axes,) = panels()
        rows = range(len(found.top1))
        for k, label in enumerate(short_names(found)):
            values = [100 * row[k] for row in found.top1]
            style = line_style(k)
            axes.plot(rows, values, label=f"task {label}" if label.isdecimal() else label, **style)
            ahead = [t for t in rows if found.checkpoints[t].seen and k not in found.checkpoints[t].seen]
            axes.plot(ahead, [values[t] for t in ahead], linestyle="none", marker=style["marker"], color=style["color"],
                      markerfacecolor=PAPER, zorder=3)  # fmt: skip
        if num_lines > 1:
            means = [100 * mean for mean in average_over_all(found.top1)]
            axes.plot(rows, means, color=INK, linewidth=2.6, label="mean", zorder=4)
        for title, shares in references(found, with_ft=False):
            mean = 100 * sum(share or 0.0 for share in shares) / len(shares)
            axes.plot(rows, [mean] * len(rows), label=title, **_THIN[title])
        axes.set_xticks(rows, [after(found, t) for t in rows])
        axes.set_xlabel("after task")
        axes.set_ylabel("accuracy in %")
        arrange(figure, columns=3)
        return figure

    caption = (
        "Accuracy in percent on each task as further tasks are learnt, and their mean. Hollow markers: before the task "
        "itself was learnt. Thin lines: the mean of an untrained encoder, and of guessing."
    )
    return Picture(name=name, title="Accuracy on each task over time", caption=caption, make=make)


def averages(name: str, title: str, comparison: Comparison) -> Picture:
    """Returns A after each task for every row with its deviation over seeds, a random encoder and chance."""
    rows, thin = comparison.rows, comparison.references
    has_bands = len(rows) <= _MAX_BANDS
    low, high = _range(rows)
    # A reference that would squeeze the curves into less than half of the height gets a panel of its own.
    apart = {reference for reference, values in thin.items() if low - min(values) > max(high - low, 2.0)}

    def make() -> Figure:
        figure, axes = panels(2 if apart else 1)
        longest = max(len(row.A_T) for row in rows)
        for number, row in enumerate(rows):
            _line_of(axes[0], row, row.A_T, line_style(number), longest=longest, has_bands=has_bands)
        for reference, values in thin.items():
            places = range(longest) if len(values) == longest else [0, longest - 1]
            line = values if len(values) == longest else [values[-1]] * 2
            axes[-1 if reference in apart else 0].plot(places, line, label=reference, **_THIN[reference])
        if apart:
            _break(axes[0], axes[1], top=max(max(thin[reference]) for reference in apart))
        axes[-1].set_xticks(range(longest))
        axes[-1].set_xlabel("after task")
        axes[0].set_ylabel("A in %")
        arrange(figure, (HEIGHT, 0.42) if apart else (HEIGHT,), columns=2 if max(map(_width, rows)) < 26 else 1)
        return figure

    caption = "A: mean accuracy in percent on the tasks learnt so far, after each task."
    if any(row.num_seeds > 1 for row in rows):
        caption += f" {'Bands' if has_bands else 'Bars'}: one standard deviation over seeds."
    if thin:
        caption += " Thin lines: an untrained encoder, and guessing."
    return Picture(name=name, title=title, caption=caption, make=make)


def firsts(name: str, title: str, comparison: Comparison) -> Picture:
    """Returns the accuracy on the first task after each task for every row: whether it is kept or forgotten."""
    rows, task = comparison.rows, comparison.rows[0].results[0].columns[0]
    has_bands = len(rows) <= _MAX_BANDS

    def make() -> Figure:
        figure, axes = panels(1)
        longest = max(len(row.first_T) for row in rows)
        for number, row in enumerate(rows):
            style = line_style(number)
            _line_of(axes[0], row, row.first_T, style, longest=longest, has_bands=has_bands)
        axes[0].set_xticks(range(longest))
        axes[0].set_xlabel("after task")
        axes[0].set_ylabel("accuracy in %")
        arrange(figure, (HEIGHT,), columns=2 if max(map(_width, rows)) < 26 else 1)
        return figure

    caption = f"Accuracy in percent on {task}, the first task, as further tasks are learnt."
    return Picture(name=name, title=title, caption=caption, make=make)


def _width(row: ComparisonRow) -> int:
    return len(row.title)


def _range(rows: Sequence[ComparisonRow]) -> tuple[float, float]:
    """Returns the lowest and the highest value of the curves, deviations included."""
    values = [value for row in rows for value in row.A_T]
    spread = [value.deviation or 0.0 for value in values]
    return (
        min(value.mean - deviation for value, deviation in zip(values, spread, strict=True)),
        max(value.mean + deviation for value, deviation in zip(values, spread, strict=True)),
    )


def _line_of(
    axes: Axes, row: ComparisonRow, line_T: Sequence[Value], style: dict[str, Any], *, longest: int, has_bands: bool
) -> None:
    """Draws one curve of a row. A single value, such as that of joint training, is a horizontal line."""
    if len(line_T) == 1 and longest > 1:
        places, values = [0, longest - 1], [line_T[0]] * 2
        del style["marker"]
    else:
        places, values = list(range(len(line_T))), list(line_T)
    means = np.array([value.mean for value in values])
    axes.plot(places, means, label=row.title, **style)
    if row.num_seeds > 1:
        spread = np.array([value.deviation for value in values])
        if has_bands:
            axes.fill_between(places, means - spread, means + spread, color=style["color"], alpha=0.18, linewidth=0)
        else:
            axes.errorbar(places, means, spread, fmt="none", ecolor=style["color"], elinewidth=0.9, capsize=2.5)


def _break(above: Axes, below: Axes, top: float) -> None:
    """Makes the lower panel start at 0, and marks that the vertical axis is interrupted between the panels."""
    below.set_ylim(0, 1.35 * max(top, 1.0))
    below.locator_params(axis="y", nbins=2)
    above.spines["bottom"].set_visible(False)
    slash: dict[str, Any] = {
        "marker": [(-1, -0.6), (1, 0.6)],
        "markersize": 8,
        "linestyle": "none",
        "color": MUTED,
        "clip_on": False,
    }
    above.plot([0], [0], transform=above.transAxes, **slash)
    below.plot([0], [1], transform=below.transAxes, **slash)


# ---- Training --------------------------------------------------------------------------------------------------------


def training(name: str, run: RunRecord) -> Picture:
    """Returns the loss and its terms over the steps of a run."""
    steps = run.steps
    terms = list(dict.fromkeys(term for report in steps for term in report.terms if len(report.terms) > 1))

    def make() -> Figure:
        figure, (axes,) = panels()
        _plot(axes, steps, lambda report: report.loss, color=INK, linewidth=1.8, label="loss")
        for number, term in enumerate(terms):
            style = line_style(number)
            del style["marker"]
            _plot(axes, steps, partial(_term, name=term), label=term, **style)
        _task_borders(axes, run)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        arrange(figure, columns=3, top=0.25)
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
        figure, (above, below) = panels(2)
        _plot(above, steps, lambda report: report.images_per_s, color=LINES[0], label="images/s")
        above.set_ylim(bottom=0)
        above.set_ylabel("images/s")
        _plot(below, steps, lambda report: 100 * report.data_wait_share, color=LINES[1], label="waited for data")
        if on_gpu:
            _plot(below, steps, lambda report: 100 * (report.device_idle_share or 0.0), color=LINES[2],
                  linestyle=DASHES[1], label="GPU idle")  # fmt: skip
        below.set_ylim(0, max(10.0, below.get_ylim()[1]))
        below.set_ylabel("% of the time")
        below.set_xlabel("step")
        for axes in (above, below):
            _task_borders(axes, run, labelled=axes is above)
        arrange(figure, (HEIGHT / 2, HEIGHT / 2), columns=3, top=0.25)
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
