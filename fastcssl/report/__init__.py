"""Reports runs as one HTML page with figures, and as a table for the terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError
from fastcssl.report import figures
from fastcssl.report.comparison import Comparison, compared
from fastcssl.report.figures import Picture
from fastcssl.report.page import page
from fastcssl.report.runs import RunRecord, found_runs, read_run
from fastcssl.runs.layout import Folders, folders_of
from fastcssl.runs.results import Evaluation

__all__ = ["Report", "report_runs"]

PAGE = "index.html"
PICTURES = "figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The files of a report, and the data that they show."""

    page: Path
    pictures: tuple[Path, ...]
    runs: tuple[RunRecord, ...]
    comparisons: tuple[Comparison, ...]


def report_runs(runs: Folders, out: Path | str | None = None) -> Report:
    """Writes one page with figures about runs, whether or not they were evaluated, and returns its files and data.

    runs: folders of `train_run` or `train_seeds`. out: the folder for the page; by default RUN/report, or ./report for
    several runs.
    """
    records = [read_run(folder) for folder in found_runs(folders_of(runs))]
    comparisons = compared(records)
    pictures = {key: [picture.drawn() for picture in group] for key, group in _pictures(records, comparisons).items()}
    out = Path(out) if out else (records[0].folder / "report" if len(records) == 1 else Path("report"))
    try:
        (out / PICTURES).mkdir(parents=True, exist_ok=True)
        drawn = [picture for group in pictures.values() for picture in group]
        saved = [out / PICTURES / f"{picture.name}.png" for picture in drawn]
        for path, picture in zip(saved, drawn, strict=True):
            write_atomically(path, picture.png)
        write_atomically(out / PAGE, page(records, comparisons, pictures).encode())
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {out} ({error.strerror}). Choose another folder with --out."
        ) from None
    return Report(page=out / PAGE, pictures=tuple(saved), runs=tuple(records), comparisons=tuple(comparisons))


def _pictures(runs: Sequence[RunRecord], comparisons: Sequence[Comparison]) -> dict[tuple[str, str], list[Picture]]:
    found: dict[tuple[str, str], list[Picture]] = {}
    for place, comparison in enumerate(comparisons):
        several = len(comparison.rows) > 1 or comparison.rows[0].num_seeds > 1
        if several and any(len(row.A_T) > 1 for row in comparison.rows):
            name = f"{comparison.recipe}-{comparison.rows[0].results[0].name}"
            found["comparison", str(place)] = [
                figures.averages(_slug(f"average-{name}"), comparison.rows),
                figures.firsts(_slug(f"first-{name}"), comparison.rows),
            ]
    for place, run in enumerate(runs):
        begin = f"{place:02d}-{run.method}-{run.strategy}-seed{run.seed}" if len(runs) > 1 else "run"
        for result in run.evaluations:
            low, high = _range(runs, run, result)
            drawn = [figures.matrix(_slug(f"{begin}-{result.name}-matrix"), result, low, high)]
            if len(result.top1) > 1:
                drawn.append(figures.curves(_slug(f"{begin}-{result.name}-curves"), result))
            found[run.name, result.name] = drawn
        if run.steps:
            found[run.name, "training"] = [
                figures.training(_slug(f"{begin}-training"), run),
                figures.speed(_slug(f"{begin}-speed"), run),
            ]
    return found


def _range(runs: Sequence[RunRecord], run: RunRecord, result: Evaluation) -> tuple[float, float]:
    """Returns the lowest and the highest accuracy in percent of all tables that share a recipe, probe and scope.

    They set the range of colours, so that colours can be compared between tables.
    """
    accuracies = [
        100 * value
        for other in runs
        for found in other.evaluations
        if (other.recipe, found.probe, found.scope) == (run.recipe, result.probe, result.scope)
        for row in found.top1
        for value in row
    ]
    return min(accuracies), max(accuracies)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)
