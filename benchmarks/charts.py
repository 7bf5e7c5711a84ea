"""Draws charts of results, each beside its file and under the same name (`loader.jsonl`, `loader.png`).

The charts are: throughput by back end and threads, with the decode ceiling; the loss's time and memory against the size
of the banks; and the share of training that waits for data. They have the style of a run's report
(fastcssl/report/drawing.py), and their last line says which results they show. `python benchmarks/bench.py
--charts-only` draws all of them again.
"""

import io
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_tables import NAMES as KERNEL_NAMES
from loader_rows import OURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from PIL import Image

from fastcssl.report.drawing import INK, LINES, MUTED, PAPER, Picture

WIDTH = 7.2  # inches, which gives twice the pixels of a README's column
BLUE, ORANGE = LINES[:2]
PALE_BLUE, GREY, PALE_GREY = "#7fb8d8", "#7b838c", "#bcc3ca"
SMALL, MEDIUM = 8.5, 10.5
BLANK = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}  # the background of text, so that no line crosses it
NUM_COLORS = 64  # of a stored picture, so that text stays smooth and the file small

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Results:
    """The lines of one results file."""

    path: Path
    records: list[Record]
    environment: Record
    summary: Record
    details: Record

    @classmethod
    def read(cls, path: Path) -> "Results":
        found: dict[str, Record] = {}
        records = []
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            ends = [key for key in ("environment", "summary", "details") if [*line] == [key]]
            found |= {key: line[key] for key in ends}
            if not ends:
                records.append(line)
        return cls(path=path, records=records, **{k: found.get(k, {}) for k in ("environment", "summary", "details")})

    @property
    def scale(self) -> str:
        return str(self.environment.get("scale", "full"))

    @property
    def source(self) -> str:
        """Returns the last line of a chart: the file, commit and processor."""
        about = self.environment
        commit = f"commit {(about.get('commit') or 'unknown')[:8]}{' and changes' if about.get('is_modified') else ''}"
        cores = f"{about['cores']} cores" if about.get("cores") else ""
        parts = [f"results/{self.path.name}, {self.scale} form", commit, str(about.get("cpu", "")), cores]
        return " · ".join(filter(None, parts))


def draw_all(paths: Sequence[Path]) -> list[Path]:
    """Draws a chart beside every file for which there is one. Returns the pictures' paths."""
    drawn = []
    for path in paths:
        results = Results.read(path)
        for chart in (throughput, growth, waiting):
            if picture := chart(results):
                target = path.with_suffix(".png")
                _store(picture.drawn().png, target)
                drawn.append(target)
                break
    return drawn


def _store(png: bytes, target: Path) -> None:
    with Image.open(io.BytesIO(png)) as image:
        few = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


# ---- The loader ------------------------------------------------------------------------------------------------------

SECTIONS = {"full": "Full policy, float32 out", "geometry": "Geometry alone, uint8 out"}
IMAGES = {"synthetic": "the embedded set", "imagenet_photos": "ImageNet photos"}
CALLED = {
    "native": "ours, native",
    "our-ffcv": "ours, on FFCV",
    "our-dali": "ours, on DALI",
    "our-dali-inside": "ours, all of it in DALI",
    "our-torchvision": "ours, on torchvision",
    "ffcv": "FFCV's own pipeline",
    "dali": "DALI's own pipeline, CPU",
    "pil": "torchvision, PIL images",
    "tensors": "torchvision v2, tensors",
}


def throughput(results: Results) -> Picture | None:
    """Draws one bar per back end and peer, best first, and the ceiling as a line per number of threads."""
    rates: dict[str, dict[str, dict[int, float]]] = {}  # by section, contender, threads
    for line in results.records:
        rate = line.get("images_per_s_median")
        if line.get("section") in SECTIONS and rate and line["contender"] in (*CALLED, "decode"):
            rates.setdefault(line["section"], {}).setdefault(line["contender"], {})[line["workers"]] = rate
    if "native" not in rates.get("full", {}):
        return None
    ceilings = {section: found.pop("decode", None) for section, found in rates.items()}
    shared = next((found for found in ceilings.values() if found), {})  # decoding is the same work in both sections
    rows = {section: sorted(found.items(), key=lambda row: -max(row[1].values())) for section, found in rates.items()}

    everything = [shared, *(each for found in rates.values() for each in found.values())]
    top = 1.06 * max(rate for each in everything for rate in each.values())

    def make() -> Figure:
        heights = [len(found) + 0.4 for found in rows.values()]
        figure = Figure(figsize=(WIDTH, 1.5 + 0.32 * sum(heights) + 0.3 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, section in zip(panels, rows, strict=True):
            _bars(axes, rows[section])
            shown = {threads for _, found in rows[section] for threads in found}
            limits = {threads: rate for threads, rate in (ceilings[section] or shared).items() if threads in shown}
            _ceilings(axes, limits, labelled=axes is panels[0], top=top)
            axes.set_title(
                SECTIONS[section], loc="left", fontsize=MEDIUM, color=INK, pad=22 if axes is panels[0] else 8
            )
        panels[-1].set_xlabel("source images per second, with two 224-px views each (median of the rounds)")
        panels[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panels[-1].set_xlim(0, top)
        images = results.environment.get("images", "")
        about = IMAGES.get(images, images)
        _frame(figure, "Images per second, by back end and threads", results, f"{about}, short side 256 px, warm cache")
        return figure

    caption = (
        "Source images per second by back end and number of threads, with the rate of decoding alone as the ceiling."
    )
    return Picture(name=results.path.stem, title="Throughput by back end and threads", caption=caption, make=make)


def _bars(axes: Axes, rows: Sequence[tuple[str, dict[int, float]]]) -> None:
    for place, (contender, rates) in enumerate(rows):
        colors = (PALE_BLUE, BLUE) if contender in OURS else (PALE_GREY, GREY)
        thick = 0.38 if len(rates) > 1 else 0.5
        for order, (threads, rate) in enumerate(sorted(rates.items())):
            y = place + (order - (len(rates) - 1) / 2) * thick
            axes.barh(y, rate, height=0.92 * thick, color=colors[threads > 1], linewidth=0)
            label = f"{rate:,.0f}"
            if place == 0:
                label += f"  {_threads(threads)}"
            axes.annotate(label, (rate, y), (4, 0), textcoords="offset points", va="center", fontsize=SMALL,
                          color=INK, bbox=BLANK)  # fmt: skip
    axes.set_yticks(range(len(rows)), [CALLED[contender] for contender, _ in rows])
    for label, (contender, _) in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(INK if contender in OURS else MUTED)
        label.set_fontweight("bold" if contender == "native" else "normal")
    axes.set_ylim(len(rows) - 0.45, -0.6)
    axes.grid(False, axis="y")


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _ceilings(axes: Axes, rates: dict[int, float], *, labelled: bool, top: float) -> None:
    are_close = max(rates.values(), default=0) - min(rates.values(), default=0) < 0.22 * top and len(rates) > 1
    for threads, rate in sorted(rates.items()):
        align = "right" if are_close and rate == min(rates.values()) else "center"
        axes.axvline(rate, color=ORANGE, linewidth=1.5, linestyle=(0, (4, 2)) if threads == 1 else "-", zorder=1)
        if labelled:
            axes.annotate(f"decoding alone,\n{_threads(threads)}: {rate:,.0f}", (rate, 1), (0, 3), ha=align,
                          xycoords=("data", "axes fraction"), textcoords="offset points", va="bottom",
                          fontsize=SMALL, color=ORANGE, linespacing=1.1)  # fmt: skip


# ---- The loss --------------------------------------------------------------------------------------------------------


def growth(results: Results) -> Picture | None:
    """Draws time and memory of the loss against K on logarithmic axes, where linear growth is a straight line."""
    lines = [line for line in results.records if line.get("part") == "growth" and line.get("seconds_median")]
    names = [name for name in ("moco", "chunked", "ours") if sum(line["name"] == name for line in lines) > 1]
    if "ours" not in names:
        return None
    styles = {
        "moco": {"color": GREY, "marker": "s", "linestyle": (0, (5, 1.6))},
        "chunked": {"color": ORANGE, "marker": "^", "linestyle": (0, (1.4, 1.2))},
        "ours": {"color": BLUE, "marker": "o", "linewidth": 2.4},
    }

    def make() -> Figure:
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        panels = figure.subplots(1, 2)
        parts: tuple[tuple[str, str, Callable[[Record], float | None]], ...] = (
            ("Time, forward and gradient", "ms", lambda line: 1e3 * line["seconds_median"]),
            ("Additional memory", "MB", lambda line: line["extra_mb"]),
        )
        sizes = sorted({line["bank_size"] for line in lines})
        for axes, (title, unit, value) in zip(panels, parts, strict=True):
            points = {
                name: [(line["bank_size"], value(line) or math.nan) for line in lines if line["name"] == name]
                for name in names
            }
            for name, found in points.items():
                axes.plot(*zip(*found, strict=True), **styles[name])
            axes.set(xscale="log", yscale="log")
            axes.set_xlim(0.72 * sizes[0], sizes[-1] * (sizes[-1] / sizes[0]) ** 0.5)
            logs = [math.log10(number) for found in points.values() for _, number in found if number > 0]
            axes.set_ylim(10 ** (math.floor(min(logs) + 0.2) - 0.12), 10 ** (math.ceil(max(logs) - 0.2) + 0.12))
            _label_ends(axes, {name: found[-1] for name, found in points.items()}, unit, styles)
            axes.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
            axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_locator(NullLocator())
                axis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{title}, {unit}", loc="left", fontsize=MEDIUM, color=INK)
            axes.set_xlabel("K, keys per bank, of two banks (k: 1,024)")
        shape = next(line for line in lines if line["name"] == "ours")
        about = f"{shape['num_rows']} rows of {shape['dim']}, {_threads(shape['num_threads'])}, float32"
        if exponent := results.details.get("growth", {}).get("ours", {}).get("time_exponent"):
            about += f"; our time grows as K to the power {exponent:.2f}"
        _frame(figure, "The contrastive loss as its banks grow", results, about)
        return figure

    caption = "Time and additional memory of the contrastive loss against the number of keys, on logarithmic axes."
    return Picture(name=results.path.stem, title="Time and memory against K", caption=caption, make=make)


def _label_ends(axes: Axes, ends: dict[str, tuple[int, float]], unit: str, styles: dict[str, Any]) -> None:
    """Writes names and last values to the right of the curves, and separates labels that are too close."""
    low, high = axes.get_ylim()
    order = sorted(ends, key=lambda name: ends[name][1])
    at = [min(max(math.log(ends[name][1] / low) / math.log(high / low), 0.09), 0.92) for name in order]
    for _ in range(60):  # separates neighbours that are closer than two lines of text
        for place in range(1, len(at)):
            lack = max(0.0, 0.17 - (at[place] - at[place - 1])) / 2
            at[place - 1], at[place] = max(at[place - 1] - lack, 0.09), min(at[place] + lack, 0.92)
    for name, height in zip(order, at, strict=True):
        size, value = ends[name]
        shown = f"{value:,.1f}" if value < 10 else f"{value:,.0f}"
        axes.annotate(f"{KERNEL_NAMES[name]}\n{shown} {unit}", (size, height), (8, 0), va="center", bbox=BLANK,
                      linespacing=1.15, xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=SMALL,
                      color=styles[name]["color"], fontweight="bold" if name == "ours" else "normal")  # fmt: skip


# ---- Training --------------------------------------------------------------------------------------------------------

WORK_LOADS = {
    "small": "MoCo, 32-px array\n(resident)",
    "photos": "MoCo, JPEGs\n(native)",
    "pnr": "MoCo + PNR, JPEGs\n(native)",
}


def waiting(results: Results) -> Picture | None:
    """Draws the share of time that training waits for data, with one dot per round, and the images per second."""
    steps = [line for line in results.records if line.get("mode") == "step" and line.get("images_per_s_median")]
    if not any(line["side"] == "ours" for line in steps):
        return None
    loads = [load for load in WORK_LOADS if any(line["work_load"] == load for line in steps)]

    def make() -> Figure:
        figure = Figure(figsize=(WIDTH, 1.6 + 0.62 * len(loads)), layout="constrained")
        shares, rates = figure.subplots(1, 2, sharey=True)
        for place, load in enumerate(loads):
            lines = sorted(
                (line for line in steps if line["work_load"] == load), key=lambda line: line["side"] != "ours"
            )
            for order, line in enumerate(lines):
                y = place + (order - (len(lines) - 1) / 2) * 0.38
                color = BLUE if line["side"] == "ours" else GREY
                who = f"  {'ours' if line['side'] == 'ours' else 'lightly'}"
                rounds = [100 * share for share in line["wait_share"]]
                share, rate = statistics.median(rounds), line["images_per_s_median"]
                shares.barh(y, share, height=0.34, color=color, linewidth=0)
                shares.scatter(rounds, [y] * len(rounds), s=9, facecolor=PAPER, edgecolor=INK, linewidth=0.7, zorder=3)
                rates.barh(y, rate, height=0.34, color=color, linewidth=0)
                for axes, at, text in ((shares, max(rounds), f"{share:.1f} %"), (rates, rate, f"{rate:,.0f}")):
                    axes.annotate(text + who, (at, y), (6, 0), textcoords="offset points", va="center",
                                  fontsize=SMALL, color=INK)  # fmt: skip
        shares.set_yticks(range(len(loads)), [WORK_LOADS[load] for load in loads])
        for label in shares.get_yticklabels():
            label.set_color(INK)
        shares.set_ylim(len(loads) - 0.45, -0.55)
        top = max(100 * share for line in steps for share in line["wait_share"])
        shares.set_xlim(0, max(10.0, 1.35 * top))
        rates.set_xlim(0, 1.3 * max(line["images_per_s_median"] for line in steps))
        shares.set_title("Waiting for data, % of the time", loc="left", fontsize=MEDIUM, color=INK)
        rates.set_title("Source images per second", loc="left", fontsize=MEDIUM, color=INK)
        for axes in (shares, rates):
            axes.grid(False, axis="y")
        first = steps[0]
        about = f"{first['encoder']}, batches of {first['batch_size']}, {_threads(first['workers'])}"
        about += f", {first['device'].upper()}; dots: rounds"
        _frame(figure, "Does training wait for the loader?", results, about)
        return figure

    caption = "The share of time that training waits for data, and its images per second, beside lightly's MoCo."
    return Picture(name=results.path.stem, title="Share of training that waits for data", caption=caption, make=make)


# ---- Shared parts ----------------------------------------------------------------------------------------------------


def _frame(figure: Figure, title: str, results: Results, about: str) -> None:
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(f"{about}\n{results.source}" if about else results.source, x=0.012, ha="left", fontsize=8,
                     color=MUTED)  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.07, w_pad=0.07)  # type: ignore[union-attr]
