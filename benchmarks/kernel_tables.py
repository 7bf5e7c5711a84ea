"""Turns the numbers of kernel.py into the summary, the tables and the aims."""

import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_model import LABEL, as_table
from loader_tables import number
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Case, speedup

if TYPE_CHECKING:
    from kernel import Bench, Group

NAMES = {
    "moco": "eager, as in MoCo",
    "logsumexp": "eager, log-sum-exp",
    "compile": "torch.compile",
    "chunked": "chunked torch",
    "flash": "flash attention, V = K",
    "gemms": "two products alone",
    "ours": "ours",
}
PEERS = {"eager": "moco", "flash": "flash", "chunked": "chunked", "two_gemms": "gemms"}  # by word in the summary


class Aim(NamedTuple):
    """An aim for the worst case of 256 and 512 rows with 1 and 2 threads."""

    key: str  # if it ends in "_", the worst of all keys with this prefix counts
    text: str
    wanted: float
    form: str
    is_limit: bool = False  # true: the value should stay below the aim

    def value(self, summary: dict[str, Any]) -> float | None:
        found = [v for k, v in summary.items() if v is not None and (k.startswith(self.key) or k == self.key)]
        return (max if self.is_limit else min)(found) if found else None

    def is_met(self, value: float) -> bool:
        return value <= self.wanted if self.is_limit else value >= self.wanted


AIMS = (
    Aim("vs_eager_", "times eager torch's speed", 4, ".2f"),
    Aim("vs_flash_", "times flash attention's speed", 1, ".2f"),
    Aim("vs_chunked_", "times the chunked sweep's speed", 1, ".2f"),
    Aim("vs_two_gemms_", "of the rate of the two products alone", 0.85, ".0%"),
    Aim("memory_vs_eager_n256_d128", "of eager torch's additional memory", 0.01, ".2%", is_limit=True),
    Aim("max_error_vs_budget", "of the error budget, at worst", 1, ".0%", is_limit=True),
)


# ---- The summary -----------------------------------------------------------------------------------------------------


def summarize(bench: "Bench") -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the summary, with None for numbers that were not measured, and further details."""
    summary: dict[str, Any] = {}
    headline = [group for group in bench.groups if group.part == "headline"]
    for num_threads in (1, 2):
        for num_rows in (256, 512):
            group = next(
                (g for g in headline if (g.shape.num_rows, g.shape.num_threads) == (num_rows, num_threads)), None
            )
            for word, name in PEERS.items():
                summary[f"vs_{word}_n{num_rows}_d128_{num_threads}t"] = group and _ratio(group, name)
    first = next((g for g in headline if (g.shape.num_rows, g.shape.num_threads) == (256, 1)), None)
    memory = first.memory_mb if first else {}
    both = "ours" in memory and memory.get("moco")
    summary["memory_vs_eager_n256_d128"] = memory["ours"] / memory["moco"] if both else None
    summary["max_error_vs_budget"] = max((found["of_budget"] for found in bench.accuracy), default=None)
    details = {
        "bank_size": bench.scale.bank_size,
        "num_banks": 2,
        "sgemm_gflop_per_s": {f"{number}t": rate for number, rate in bench.sgemm.items()},
        "growth": growth(bench),
        "step": step_summary(bench),
        "grid_worst": _grid_worst(bench),
        "round_spread": _spread(bench),
        "notes": list(dict.fromkeys(bench.notes)),
    }
    return summary, details


def _ratio(group: "Group", name: str) -> float | None:
    """Returns our speed divided by a contender's."""
    mine, other = group.cases.get("ours"), group.cases.get(name)
    return speedup(mine, other) if mine and other else None


def growth(bench: "Bench") -> dict[str, Any]:
    """Returns the power of K with which time grows (1 is linear), and the memory at the smallest and largest K."""
    found: dict[str, Any] = {}
    groups = [group for group in bench.groups if group.part == "growth"]
    for name in NAMES:
        points = [(g.shape.bank_size, median(g.cases[name])) for g in groups if name in g.cases]
        points = [(size, seconds) for size, seconds in points if seconds]
        if len(points) > 1:
            memory = [g.memory_mb[name] for g in groups if name in g.memory_mb]
            logs = [(math.log(size), math.log(seconds)) for size, seconds in points if seconds]
            found[name] = {
                "time_exponent": statistics.linear_regression(*zip(*logs, strict=True)).slope,
                "time_from_to": [points[0][1], points[-1][1]],
                "memory_mb_from_to": [memory[0], memory[-1]] if memory else None,
                "bank_size_from_to": [points[0][0], points[-1][0]],
            }
    return found


def step_summary(bench: "Bench") -> dict[str, Any] | None:
    if not bench.step:
        return None
    ours, released = bench.step_cases["ours"], bench.step_cases["released"]
    memory = bench.step["extra_mb"]
    return {
        "vs_released": speedup(ours, released),
        "memory_vs_released": memory["ours"] / memory["released"],
        "largest_loss_difference": bench.step["largest_difference"],
    }


def _grid_worst(bench: "Bench") -> dict[str, Any]:
    grid = [group for group in bench.groups if group.part == "grid"]
    worst = {}
    for word, name in PEERS.items():
        ratios = [ratio for group in grid if (ratio := _ratio(group, name)) is not None]
        worst[f"vs_{word}"] = min(ratios) if ratios else None
    return worst


def _spread(bench: "Bench") -> float | None:
    """Returns how noisy the machine was: for the median row, the slowest round divided by the fastest."""
    seconds = [case.seconds for group in bench.groups for case in group.cases.values() if len(case.seconds) > 1]
    return statistics.median(max(each) / min(each) for each in seconds) if seconds else None


def median(case: Case) -> float | None:
    return statistics.median(case.seconds) if case.seconds else None


# ---- For people ------------------------------------------------------------------------------------------------------


def show(console: Console, bench: "Bench", summary: dict[str, Any], details: dict[str, Any]) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False)

    say(f"Two banks of {bench.scale.bank_size:,} keys in float32; loss and gradient; GFLOP/s are based on 4 N M D.")
    for group in bench.groups:
        if group.part == "headline":
            console.print(_headline(group))
    if bench.sgemm:
        rates = " and ".join(f"{rate:.0f} GFLOP/s on {n} thread{'s' * (n > 1)}" for n, rate in bench.sgemm.items())
        say(f"\nOne large square product with MKL reaches {rates}.")
        if any(k.startswith("vs_two_gemms") and (v or 0) > 1 for k, v in summary.items()):
            say("More than 100 % of GEMM: MKL's products are not a ceiling here (the processor, or other load).")
    for part, draw in (("grid", _grid), ("growth", _growth)):
        groups = [group for group in bench.groups if group.part == part]
        if groups:
            console.print(draw(groups))
    if details["growth"].get("ours"):
        say(_growth_sentence(details["growth"]["ours"]))
    if bench.accuracy:
        console.print(_errors(bench.accuracy))
    if bench.step:
        console.print(_step(bench, details["step"]))
    if bench.model:
        console.print(as_table(bench.model))
        say(f"The cost model's numbers are {LABEL}.")
    for note in details["notes"]:
        say(f"[yellow]Note:[/] {note}")
    if details["round_spread"]:
        say(f"\nIn the median row, the slowest round took {details['round_spread']:.2f} times its fastest.")
    if not bench.options.smoke:
        for aim in AIMS:
            value = aim.value(summary)
            if value is not None:
                mark = "[green]met   [/]" if aim.is_met(value) else "[red]missed[/]"
                limit = "at most" if aim.is_limit else "at least"
                say(f"{mark} {value:{aim.form}} {aim.text} (aim: {limit} {aim.wanted:{aim.form}})")


def _plain_table(title: str, *heads: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(
            head, justify="right" if place else "left", no_wrap=True, min_width=27 if not place else max(6, len(head))
        )
    return table


def _headline(group: "Group") -> Table:
    shape = group.shape
    threads = "1 thread" if shape.num_threads == 1 else f"{shape.num_threads} threads"
    title = f"{shape.num_rows} rows of {shape.dim}, {threads}"
    heads = ["", "ms", "best", "GFLOP/s", "of GEMM", "ours is"]
    more = ["extra MB", "loss err", "grad err"] if group.memory_mb else []
    table = _plain_table(title, *heads, *more)
    gemms = group.cases.get("gemms")
    for name, case in group.cases.items():
        variant = group.about.get(name, "")
        label = f"{NAMES[name]}{f' ({variant})' if variant else ''}"
        seconds = median(case)
        if case.failure or seconds is None:
            table.add_row(NAMES[name], "left out", style="dim")
            continue
        cells = [
            label,
            number(seconds * 1e3, ".1f"),
            number(min(case.seconds) * 1e3, ".1f"),
            number(shape.flop / seconds / 1e9, ".0f"),
            number(speedup(case, gemms), ".0%") if gemms else "",
            f"{number(_ratio(group, name), '.2f')}x" if name != "ours" else "",
        ]
        if more:
            errors = group.errors.get(name)
            cells += [number(group.memory_mb[name], ".1f") if name in group.memory_mb else ""]
            cells += [f"{error:.1e}" for error in errors] if errors else ["", ""]
        table.add_row(*cells, style="bold cyan" if name == "ours" else "dim" if name == "gemms" else "")
    return table


def _grid(groups: "list[Group]") -> Table:
    table = _plain_table(
        "Other shapes, 1 thread",
        "rows x width",
        "ours, ms",
        "GFLOP/s",
        "of GEMM",
        "vs eager",
        "vs chunked",
        "vs flash",
    )
    for group in groups:
        seconds = median(group.cases["ours"])
        if seconds is None:
            continue
        table.add_row(
            f"{group.shape.num_rows:>5} x {group.shape.dim}",
            number(seconds * 1e3, ".1f"),
            number(group.shape.flop / seconds / 1e9, ".0f"),
            number(_ratio(group, "gemms"), ".0%"),
            *(f"{number(_ratio(group, name), '.2f')}x" for name in ("moco", "chunked", "flash")),
        )
    return table


def _growth(groups: "list[Group]") -> Table:
    names = [name for name in NAMES if any(name in group.cases for group in groups)]
    heads = [f"{NAMES[name].partition(',')[0]}, {unit}" for name in names for unit in ("ms", "MB")]
    table = _plain_table(
        f"Cost of larger banks, {groups[0].shape.num_rows} rows of 128, 1 thread", "keys per bank", *heads
    )
    for group in groups:
        cells = []
        for name in names:
            seconds = median(group.cases[name]) if name in group.cases else None
            cells += [number(seconds * 1e3, ".1f") if seconds else "", number(group.memory_mb.get(name), ".1f")]
        table.add_row(f"{group.shape.bank_size:,}", *cells)
    return table


def _growth_sentence(found: dict[str, Any]) -> str:
    (first_mb, last_mb), sizes = found["memory_mb_from_to"] or (None, None), found["bank_size_from_to"]
    return (
        f"Our time grows as K to the power of {found['time_exponent']:.2f}. Our additional memory goes from "
        f"{number(first_mb, '.2f')}\nto {number(last_mb, '.2f')} MB while banks grow {sizes[1] / sizes[0]:.0f}-fold."
    )


def _errors(found: list[dict[str, Any]]) -> Table:
    table = _plain_table(
        "Errors against float64 (budget: twice plain torch's and 1e-5)",
        "banks of",
        "shapes",
        "loss error",
        "torch's",
        "grad error",
        "torch's ",
        "of budget",
    )
    for dtype in dict.fromkeys(case["dtype"] for case in found):
        cases = [case for case in found if case["dtype"] == dtype]
        keys = ("loss_error", "torch_loss_error", "gradient_error", "torch_gradient_error")
        worst = [f"{max(case[key] for case in cases):.1e}" for key in keys]
        table.add_row(dtype, str(len(cases)), *worst, f"{max(case['of_budget'] for case in cases):.0%}")
    return table


def _step(bench: "Bench", found: dict[str, Any]) -> Table:
    step = bench.step
    title = (
        f"A step of MoCo + PNR, second task: {step['encoder']}, batch {step['batch_size']}, four banks of "
        f"{step['bank_size']:,}, {step['num_threads']} threads"
    )
    table = _plain_table(title, "loss", "ms", "best", "speed", "extra MB", "memory", "largest loss difference")
    for way, label in (("released", "as released"), ("ours", "our operator")):
        case, mine = bench.step_cases[way], way == "ours"
        seconds = median(case)
        table.add_row(
            label,
            number(seconds and seconds * 1e3, ".0f"),
            number(min(case.seconds) * 1e3, ".0f"),
            f"{number(found['vs_released'], '.2f')}x" if mine else "",
            number(step["extra_mb"][way], ".0f"),
            f"{found['memory_vs_released']:.2f}x" if mine else "",
            f"{found['largest_loss_difference']:.1e} of {step['loss']:.2f}" if mine else "",
            style="bold cyan" if mine else "",
        )
    return table
