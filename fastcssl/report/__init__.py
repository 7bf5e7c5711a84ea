"""Reports runs as one HTML page with figures, and as a table for the terminal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError
from fastcssl.report import figures
from fastcssl.report.comparison import Comparison, coinciding, compared
from fastcssl.report.drawing import Picture
from fastcssl.report.page import CSV, LATEX, Content, page
from fastcssl.report.runs import RunRecord, found_runs, read_run
from fastcssl.runs.layout import Folders, RunFolder, folders_of
from fastcssl.runs.overview import Overview, Result, as_csv, as_latex, overviews
from fastcssl.runs.results import Evaluation

__all__ = ["Report", "report_runs"]

PAGE = "index.html"
PICTURES = "figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The files of a report, and the data that they show."""

    page: Path
    pictures: tuple[Path, ...]
    tables: tuple[Path, ...]  # the overview as CSV and LaTeX; none if no run was evaluated
    runs: tuple[RunRecord, ...]
    overviews: tuple[Overview, ...]
    comparisons: tuple[Comparison, ...]


def report_runs(runs: Folders, out: Path | str | None = None) -> Report:
    """Writes one page with figures about runs, whether or not they were evaluated, and returns its files and data.

    runs: folders of `train_run` or `train_seeds`. out: the folder for the page; by default RUN/report, or ./report for
    several runs.
    """
    records = [read_run(folder) for folder in found_runs(folders_of(runs))]
    comparisons = compared(records)
    results = [_result(run, found) for run in records for found in run.evaluations]
    tables = overviews(results)
    ranges = {(run.name, found.name): _range(records, run, found) for run in records for found in run.evaluations}
    pictures = {
        key: [picture.drawn() for picture in group] for key, group in _pictures(records, comparisons, ranges).items()
    }
    content = Content(runs=records, overviews=tables, comparisons=comparisons, pictures=pictures, ranges=ranges)
    out = Path(out) if out else (records[0].folder / "report" if len(records) == 1 else Path("report"))
    files = {out / PICTURES / f"{picture.name}.png": picture.png for group in pictures.values() for picture in group}
    texts = {out / CSV: as_csv(results).encode(), out / LATEX: as_latex(tables).encode()} if results else {}
    try:
        (out / PICTURES).mkdir(parents=True, exist_ok=True)
        for path, written in {**files, **texts, out / PAGE: page(content).encode()}.items():
            write_atomically(path, written)
    except OSError as error:
        raise UserError(
            f"Cannot write the report to {out} ({error.strerror}). Choose another folder with --out."
        ) from None
    return Report(
        page=out / PAGE,
        pictures=tuple(files),
        tables=tuple(texts),
        runs=tuple(records),
        overviews=tuple(tables),
        comparisons=tuple(comparisons),
    )


def _result(run: RunRecord, found: Evaluation) -> Result:
    path = RunFolder(run.folder).evaluations / f"{found.name}.json"
    return Result(run=run.folder, path=path, evaluation=found, data=run.recipe)


def _pictures(
    runs: Sequence[RunRecord], comparisons: Sequence[Comparison], ranges: Mapping[tuple[str, str], tuple[float, float]]
) -> dict[tuple[str, str], list[Picture]]:
    found: dict[tuple[str, str], list[Picture]] = {("comparison", ""): _averages(comparisons)}
    for place, run in enumerate(runs):
        begin = f"{place:02d}-{run.method}-{run.strategy}-seed{run.seed}" if len(runs) > 1 else "run"
        has_curves: set[str] = set()
        for result, *_ in coinciding(run.evaluations):
            low, high = ranges[run.name, result.name]
            drawn = [figures.matrix(_slug(f"{begin}-{result.name}-matrix"), result, low, high)]
            # One scope per probe: the others have their tables, and the curves of a hundred tables are slow to draw.
            if len(result.top1) > 1 and result.probe not in has_curves:
                drawn.append(figures.curves(_slug(f"{begin}-{result.name}-curves"), result))
                has_curves.add(result.probe)
            found[run.name, result.name] = drawn
        if run.steps:
            found[run.name, "training"] = [
                figures.training(_slug(f"{begin}-training"), run),
                figures.speed(_slug(f"{begin}-speed"), run),
            ]
    return found


def _averages(comparisons: Sequence[Comparison]) -> list[Picture]:
    """Returns two figures per comparison: the average and the first task. Comparisons with equal curves share them."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for comparison in comparisons:
        several = len(comparison.rows) > 1 or comparison.rows[0].num_seeds > 1
        if several and any(len(row.A_T) > 1 for row in comparison.rows):
            groups.setdefault(comparison.curves, []).append(comparison)
    begin = {group[0].recipe: f"{group[0].recipe}: " for group in groups.values()}
    found = []
    for same in groups.values():
        first = same[0]
        of_recipe = begin[first.recipe] if len(begin) > 1 else ""
        title = f"{of_recipe}{'; '.join(comparison.evaluation for comparison in same)}"
        name = f"{first.recipe}-{first.rows[0].results[0].name}"
        found.append(figures.averages(_slug(f"average-{name}"), title, first))
        found.append(figures.firsts(_slug(f"first-{name}"), f"{title}: the first task", first))
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
