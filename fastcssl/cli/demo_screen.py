"""The screen of `fastcssl-demo`: a line for each part of the work, then one table and four sentences."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fastcssl.evaluate.options import Progress
from fastcssl.runs.display import duration
from fastcssl.runs.ownership import RunFolderError
from fastcssl.runs.status import read_status

if TYPE_CHECKING:
    from fastcssl.cli.demo import DemoFindings

_WIDTH = 96  # at most
_BAR_WIDTH = 20
_REFRESHES_PER_SECOND = 8
_CLEAR = 0.02  # a smaller difference of S may be chance: an accuracy of 800 images has a standard error of 0.017

Share = Callable[[], float | None]  # how much of a part is done, 0..1; None: not known


# ---- While it works --------------------------------------------------------------------------------------------------


class ImageShare(Progress):
    """Counts the images of an evaluation, and returns the share that is done when called."""

    def __init__(self) -> None:
        self._done, self._size = 0, 0

    def begin(self, title: str, num_images: int, done: int = 0) -> None:  # noqa: ARG002
        self._done, self._size = done, num_images

    def advance(self, num_images: int) -> None:
        self._done += num_images

    def __call__(self) -> float | None:
        return min(self._done / self._size, 1.0) if self._size else None


def share_of(run: Path) -> Share:
    """Returns a function that reads from RUN/status.json how much of the steps from now on are done."""
    first: list[int] = []

    def share() -> float | None:
        try:
            status = read_status(run)
        except RunFolderError:
            return None  # not begun
        first.append(status.step)
        return (status.step - first[0]) / max(status.num_steps - first[0], 1)

    return share


class PartLines:
    """Shows each part as one line: its title, and its time when it has ended. A terminal also shows the progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = min(console.width, _WIDTH)

    @contextmanager
    def part(self, title: str, share: Share = lambda: None) -> Iterator[None]:
        """Shows a part while the block runs. A block that raises leaves no line."""
        began = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            spinner = Spinner("dots", style="cyan")
            live = Live(
                get_renderable=lambda: self._running(title, spinner, share(), time.monotonic() - began),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
            )
            with live:
                yield
        else:
            yield
        done = self._grid()
        done.add_row(Text("✓", "green"), Text(title), "", Text(duration(time.monotonic() - began), "dim"))
        self._console.print(done)

    def _running(self, title: str, spinner: Spinner, share: float | None, seconds: float) -> RenderableType:
        bar = "" if share is None else ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH, complete_style="cyan")
        grid = self._grid()
        grid.add_row(spinner, Text(title, "bold"), bar, Text(duration(seconds), "dim"))
        return grid

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.width = self._width
        grid.add_column(width=1)
        grid.add_column(ratio=1, no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(width=10, justify="right", no_wrap=True)
        return grid


# ---- At the end ------------------------------------------------------------------------------------------------------


def show(found: "DemoFindings", out: Path, console: Console) -> None:
    """Prints the closing table, the sentences, and where everything is."""
    console.print()
    console.print(closing_table(found))
    places = (
        f"Open {out}/report/index.html. The images are {out}/sheet.png, their views {out}/views.png, and all numbers "
        f"{out}/demo.json. All of it took {duration(found.seconds)}."
    )
    if not console.is_terminal:  # the width of a log is not limited
        for line in (*(f"{number}. {text}" for number, text in enumerate(sentences(found), start=1)), places):
            console.print(Text(line), soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    for number, sentence in enumerate(sentences(found), start=1):
        lead, colon, rest = sentence.partition(":")
        grid.add_row(Text(str(number), "bold cyan"), Text.assemble((lead + colon, "bold"), rest))
    console.print(grid, width=min(console.width, _WIDTH))
    console.print()
    console.print(Text(places, "dim"), width=min(console.width, _WIDTH))


def closing_table(found: "DemoFindings") -> Table:
    """Returns the accuracies of the baselines and of both encoders, in percent."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("top-1 in %", no_wrap=True)
    for name in (*found.tasks, "A", "S", "S k-NN"):
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name == "A" else "")
    _add(table, "chance", [found.chance] * len(found.tasks))
    _add(table, "8x8 thumbnails", found.thumbnails)
    _add(table, "random encoder", found.random)
    table.add_section()
    _add(table, "MoCo + fine-tuning", found.finetune[-1], found.S["finetune"], found.S_knn["finetune"])
    _add(table, "MoCo + PNR", found.pnr[-1], found.S["pnr"], found.S_knn["pnr"], style="green")
    table.caption = (
        "Linear classifiers over all styles. A: mean over the styles after the last one. S: mean fall of the earlier "
        "styles from their best."
    )
    table.caption_justify = "left"
    return table


def _add(table: Table, name: str, row: Sequence[float], *forgotten: float, style: str = "") -> None:
    table.add_row(name, *(f"{100 * value:.1f}" for value in (*row, fmean(row), *forgotten)), style=style)


def sentences(found: "DemoFindings") -> tuple[str, str, str, str]:
    """Returns what the demo showed, in four sentences."""
    percent = {name: f"{100 * value:.1f} %" for name, value in found.A.items()}
    resumed = found.resumed
    outcome = (
        "its losses and its encoder are identical to the last bit to those of the run that was not interrupted"
        if resumed.is_identical
        else f"{resumed.num_equal} losses are those of the run that was not interrupted, but not everything is"
    )
    return (
        f"It learns: A is {percent['pnr']} with PNR, {found.A['pnr'] / found.baseline:.1f} times the better of random "
        f"encoder ({percent['random']}) and thumbnails ({percent['thumbnails']}); chance is "
        f"{100 * found.chance:.1f} %.",
        _remembers(found),
        f"It resumes: killed after step {resumed.killed_after_step} and started again, {outcome} "
        f"({resumed.num_losses} losses compared).",
        f"It is fast: with one thread, the native loader makes both views of {found.loader.native:,.0f} JPEGs per "
        f"second and torchvision of {found.loader.torchvision:,.0f}, {found.loader.ratio:.1f} times as many.",
    )


def _remembers(found: "DemoFindings") -> str:
    """Returns the sentence about forgetting. Its first words follow the measured difference by k-NN."""
    difference = found.S_knn["finetune"] - found.S_knn["pnr"]
    if abs(difference) < _CLEAR:
        lead = "No clear difference in forgetting"
    else:
        lead = "PNR forgets less" if difference > 0 else "PNR forgot more in this run"
    knn, linear, percent = (
        {name: f"{100 * value:.1f}" for name, value in numbers.items()} for numbers in (found.S_knn, found.S, found.A)
    )
    return (
        f"{lead}: judged by k-NN, an earlier style fell from its best by {knn['finetune']} points with fine-tuning and "
        f"by {knn['pnr']} with PNR (S); by a linear classifier, which is fitted to all styles, by {linear['finetune']} "
        f"and {linear['pnr']}. A is {percent['finetune']} and {percent['pnr']} %."
    )
