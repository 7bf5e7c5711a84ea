"""Shows a run as it trains: a live panel on a terminal, plain lines elsewhere, and a table at the end."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dataprep.progress import OnTerminal
from fastcssl.runs.log import EpochReport, ProbeReport, StepReport, TaskReport

_LINE_SECONDS = 30.0
_REFRESHES_PER_SECOND = 4
_WINDOW_SECONDS = 300  # the remaining time is estimated from the speed over this window
_MAX_WIDTH = 100
_MUCH_WAITING = 0.1
PROBE_NAMES = {"knn": "k-NN"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The words and names that the first line of a run shows."""

    recipe: str
    method: str
    strategy: str
    data: str
    device: str

    def __str__(self) -> str:
        return f"{self.recipe} · {self.method} · {self.strategy} · {self.data} · {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The name and length of a task that is to be trained."""

    name: str
    num_epochs: int
    steps_per_epoch: int

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch


class _EpochMeans:
    """The means of the loss and its terms over the steps of the current epoch."""

    def __init__(self) -> None:
        self._epoch: tuple[int, int] | None = None
        self._sums: dict[str, float] = {}
        self._num_steps = 0

    def add(self, report: StepReport) -> None:
        if self._epoch != (report.task, report.epoch):
            self._epoch, self._sums, self._num_steps = (report.task, report.epoch), {"": 0.0}, 0
        self._num_steps += 1
        for name, value in (("", report.loss), *report.terms.items()):
            self._sums[name] = self._sums.get(name, 0.0) + float(value)

    @property
    def loss(self) -> float:
        return self.term("")

    def term(self, name: str) -> float:
        return self._sums.get(name, math.nan) / max(self._num_steps, 1)


class Display(OnTerminal):
    """Shows the reports of a run. Its methods take microseconds; a thread draws the panel four times per second.

    `step`: the number of steps done before a resumed run continued. `quiet`: shows nothing, for all ranks but 0.
    """

    def __init__(
        self,
        header: RunHeader,
        plan: Sequence[TaskPlan],
        *,
        step: int = 0,
        console: Console | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._header, self._plan = header, tuple(plan)
        self._console = Console(quiet=True) if quiet else console or Console()
        self._clock = clock
        self._first_steps = [sum(task.num_steps for task in plan[:number]) for number in range(len(plan) + 1)]
        self._done = step
        self._task = 0
        self._report: StepReport | None = None
        self._means = _EpochMeans()
        self._probes: list[ProbeReport] = []
        self._pace: deque[tuple[float, int]] = deque(maxlen=_WINDOW_SECONDS)
        self._last_line = -math.inf
        self._live: Live | None = None
        if not quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self.panel, console=self._console, refresh_per_second=_REFRESHES_PER_SECOND
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)  # so that an early error still leaves a panel on the screen
        else:
            self._line(str(self._header))
        return self

    def task(self, number: int) -> None:
        """Starts showing a task."""
        self._task, self._report = number, None

    def step(self, report: StepReport) -> None:
        self._task, self._report, self._done = report.task, report, report.step
        self._means.add(report)
        now = self._clock()
        if not self._pace or now - self._pace[-1][0] >= 1:
            self._pace.append((now, report.step))
        if self._live is None and now - self._last_line >= _LINE_SECONDS:
            self._progress_line(now, report)

    def epoch_end(self, report: EpochReport) -> None:
        if self._live is None:
            self._progress_line(self._clock(), report)

    def probe(self, report: ProbeReport) -> None:
        self._probes.append(report)

    def task_end(self, report: TaskReport) -> None:
        parts = [f"task {report.task + 1}/{len(self._plan)} done", report.name, f"loss {number(report.loss)}"]
        parts += [f"{_probe_name(name)} {100 * value:.1f} %" for name, value in report.accuracy.items()]
        self._line("  ".join((*parts, f"{report.images_per_s:.0f} images/s", duration(report.seconds))))

    def note(self, text: str, *, warning: bool = False) -> None:
        """Prints a line above the panel."""
        self._line(text, style="yellow" if warning else "dim")

    def finish(self, tasks: Sequence[TaskReport], where: Iterable[tuple[str, Path | str]], bound: str = "") -> None:
        """Replaces the panel with the final table. `bound`: the sentence about the run's bottleneck."""
        if self._live:
            self._live.transient = True
            self._live.stop()
        console = self._console
        if not console.is_terminal:  # the width of a log is not limited
            console = Console(file=console.file, width=max(console.width, 2 * _MAX_WIDTH), quiet=console.quiet)
        console.print(final_table(tasks, where, bound))

    @property
    def seconds_left(self) -> float | None:
        """Returns the estimated seconds until the run ends, probes and checkpoints included; None if not yet known."""
        return self._seconds_until(self._first_steps[-1])

    def _seconds_until(self, step: int) -> float | None:
        if not self._pace:
            return None
        (began, first_step), now = self._pace[0], self._clock()
        if self._done <= first_step or now <= began:
            return None
        return max(step - self._done, 0) * (now - began) / (self._done - first_step)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def _progress_line(self, now: float, report: StepReport | EpochReport) -> None:
        self._last_line = now
        plan = self._plan[report.task]
        loss = f"loss {number(report.loss)}"
        if len(report.terms) > 1:
            loss += f" ({', '.join(f'{name} {number(value)}' for name, value in report.terms.items())})"
        parts = [f"task {report.task + 1}/{len(self._plan)}", f"epoch {report.epoch + 1}/{plan.num_epochs}", loss]
        parts += [
            f"lr {report.lr:.3g}",
            f"{report.images_per_s:.0f} images/s",
            f"waited {share(report.data_wait_share)}",
        ]
        if isinstance(report, StepReport) and report.device_idle_share is not None:
            parts.append(f"idle {share(report.device_idle_share)}")
        if self.seconds_left is not None:
            parts.append(f"ETA {duration(self.seconds_left)}")
        self._line("  ".join(parts))

    def panel(self) -> RenderableType:
        """Returns the panel in its current state. The drawing thread calls this."""
        task, report = self._task, self._report
        first_step, end_step = self._first_steps[task : task + 2]
        bars = bar_grid()
        done, size = min(max(self._done - first_step, 0), end_step - first_step), end_step - first_step
        bar_row(bars, f"task {task + 1}/{len(self._plan)}", done, size, self._seconds_until(end_step))
        bar_row(bars, "run", self._done, self._first_steps[-1], self.seconds_left)
        parts: list[RenderableType] = [Text(str(self._header), "bold"), "", bars, ""]
        if report is None:
            parts.append(Text(f"{self._plan[task].name}: starting", "dim"))
        else:
            parts.append(self._numbers(report))
        if self._probes:
            parts += ["", probe_rows(self._probes)]
        return framed(parts)

    def _numbers(self, report: StepReport) -> Table:
        """Returns the loss terms on the left and the rest on the right. Fixed column widths keep the panel steady."""
        plan = self._plan[report.task]
        style = "bold" if math.isfinite(report.loss) else "bold red"
        losses = [
            (Text(), Text("now", "dim"), Text("epoch", "dim")),
            (Text("loss"), Text(number(report.loss), style), Text(number(self._means.loss))),
        ]
        for name, value in report.terms.items() if len(report.terms) > 1 else ():
            losses.append((Text(name, "dim"), Text(number(value)), Text(number(self._means.term(name)))))
        facts = [
            ("", Text(plan.name, "dim")),
            ("epoch", Text(f"{report.epoch + 1}/{plan.num_epochs}")),
            ("lr", Text(f"{report.lr:.3g}")),
            ("speed", Text(f"{report.images_per_s:,.0f} images/s", "cyan")),
            ("waited", Text(f"{share(report.data_wait_share)} for data", wait_style(report.data_wait_share))),
        ]
        if report.device_idle_share is not None:
            idle = Text(f"{share(report.device_idle_share)} of the GPU", wait_style(report.device_idle_share))
            facts.append(("idle", idle))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=min(max(len(name) for name in ("loss", *report.terms)), 14), no_wrap=True)
        grid.add_column(width=7, justify="right", no_wrap=True)
        grid.add_column(width=7, justify="right", no_wrap=True)
        grid.add_column(width=6, no_wrap=True)
        grid.add_column(width=18, no_wrap=True)
        losses += [(Text(), Text(), Text())] * (len(facts) - len(losses))
        facts += [("", Text())] * (len(losses) - len(facts))
        for terms, (label, fact) in zip(losses, facts, strict=True):
            grid.add_row(*terms, Text(label, "dim"), fact)
        return grid


def final_table(
    tasks: Sequence[TaskReport], where: Iterable[tuple[str, Path | str]], bound: str = ""
) -> RenderableType:
    """Returns a table with one row per task, then the paths of the run's files, then its bottleneck."""
    places = fact_grid([(what, str(path), "") for what, path in where], fold=True)
    parts: list[RenderableType] = [_TaskTable(tuple(tasks)), Padding(places, (0, 0, 0, 1), expand=False)]
    if bound:
        parts += ["", Padding(Text(bound), (0, 0, 0, 1))]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _TaskTable:
    """The final table. On a narrow terminal it omits the least important columns instead of truncating them all."""

    tasks: tuple[TaskReport, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self._columns()
        for least in ("", "epochs", "images", "waited", "task", "images/s", "loss"):
            columns.pop(least, None)
            table = self._table(columns)
            if console.measure(table, options=options.update(width=10 * _MAX_WIDTH)).maximum <= options.max_width:
                break
        yield table

    def _columns(self) -> dict[str, list[str]]:
        """Returns the cells of each column by heading: one per task, and a last one for all tasks together."""
        tasks = self.tasks
        columns = {
            "task": [*(str(task.task) for task in tasks), ""],
            "name": [*(task.name for task in tasks), "all"],
            "images": [*(f"{task.num_images:,}" for task in tasks), f"{sum(task.num_images for task in tasks):,}"],
            "epochs": [*(f"{task.num_epochs:,}" for task in tasks), ""],
            "loss": [*(number(task.loss) for task in tasks), ""],
        }
        for probe in dict.fromkeys(name for task in tasks for name in task.accuracy):
            values = [task.accuracy.get(probe) for task in tasks]
            columns[_probe_name(probe)] = [*("-" if value is None else f"{100 * value:.1f}" for value in values), ""]
        columns["images/s"] = [*(f"{task.images_per_s:,.0f}" for task in tasks), ""]
        columns["waited"] = [*(share(task.data_wait_share) for task in tasks), ""]
        columns["time"] = [*(_clock(task.seconds) for task in tasks), _clock(sum(task.seconds for task in tasks))]
        return columns

    def _table(self, columns: dict[str, list[str]]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False, collapse_padding=True)
        for heading in columns:
            table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
        for row, task in enumerate(self.tasks):
            styles = {"waited": wait_style(task.data_wait_share)}
            table.add_row(*(Text(cells[row], styles.get(heading, "")) for heading, cells in columns.items()))
        if len(self.tasks) > 1:
            table.add_section()
            table.add_row(*(cells[-1] for cells in columns.values()), style="bold")
        return table


def framed(parts: Sequence[RenderableType]) -> Panel:
    return Panel(Group(*parts), box=box.ROUNDED, border_style="dim", padding=(0, 1), width=_MAX_WIDTH)


def bar_grid() -> Table:
    bars = Table.grid(expand=True, padding=(0, 2))
    bars.add_column(width=9, no_wrap=True)
    bars.add_column(ratio=1)
    bars.add_column(width=5, justify="right", no_wrap=True)
    bars.add_column(width=16, justify="right", no_wrap=True)
    return bars


def bar_row(bars: Table, label: str, done: int, size: int, seconds_left: float | None) -> None:
    left = "" if seconds_left is None else f"{duration(seconds_left)} left"
    bar = ProgressBar(total=max(size, 1), completed=done, complete_style="cyan", finished_style="green")
    bars.add_row(Text(label, "bold"), bar, f"{100 * done / max(size, 1):.0f} %", Text(left, "dim"))


def fact_grid(facts: Iterable[tuple[str, str, str]], *, fold: bool = False) -> Table:
    """Returns a grid with one row per fact, each given as a label, a value and the value's style."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    for label, value, style in facts:
        grid.add_row(Text(label, "dim"), Text(value, style))
    return grid


def probe_rows(reports: Iterable[ProbeReport]) -> Table:
    """Returns one row per probe, with one number per task."""
    results: dict[str, dict[int, str]] = {}
    for report in tuple(reports):  # a copy, because more may arrive while this is drawn
        for name, value in report.accuracy.items():
            results.setdefault(_probe_name(name), {})[report.task] = f"{100 * value:.1f}"
    return fact_grid([(name, "  ".join(values.values()), "") for name, values in results.items()], fold=True)


def _probe_name(name: str) -> str:
    return PROBE_NAMES.get(name, name)


def wait_style(value: float) -> str:
    return "bold yellow" if value > _MUCH_WAITING else ""


def number(value: float) -> str:
    """Returns a number as text of at most seven characters, not counting the sign."""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.1e}"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Returns seconds as text in the two largest units that matter, such as "2 h 5 min"."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    if minutes >= 10:
        return f"{minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
