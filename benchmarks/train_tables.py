"""Turns the numbers of train.py into the summary and the tables."""

import statistics
from typing import TYPE_CHECKING, Any

from loader_tables import number
from rich import box
from rich.console import Console
from rich.table import Table
from timing import speedup

if TYPE_CHECKING:
    from train import Bench, Entry, Images

NAMES = {
    ("ours", "step"): "whole step (ours)",
    ("ours", "held"): "batch held in memory (ours)",
    ("ours", "loader"): "loader alone (ours)",
    ("ours", "networks"): "networks' passes alone (ours)",
    ("lightly", "step"): "lightly, whole step",
    ("lightly", "held"): "lightly, batch held in memory",
    ("lightly", "loader"): "lightly's DataLoader alone",
}
# The keys that are reported for the work load where ours does worst, and how to choose the worst value.
WORST = {
    "data_wait_share": max,
    "step_vs_synthetic_batch": min,
    "step_vs_ceiling": min,
    "images_per_s_vs_lightly": min,
    "held_images_per_s_vs_lightly": min,
    "peak_memory_vs_lightly": max,
    "memory_above_imports_vs_lightly": max,
}


def summarize(bench: "Bench") -> dict[str, Any]:
    """Returns the summary. Ratios of rates are medians of the ratios of single rounds."""
    keys = dict.fromkeys(key for key, _, _ in bench.entries)
    by_load = {key: _summary_of(bench, key) for key in keys}
    worst = {}
    for key, choose in WORST.items():
        values = [found[key] for found in by_load.values() if found[key] is not None]
        worst[key] = choose(values) if values else None
    return {**worst, "round_spread": _spread(bench), "work_loads": by_load}


def _summary_of(bench: "Bench", key: str) -> dict[str, Any]:
    step, held, theirs = (bench.entries.get((key, *who)) for who in (_STEP, _HELD, _LIGHTLY))
    loader, theirs_held = (bench.entries.get((key, *who)) for who in (("ours", "loader"), ("lightly", "held")))
    return {
        "data_wait_share": wait_share(step),
        "step_vs_synthetic_batch": _ratio(step, held),
        "step_vs_ceiling": _share_of_ceiling(bench, step),
        "images_per_s_vs_lightly": _ratio(step, theirs),
        "held_images_per_s_vs_lightly": _ratio(held, theirs_held),
        "peak_memory_vs_lightly": _memory_ratio(step, theirs),
        "memory_above_imports_vs_lightly": _memory_ratio(step, theirs, above_imports=True),
        "images_per_s": step and step.case.rate(),
        "held_images_per_s": held and held.case.rate(),
        "loader_images_per_s": loader and loader.case.rate(),
        "lightly_images_per_s": theirs and theirs.case.rate(),
        "lightly_data_wait_share": wait_share(theirs),
        "peak_mb": step and step.peaks and step.peaks.total_mb,
        "lightly_peak_mb": theirs and theirs.peaks and theirs.peaks.total_mb,
    }


_STEP, _HELD, _LIGHTLY = ("ours", "step"), ("ours", "held"), ("lightly", "step")


def _ratio(one: "Entry | None", two: "Entry | None") -> float | None:
    return speedup(one.case, two.case) if one and two else None


def _memory_ratio(one: "Entry | None", two: "Entry | None", *, above_imports: bool = False) -> float | None:
    if not one or not two or not one.peaks or not two.peaks:
        return None
    mine, theirs = ((each.above_imports_mb if above_imports else each.total_mb) for each in (one.peaks, two.peaks))
    return mine / theirs


def wait_share(entry: "Entry | None") -> float | None:
    return statistics.median(each.wait_share for each in entry.slices) if entry and entry.slices else None


def ceiling_seconds(bench: "Bench", entry: "Entry") -> list[float] | None:
    """Returns the least seconds per image, one value per round, or None if they are not known.

    For complete steps, they follow from the held batch and the loader; for held batches, from the networks' passes.
    """
    parts = {"step": ("held", "loader"), "held": ("networks",)}.get(entry.job.mode, ())
    cases = [
        found.case
        for mode in parts
        if (found := bench.entries.get((entry.load.key, entry.job.side, mode))) and found.case.seconds  # type: ignore[arg-type]
    ]
    if not parts or len(cases) < len(parts):
        return None
    join = sum if bench.device == "cpu" else max
    rounds = zip(*([seconds / case.num_items for seconds in case.seconds] for case in cases), strict=True)
    return [join(each) for each in rounds]


def _share_of_ceiling(bench: "Bench", entry: "Entry | None") -> float | None:
    ceiling = ceiling_seconds(bench, entry) if entry else None
    if not entry or not ceiling or not entry.case.seconds:
        return None
    mine = [seconds / entry.case.num_items for seconds in entry.case.seconds]
    return statistics.median(a / b for a, b in zip(ceiling, mine, strict=True))


def _spread(bench: "Bench") -> float | None:
    """Returns how noisy the machine was: for the median row, the slowest round divided by the fastest."""
    seconds = [entry.case.seconds for entry in bench.entries.values() if len(entry.case.seconds) > 1]
    return statistics.median(max(each) / min(each) for each in seconds) if seconds else None


# ---- For people ------------------------------------------------------------------------------------------------------


def show(console: Console, bench: "Bench", images: dict[bool, "Images"], summary: dict[str, Any]) -> None:
    scale = bench.scale
    console.print(
        f"{scale.encoder}, batches of {scale.batch_size}, banks of {scale.bank_size:,} keys, {bench.options.threads} "
        f"threads for computing and {bench.options.threads} for loading, on {bench.device}.\n"
        f"{scale.rounds} interleaved rounds; source images per second, two views of each.",
        highlight=False,
    )
    for load in dict.fromkeys(entry.load for entry in bench.entries.values()):
        size_px = 32 if load.is_small else scale.size_px
        title = f"\n{load.title}, {size_px}-px views ({images[load.is_small].about})"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True, min_width=30)
        for head in ("images/s", "best", "ceiling", "of ceiling", "waits", "ours is", "peak MB", "imports"):
            table.add_column(head, justify="right", no_wrap=True, min_width=max(6, len(head)))
        for entry in bench.entries.values():
            if entry.load == load:
                style = "bold cyan" if entry.job.side == "ours" and entry.job.mode == "step" else ""
                style = "dim" if entry.job.mode in ("loader", "networks") else style
                table.add_row(*_cells(bench, entry), style=style)
        console.print(table)
    for entry in bench.entries.values():
        if entry.case.failure:
            console.print(f"[red]{entry.load.key}, {entry.case.name}, failed:[/] {entry.case.failure}", highlight=False)
    if bench.lightly.missing:
        console.print(bench.lightly.missing, highlight=False)
    memory = "allocated on the GPU" if bench.device == "cuda" else "of the process and its workers"
    console.print(
        f"\nOurs at worst: it waits for data {number(summary['data_wait_share'], '.1%')} of the time. Whole steps have "
        f"{number(summary['step_vs_synthetic_batch'], '.2f')}x the rate of held batches\n"
        f"and {number(summary['step_vs_ceiling'], '.2f')}x that of the ceiling, and "
        f"{number(summary['images_per_s_vs_lightly'], '.2f')}x lightly's images/s at "
        f"{number(summary['peak_memory_vs_lightly'], '.2f')}x its memory ({memory}).\n"
        f"In the median row, the slowest round took {number(summary['round_spread'], '.2f')} times its fastest.",
        highlight=False,
    )


def _cells(bench: "Bench", entry: "Entry") -> list[str]:
    side, mode, case = entry.job.side, entry.job.mode, entry.case
    label = NAMES[side, mode]
    if case.failure:
        return [label, "failed"]
    ceiling = ceiling_seconds(bench, entry)
    waits = wait_share(entry) if mode == "step" else None
    ours = bench.entries.get((entry.load.key, "ours", mode)) if side == "lightly" else None
    trained = entry.peaks if mode in ("step", "held") else None
    return [
        label,
        number(case.rate()),
        number(case.rate(best=True)),
        number(1 / statistics.median(ceiling)) if ceiling else "",
        number(_share_of_ceiling(bench, entry), ".0%") if ceiling else "",
        number(waits, ".1%") if waits is not None else "",
        f"{number(_ratio(ours, entry), '.2f')}x" if ours else "",
        number(trained.total_mb) if trained else "",
        number(trained.imports_mb) if trained and trained.device_mb is None else "",
    ]
