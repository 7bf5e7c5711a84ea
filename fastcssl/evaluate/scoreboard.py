"""Shows an evaluation: a progress bar with speed and remaining time, or plain lines, and tables at the end."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import PurePath

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dataprep.progress import OnTerminal
from fastcssl.evaluate.options import Evaluated, Progress
from fastcssl.runs.display import bar_grid, bar_row, duration, fact_grid, framed
from fastcssl.runs.metrics import AVERAGE, MetricSpec, single_metrics
from fastcssl.runs.overview import overviews, settings_text, varied_settings
from fastcssl.runs.overview_table import overview_table
from fastcssl.runs.results import EvaluatedEncoder, Evaluation

_LINE_SECONDS = 30.0
_WINDOW_SECONDS = 300
_MAX_COLUMNS = 12  # most tasks that a table shows


class Scoreboard(OnTerminal, Progress):
    """Shows progress: a live panel on a terminal, elsewhere a line every 30 seconds, and nothing if `quiet`."""

    def __init__(self, console: Console, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console(quiet=True) if quiet else console
        self._clock = clock
        self._title, self._done, self._size = "", 0, 0
        self._pace: deque[tuple[float, int]] = deque(maxlen=_WINDOW_SECONDS)
        self._last_line = -math.inf
        self._live: Live | None = None
        if not quiet and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(get_renderable=self.panel, console=console, refresh_per_second=4, transient=True)

    def begin(self, title: str, num_images: int, done: int = 0) -> None:
        self._title, self._size, self._done = title, num_images, done
        self._pace.clear()
        self._pace.append((self._clock(), done))
        self._last_line = self._clock()
        if self._live is None:
            self._line(f"{title}: {num_images - done:,} images to process")

    def advance(self, num_images: int) -> None:
        self._done = min(self._done + num_images, self._size)
        now = self._clock()
        if now - self._pace[-1][0] >= 1:
            self._pace.append((now, self._done))
        if self._live is None and now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            share = f"{100 * self._done / max(self._size, 1):.0f} %"
            left = "" if self.seconds_left is None else f"  ETA {duration(self.seconds_left)}"
            self._line(f"{self._title}  {share}  {self.images_per_s:,.0f} images/s{left}")

    def note(self, text: str) -> None:
        self._line(text, "yellow")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    @property
    def images_per_s(self) -> float:
        """Returns the speed over the last minutes."""
        (began, first), now = self._pace[0], self._clock()
        return (self._done - first) / (now - began) if now > began else 0.0

    @property
    def seconds_left(self) -> float | None:
        return (self._size - self._done) / self.images_per_s if self.images_per_s > 0 else None

    def panel(self) -> RenderableType:
        if not self._title:
            return Text("")
        bars = bar_grid()
        bar_row(bars, "images", self._done, self._size, self.seconds_left)
        speed = Text(f"{self.images_per_s:,.0f} images/s, each decoded once for all encoders", "cyan")
        return framed([Text(self._title, "bold"), "", bars, "", speed])


# ---- Tables ----------------------------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Evaluated], *, tables: bool = False) -> RenderableType:
    """Returns one table per probe, with one row per run. `tables` adds every accuracy, with one table per result."""
    parts: list[RenderableType] = []
    for table in overviews([outcome.as_result for outcome in outcomes]):
        parts += [Text(table.title, "bold"), overview_table(table)]
    varied = varied_settings([outcome.evaluation for outcome in outcomes])
    for outcome in outcomes if tables else ():
        parts += _details(outcome, settings_text(outcome.evaluation, varied))
    num_known, folders = sum(outcome.was_there for outcome in outcomes), {o.path.parent for o in outcomes}
    where = str(next(iter(folders))) if len(folders) == 1 else "RUN/evaluations"
    about = f"All accuracies are in {where}" + ("." if tables else "; --tables prints them.")
    if num_known:
        who = "All results were" if num_known == len(outcomes) else f"{num_known} of {len(outcomes)} results were"
        about += f" {who} evaluated before; --again recomputes."
    missing = dict.fromkeys(sentence for outcome in outcomes for sentence in outcome.evaluation.metrics.missing)
    return Group(*parts, Text(about, "dim"), *(Text(sentence, "yellow") for sentence in missing))


def _details(outcome: Evaluated, settings: str) -> list[RenderableType]:
    """Returns a heading, the table of all accuracies, and the place of the result file."""
    made, target = outcome.evaluation, outcome.target
    words = [f"{target.method} {target.strategy}" if target.is_run else "", made.probe, made.scope, settings]
    heading = Text.assemble((str(target.folder), "bold"), *(f" · {word}" for word in words if word))
    facts = fact_grid([("result", str(outcome.path), "")], fold=True)
    return [heading, matrix(made), Padding(facts, (0, 0, 1, 1), expand=False)]


def matrix(made: Evaluation) -> RenderableType:
    """Returns a_{i,t} in %, with one row per checkpoint and one column per task. Tasks not yet learnt are dim."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column("after", justify="right", no_wrap=True)
    shown = range(min(len(made.columns), _MAX_COLUMNS))
    for i in shown:
        table.add_column(_short(made.columns[i], i), justify="right", no_wrap=True)
    if len(made.columns) > _MAX_COLUMNS:
        table.add_column("...", justify="right")
    for heading in (AVERAGE.name, "top-1", "top-5"):
        table.add_column(heading, justify="right", no_wrap=True, style="bold" if heading == AVERAGE.name else "")
    rest = [""] if len(made.columns) > _MAX_COLUMNS else []
    for t, encoder in enumerate(made.checkpoints):
        seen = encoder.seen or list(range(len(made.columns)))
        cells = [Text(_percent(made.top1[t][i]), "" if i in seen else "dim") for i in shown]
        end = (made.metrics.A[t], made.overall_top1[t], made.overall_top5[t])
        table.add_row(_after(encoder, made), *cells, *rest, *map(_percent, end))
    references = (
        ("single task", made.reference.ft),
        ("random", made.reference.random),
        ("chance", made.reference.chance),
    )
    for name, row in references:
        if row is not None:
            values = ["-" if row[i] is None else _percent(row[i]) for i in shown]
            table.add_row(name, *values, *rest, "", "", "", style="italic")
    known = ((row, made.metrics.last(row.name)) for row in single_metrics())
    line = Text("  ").join(_metric(row, value) for row, value in known if value is not None)
    return Group(table, line) if line else table


def _metric(row: MetricSpec, share: float) -> Text:
    """Returns the name, the value in % and, dim, the title. Only "lower is better" is stated."""
    about = row.title if row.better == "higher" else f"{row.title}, lower is better"
    return Text.assemble((row.name, "bold"), f" {_percent(share)}", (f" {about}", "dim"))


def _after(encoder: EvaluatedEncoder, made: Evaluation) -> str:
    """Returns a row's label: the last task that the encoder has learnt, or the name of the encoder's file."""
    if len(made.checkpoints) == 1 and len(encoder.seen) == len(made.columns) > 1:
        return "all tasks"
    name = PurePath(encoder.path)
    is_of_run = name.parent == PurePath("encoders")
    return (f"task {encoder.task}" if name.stem != "joint" else "all tasks") if is_of_run else name.name


def _short(name: str, number: int) -> str:
    return name if len(name) <= 9 else f"task {number}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:z.2f}"  # z: 0.00 instead of -0.00
