"""Builds the table of bench.py: every ratio in plain words, with its ceiling in the same run and its aim.

The aims come from the issues and the design, and each is defined in the module of its benchmark. A ceiling is the best
possible value, given the work that cannot be avoided; it is measured in the same run. Some rows have no ceiling.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import kernel_tables
import loader_tables
import prep
from charts import Record, Results
from rich import box
from rich.console import Console
from rich.table import Table

Unit = Literal["x", "%", "ms", "MB", "points", ""]


@dataclass(frozen=True, kw_only=True)
class Row:
    script: str
    text: str
    unit: Unit
    value: float | None
    ceiling: float | None = None
    bound: str = ""  # what sets the ceiling
    aim: float | None = None
    is_limit: bool = False  # true: the value should stay below the aim

    @property
    def is_met(self) -> bool | None:
        """Returns whether the aim is met, or None without a measurement or an aim."""
        if self.value is None or self.aim is None:
            return None
        return self.value <= self.aim if self.is_limit else self.value >= self.aim

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return {True: "✓ met", False: "✗ missed", None: "no aim"}[self.is_met]

    def record(self, results: str) -> Record:
        kept = ("script", "text", "unit", "value", "ceiling", "bound", "aim", "is_limit", "is_met")
        return {**{key: getattr(self, key) for key in kept}, "results": results}


# ---- Rows of each benchmark ------------------------------------------------------------------------------------------


def _per_round(records: Sequence[Record], one: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Returns the ratio of the two rates in images per second, the median over rounds."""
    rates = []
    for wanted in (one, other):
        found = next((record for record in records if all(record.get(k) == v for k, v in wanted.items())), None)
        if found is None or not found["round_seconds"]:
            return None
        rates.append([found["num_images"] / seconds for seconds in found["round_seconds"]])
    return statistics.median(a / b for a, b in zip(*rates, strict=False))  # sections may differ in rounds


def loader_rows(results: Results) -> Iterator[Row]:
    decode, copy = "decoding alone", "copying the views"

    def ceiling(section: str, peer: str, bound: str = "decode", home: str = "") -> float | None:
        one = {"section": home or section, "contender": bound, "workers": 1}
        return _per_round(results.records, one, {"section": section, "contender": peer, "workers": 1})

    limits: dict[str, tuple[float | None, str, Unit]] = {
        "native_full_vs_torchvision_pil_1t": (ceiling("full", "pil"), decode, "x"),
        "native_full_vs_dali_cpu_1t": (ceiling("full", "dali"), decode, "x"),
        "native_geometry_vs_ffcv_1t": (ceiling("geometry", "ffcv", home="full"), decode, "x"),
        "native_full_vs_decode_only_1t": (1.0, decode, "%"),
        "resident_vs_torchvision_pil_1t": (ceiling("small", "pil", "copy"), copy, "x"),
        "native_task_switch_ms": (0.0, "", "ms"),
    }
    for aim in loader_tables.AIMS:
        limit, bound, unit = limits[aim.key]
        yield Row(
            script="loader",
            text=aim.text,
            unit=unit,
            value=results.summary.get(aim.key),
            ceiling=limit,
            bound=bound,
            aim=aim.wanted,
            is_limit=aim.is_limit,
        )
    twice = results.summary.get("native_full_2t_vs_1t")
    yield Row(
        script="loader", text="native, two threads against one", unit="x", value=twice, ceiling=2.0, bound="cores"
    )


def kernel_rows(results: Results) -> Iterator[Row]:
    summary = results.summary
    units: dict[str, Unit] = {"vs_eager_": "x", "vs_flash_": "x", "vs_chunked_": "x"}
    for aim in kernel_tables.AIMS:
        value = aim.value(summary)
        ceiling, bound = None, ""
        if aim.key in units and value is not None:  # for the shape where ours does worst
            key = next(key for key, found in summary.items() if found == value and key.startswith(aim.key))
            products = summary.get(key.replace(aim.key, "vs_two_gemms_"))
            ceiling, bound = (value / products if products else None), "MKL's products¹"
        elif aim.key.startswith("vs_two"):
            ceiling, bound = 1.0, "MKL's products¹"
        elif aim.key.startswith("memory"):
            ceiling = 0.0
        yield Row(
            script="kernel",
            text=f"loss + gradient, {aim.text}",
            unit=units.get(aim.key, "%"),
            value=value,
            ceiling=ceiling,
            bound=bound,
            aim=aim.wanted,
            is_limit=aim.is_limit,
        )
    # The aims are that time grows linearly in K and memory does not grow, with some room for noise.
    grown = results.details.get("growth", {}).get("ours", {})
    memory = grown.get("memory_mb_from_to")
    yield Row(
        script="kernel", text="its time grows as K to the power of", unit="", value=grown.get("time_exponent"), aim=1.1,
        is_limit=True,
    )  # fmt: skip
    yield Row(
        script="kernel", text="its memory grows with K by", unit="MB", value=memory and memory[1] - memory[0],
        ceiling=0.0, aim=1.0, is_limit=True,
    )  # fmt: skip
    step = results.details.get("step") or {}
    text = "a step of MoCo + PNR, against the released code's way"
    yield Row(script="kernel", text=text, unit="x", value=step.get("vs_released"))
    yield Row(script="kernel", text="the same, memory", unit="x", value=step.get("memory_vs_released"))


def prep_rows(results: Results) -> Iterator[Row]:
    summary = results.summary
    workers = summary.get("workers")

    def decoding(peer: str) -> float | None:
        one, other = ({"name": name, "workers": workers} for name in (prep.DECODE, peer))
        return _per_round(results.records, one, other)

    def row(text: str, key: str, unit: Unit, **more: Any) -> Row:
        return Row(script="prep", text=text, unit=unit, value=summary.get(key), **more)

    # "Disk speed" and "decode speed" count as reached from 90 % on, and "flat" memory means within 10 MB.
    bound = "decoding alone"
    yield row("writing shards, against FFCV's writer", "tar_vs_ffcv_writer", "x", ceiling=decoding(prep.FFCV),
              bound=bound, aim=prep.AIM)  # fmt: skip
    yield row("writing shards, against a Pillow loop", "tar_vs_pillow", "x", ceiling=decoding(prep.PILLOW), bound=bound)
    yield row("passing through, headers checked, of disk speed", "passthrough_vs_copy", "%", ceiling=1.0,
              bound="a plain copy", aim=0.9)  # fmt: skip
    yield row("passing through, all checked, of decode speed", "passthrough_full_vs_decode_at_8", "%", ceiling=1.0,
              bound="decoding at 1/8", aim=0.9)  # fmt: skip
    yield row("additional memory for four times the images", "peak_rss_growth_mb", "MB", ceiling=0.0, aim=10.0,
              is_limit=True)  # fmt: skip


def evaluate_rows(results: Results) -> Iterator[Row]:
    summary = results.summary
    allowed = summary.get("bound_vs_sequential")
    count = results.environment.get("checkpoints", "T")

    def row(text: str, key: str, unit: Unit, **more: Any) -> Row:
        return Row(script="evaluate", text=text, unit=unit, value=summary.get(key), **more)

    yield row(f"probing {count} encoders side by side, against one by one", "exact_side_by_side_vs_sequential", "x",
              ceiling=allowed, bound="shared loading")  # fmt: skip
    yield row("the same, of what shared loading allows", "exact_side_by_side_vs_bound", "%", ceiling=1.0,
              bound="loader + encoders", aim=0.9)  # fmt: skip
    yield row("cached probe, against all epochs one by one", "cached_vs_exact_sequential", "x",
              ceiling=summary.get("one_pass_vs_exact_sequential"), bound="one pass", aim=50.0)  # fmt: skip
    yield row("cached less exact, top-1", "cached_minus_exact_accuracy", "points")


def train_rows(results: Results) -> Iterator[Row]:
    """Yields the rows for the work load where ours does worst."""
    summary = results.summary
    loads = [load for load in summary.get("work_loads", {}).values() if load.get("step_vs_synthetic_batch")]
    worst = min(loads, key=lambda load: load["step_vs_synthetic_batch"], default={})
    share = worst.get("step_vs_ceiling")

    def row(text: str, key: str, unit: Unit, **more: Any) -> Row:
        return Row(script="train", text=text, unit=unit, value=summary.get(key), **more)

    yield row("waits for data, of the time", "data_wait_share", "%", ceiling=0.0)
    yield row("whole steps, against a batch held in memory", "step_vs_synthetic_batch", "x",
              ceiling=share and worst["step_vs_synthetic_batch"] / share, bound="loader + step")  # fmt: skip
    yield row("images per second, against lightly's MoCo", "images_per_s_vs_lightly", "x")
    yield row("peak memory, against lightly's MoCo", "peak_memory_vs_lightly", "x")


ROWS: dict[str, Callable[[Results], Iterator[Row]]] = {
    "loader": loader_rows,
    "kernel": kernel_rows,
    "prep": prep_rows,
    "evaluate": evaluate_rows,
    "train": train_rows,
}


def note(script: str, results: Results) -> str:
    """Returns a remark if a run differs from what the aims are for or favours one side, or ""."""
    about, details = results.environment, results.details
    if script == "loader" and "synthetic" in (about.get("images"), about.get("small_images")):
        return "partly on the embedded set; the aims are for ImageNet photos and CIFAR-100 (--images, --cifar)"
    if script == "kernel" and details.get("bank_size") not in (None, 65_536):
        return f"banks of {details['bank_size']:,} keys; the aims are for 65,536"
    if script == "prep" and results.scale != "full":
        return "few images, so starting FFCV's worker processes counts too much; quote the full form"
    if script == "evaluate":
        return f"{about.get('checkpoints')} x {about.get('encoder')}, {about.get('size_px')} px"
    if script == "train":
        return "numbers of the work load where ours does worst" + (
            "" if results.summary.get("images_per_s_vs_lightly") else "; lightly is not installed (pip install lightly)"
        )
    return ""


# ---- For people ------------------------------------------------------------------------------------------------------


def shown(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    if unit == "%":
        digits = 0 if abs(value) >= 0.095 else 1 if abs(value) >= 0.0095 else 2
        return f"{100 * value:.{digits}f} %"
    if unit == "points":
        return f"{100 * value:+.1f} pt"
    if unit == "x":
        return f"{value:,.{0 if abs(value) >= 20 else 1 if abs(value) >= 10 else 2}f}x"
    return f"{round(value, 1) + 0.0:.1f} {unit}" if unit else f"{value:.2f}"


def _plain(value: float, unit: Unit) -> str:
    """Returns a chosen number as text, without superfluous digits."""
    return f"{100 * value:g} %" if unit == "%" else f"{value:g}{unit}" if unit == "x" else f"{value:g} {unit}".strip()


def show(console: Console, groups: Sequence[tuple[str, Results, Sequence[Row]]]) -> None:
    """Prints the table. Each group is the command that made a results file, the results and the rows."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True, min_width=57)
    for head in ("measured", "ceiling"):
        table.add_column(head, justify="right", no_wrap=True, min_width=8)
    table.add_column("set by", no_wrap=True, style="dim", min_width=17)
    table.add_column("aim", justify="right", no_wrap=True, min_width=7)
    table.add_column("", no_wrap=True, min_width=12)
    for command, results, rows in groups:
        table.add_section()
        table.add_row(f"[bold]{command}[/] [dim]→ {results.path.name}[/]")
        for row in rows:
            aim = f"{'≤' if row.is_limit else '≥'} {_plain(row.aim, row.unit)}" if row.aim is not None else ""
            style = {True: "green", False: "red", None: "dim"}[row.is_met]
            bound = row.bound if row.ceiling is not None else ""
            ceiling = _plain(0, row.unit) if row.ceiling == 0 else shown(row.ceiling, row.unit)
            cells = [shown(row.value, row.unit) or "-", ceiling, bound, aim]
            table.add_row(f"  {row.text}", *cells, f"[{style}]{row.verdict}[/]")
    console.print(table)
    if any("¹" in row.bound for _, _, rows in groups for row in rows):
        console.print("¹ This is the rate of MKL, not of the processor, so a kernel can be faster.", style="dim")
    for command, results, _ in groups:
        if text := note(command.partition(".")[0], results):
            console.print(f"{results.path.name}: {text}.", style="dim", highlight=False)
