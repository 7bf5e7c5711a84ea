"""Turns the numbers of loader.py into the summary, one table per filter, and the aims."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loader_rows import CEILINGS, LARGE, NAMES, OURS, SECTIONS, SMALL, Section, filter_of, is_installed
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from loader import Bench, Entry


class Aim(NamedTuple):
    """An aim for one thread, and photos or CIFAR-100 prepared as described."""

    key: str
    text: str
    wanted: float
    form: str
    is_limit: bool = False  # true: the value should stay below the aim

    def is_met(self, value: float) -> bool:
        return value < self.wanted if self.is_limit else value >= self.wanted


AIMS = (
    Aim("native_full_vs_torchvision_pil_1t", "native, full policy, against torchvision on PIL images", 8, ".2f"),
    Aim("native_full_vs_dali_cpu_1t", "native, full policy, against DALI on the CPU", 10, ".2f"),
    Aim("native_geometry_vs_ffcv_1t", "native, geometry alone, against FFCV", 1.8, ".2f"),
    Aim("native_full_vs_decode_only_1t", "native, full policy, as a share of decoding alone", 0.35, ".0%"),
    Aim("resident_vs_torchvision_pil_1t", "resident, 32 px, against torchvision on PIL images", 20, ".1f"),
    Aim("native_task_switch_ms", "native, another task, milliseconds lost", 50, ".1f", is_limit=True),
)


def summarize(bench: "Bench") -> dict[str, Any]:
    """Returns the summary. Each ratio is the median of the ratios of single rounds."""
    native = bench.entries.get(("full", "native", 1))
    rates = {
        f"{section}_images_per_s_1t": entry.case.rate()
        for section, lead in (("full", "native"), ("geometry", "native"), ("small", "resident"))
        if (entry := bench.entries.get((section, lead, 1)))
    }
    return {
        "native_full_vs_torchvision_pil_1t": bench.ratio("full", "native", "pil"),
        "native_full_vs_torchvision_v2_1t": bench.ratio("full", "native", "tensors"),
        "native_full_vs_dali_cpu_1t": bench.ratio("full", "native", "dali"),
        "native_geometry_vs_ffcv_1t": bench.ratio("geometry", "native", "ffcv"),
        "native_geometry_vs_dali_cpu_1t": bench.ratio("geometry", "native", "dali"),
        "native_full_vs_decode_only_1t": bench.ratio("full", "native", "decode"),
        "native_geometry_vs_decode_only_1t": bench.ratio("geometry", "native", "decode"),
        "native_full_2t_vs_1t": bench.ratio("full", "native", "native", threads=2),
        "native_full_bilinear_vs_torchvision_pil_1t": bench.ratio("full_bilinear", "native", "pil"),
        "native_geometry_bilinear_vs_ffcv_1t": bench.ratio("geometry_bilinear", "native", "ffcv"),
        "resident_vs_torchvision_pil_1t": bench.ratio("small", "resident", "pil"),
        "native_task_switch_ms": native and native.other_task_ms,
        "native_first_batch_ms": native and native.first_batch_ms,
        "native_batch_ms": native and native.batch_ms,
        "round_spread": _spread(bench),
        **rates,
    }


def _spread(bench: "Bench") -> float | None:
    """Returns how noisy the machine was: for the median row, the slowest round divided by the fastest."""
    seconds = [entry.case.seconds for entry in bench.entries.values() if len(entry.case.seconds) > 1]
    return statistics.median(max(each) / min(each) for each in seconds) if seconds else None


def number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def rate(value: float | None) -> str:
    return f"{value / 1e3:,.0f}k" if value and value >= 1e5 else number(value)  # 7 digits would not fit into the column


def show(console: Console, bench: "Bench", summary: dict[str, Any]) -> None:
    bicubic = [section for section in SECTIONS if section.policy == LARGE and not section.bilinear]
    bilinear = [section for section in SECTIONS if section.bilinear]
    title = f"{LARGE}: two 224-px views of each photo, bicubic anti-aliased, source images per second"
    _show_table(console, bench, title, bicubic)
    if any((section.key, "native", 1) in bench.entries for section in bilinear):
        _show_table(console, bench, "The same, bilinear anti-aliased", bilinear)
    small = [section for section in SECTIONS if section.policy == SMALL]
    title = f"{SMALL}: two 32-px views of each image, bicubic anti-aliased, source images per second"
    _show_table(console, bench, title, small)
    for entry in bench.entries.values():
        if entry.case.failure:
            what = f"{entry.case.name}, {entry.section.key}, {entry.job.num_threads} threads"
            console.print(f"[red]{what}, failed:[/] {entry.case.failure}", highlight=False)
    _show_aims(console, summary)


def _show_table(console: Console, bench: "Bench", title: str, sections: Sequence[Section]) -> None:
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("", no_wrap=True, min_width=27)
    table.add_column("filter", no_wrap=True, min_width=10)
    heads = ("1 thread", "best", "2 threads", "best", "2 : 1", "ours is", "first ms", "task ms", "MB")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True, min_width=max(5, len(head)))
    for section in sections:
        table.add_row(f"[italic]{section.title}[/]")
        for row in section.rows:
            one, two = (bench.entries.get((section.key, row.contender, n)) for n in (1, 2))
            ours, ceiling = row.contender in OURS, row.contender in CEILINGS
            style = "bold cyan" if row.contender == section.lead else "cyan" if ours else "dim" if ceiling else ""
            if one is not None:
                table.add_row(*_cells(bench, section, one, two), style=style)
            elif not is_installed(row.contender):
                table.add_row(f"  {NAMES[row.contender]}", "not installed", style=style)
        if section.key == "full":
            table.add_row(f"  {NAMES['ffcv']}", "INTER_AREA", *["-"] * len(heads))
        table.add_section()
    console.print(table)


def _cells(bench: "Bench", section: Section, one: "Entry", two: "Entry | None") -> list[str]:
    contender = one.job.contender
    label = [f"  {one.case.name}{' (ours)' if contender in OURS else ''}", filter_of(section, contender)]
    if one.case.failure:
        return [*label, "failed"]
    rates = [rate(entry.case.rate(best=best)) if entry else "-" for entry in (one, two) for best in (False, True)]
    gain = bench.ratio(section.key, contender, contender, threads=2)
    lead = None if contender == section.lead else bench.ratio(section.key, section.lead, contender)
    form = ".0%" if contender in CEILINGS else ".1f"
    faster = "" if lead is None else number(lead, form) + ("" if contender in CEILINGS else "x")
    waits = [number(value) for value in (one.first_batch_ms, one.other_task_ms)]
    return [*label, *rates, number(gain, ".2f"), faster, *waits, number(one.begun and one.begun.peak_mb)]


def _show_aims(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title="\nAims, one thread", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("", "measured", "aim", ""):
        table.add_column(head, justify="left" if not head else "right", no_wrap=True)
    for aim in AIMS:
        value = summary[aim.key]
        wanted = f"{'under' if aim.is_limit else 'at least'} {aim.wanted:{aim.form}}"
        verdict = "not measured" if value is None else "[green]reached[/]" if aim.is_met(value) else "[red]missed[/]"
        table.add_row(aim.text, number(value, aim.form), wanted, verdict)
    console.print(table)
    console.print(
        f"With two threads, native is {number(summary['native_full_2t_vs_1t'], '.2f')}x as fast as with one. Its first "
        f"batch takes {number(summary['native_first_batch_ms'])} ms, others {number(summary['native_batch_ms'])} ms.\n"
        f"In the median row, the slowest round took {number(summary['round_spread'], '.2f')} times its fastest.",
        highlight=False,
    )
