"""Puts the results of several runs into one table, with one row per run and one group of columns per scope.

Runs of one folder that differ only in their seed share a row, with mean and standard deviation. The command line, the
report, the CSV file and the LaTeX file all show this table.
"""

import csv
import io
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastcssl.runs.metrics import AVERAGE, METRICS, MetricSpec, compared_metrics
from fastcssl.runs.results import Evaluation

_SEED_FOLDER = re.compile(r"seed\d+")
_LATEX_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One evaluation of one run."""

    run: Path
    path: Path  # of the result file
    evaluation: Evaluation
    data: str = ""  # what the run learnt; a table never mixes data

    @property
    def is_joint(self) -> bool:
        """Returns whether the run learnt all tasks at once: a bound for the others rather than a rival."""
        checkpoints = self.evaluation.checkpoints
        return len(checkpoints) == 1 and len(checkpoints[0].seen) > 1


@dataclass(frozen=True, slots=True)
class Cell:
    """The values of one metric: one per seed. An empty cell has none."""

    values: tuple[float, ...] = ()

    @property
    def mean(self) -> str:
        """Returns the mean in percent."""
        return f"{100 * statistics.fmean(self.values):z.2f}" if self.values else "-"

    @property
    def deviation(self) -> str:
        """Returns the standard deviation over seeds in percent, or nothing if there are not several."""
        return f"± {100 * statistics.stdev(self.values):.2f}" if len(self.values) > 1 else ""

    def __str__(self) -> str:
        return f"{self.mean} {self.deviation}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewColumn:
    """A column: one metric under one scope."""

    scope: str
    metric: MetricSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewRow:
    """A row: a run, several seeds of a run, or a reference such as chance."""

    name: str
    cells: tuple[Cell, ...]
    runs: tuple[Path, ...] = ()  # none for a reference
    is_joint: bool = False

    @property
    def is_reference(self) -> bool:
        return not self.runs

    @property
    def is_rival(self) -> bool:
        return not self.is_reference and not self.is_joint


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The table of one probe under one setting, of runs that learnt the same data."""

    data: str  # nothing if all tables are about the same data
    probe: str
    settings: str  # by which it differs from the other tables of the probe
    columns: tuple[OverviewColumn, ...]
    rows: tuple[OverviewRow, ...]

    @property
    def title(self) -> str:
        return ", ".join(part for part in (self.probe, self.settings, self.data) if part)

    @property
    def scopes(self) -> list[str]:
        return list(dict.fromkeys(column.scope for column in self.columns))

    def is_best(self, row: OverviewRow, place: int) -> bool:
        """Returns whether a row has the best value of a column, as shown, among runs that are not joint and differ."""
        rivals = [float(rival.cells[place].mean) for rival in self.rows if rival.is_rival and rival.cells[place].values]
        if len(set(rivals)) < 2 or not row.is_rival or not row.cells[place].values:
            return False
        best = max(rivals) if self.columns[place].metric.better == "higher" else min(rivals)
        return float(row.cells[place].mean) == best


def overviews(results: Sequence[Result]) -> list[Overview]:
    """Returns one table per data, probe and setting, in the order of the results."""
    by_probe: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_probe.setdefault((result.data, result.evaluation.probe), []).append(result)
    several = len({result.data for result in results}) > 1
    found = []
    for (data, probe), members in by_probe.items():
        keys = varied_settings([result.evaluation for result in members])
        by_settings: dict[str, list[Result]] = {}
        for result in members:
            by_settings.setdefault(settings_text(result.evaluation, keys), []).append(result)
        for settings, part in by_settings.items():
            columns = _columns(part)
            rows = _rows(part, columns)
            about = data if several else ""
            found.append(Overview(data=about, probe=probe, settings=settings, columns=columns, rows=rows))
    return found


def varied_settings(evaluations: Iterable[Evaluation]) -> list[str]:
    """Returns the settings that differ between evaluations of one run by the same probe and scope: those of a grid."""
    first: dict[tuple[str, str, str], Evaluation] = {}
    differ: set[str] = set()
    keys: dict[str, None] = {}
    for made in evaluations:
        known = first.setdefault((made.probe, made.scope, made.checkpoints[-1].sha256), made)
        keys |= dict.fromkeys(made.settings)
        differ |= {key for key in made.settings if known.settings.get(key) != made.settings[key]}
    return [key for key in keys if key in differ]


def settings_text(made: Evaluation, keys: Iterable[str]) -> str:
    """Returns the values of some settings as words."""
    return ", ".join(f"{key.replace('_', ' ')} {made.settings[key]}" for key in keys if key in made.settings)


def row_name(run: Path) -> tuple[str, bool]:
    """Returns the name of a run's row, and whether the run is one of several seeds in a folder."""
    is_seed = bool(_SEED_FOLDER.fullmatch(run.name))
    return str(run.parent if is_seed else run), is_seed


def _columns(results: Sequence[Result]) -> tuple[OverviewColumn, ...]:
    scopes = dict.fromkeys(result.evaluation.scope for result in results)
    return tuple(
        OverviewColumn(scope=scope, metric=metric)
        for scope in scopes
        for metric in compared_metrics()
        if any(r.evaluation.scope == scope and r.evaluation.metrics.last(metric.name) is not None for r in results)
    )


def _rows(results: Sequence[Result], columns: Sequence[OverviewColumn]) -> tuple[OverviewRow, ...]:
    by_row: dict[str, list[Result]] = {}
    for result in results:
        by_row.setdefault(row_name(result.run)[0], []).append(result)
    rows = []
    for name, members in by_row.items():
        runs = tuple(dict.fromkeys(result.run for result in members))
        rows.append(
            OverviewRow(
                name=f"{name}, {len(runs)} seeds" if len(runs) > 1 else str(runs[0]),
                cells=tuple(_cell(members, column) for column in columns),
                runs=runs,
                is_joint=any(result.is_joint for result in members),
            )
        )
    for name in ("random", "chance"):
        reference = tuple(_reference(results, column, name) for column in columns)
        if any(cell.values for cell in reference):
            rows.append(OverviewRow(name="random encoder" if name == "random" else name, cells=reference))
    return tuple(rows)


def _cell(members: Sequence[Result], column: OverviewColumn) -> Cell:
    known = (r.evaluation.metrics.last(column.metric.name) for r in members if r.evaluation.scope == column.scope)
    return Cell(tuple(value for value in known if value is not None))


def _reference(results: Sequence[Result], column: OverviewColumn, name: str) -> Cell:
    """Returns the mean accuracy of a reference over the tasks and over the runs, in the columns of A only."""
    if column.metric is not AVERAGE:
        return Cell()
    rows = []
    for made in (result.evaluation for result in results if result.evaluation.scope == column.scope):
        rows.append(made.reference.random if name == "random" else made.reference.chance)
    means = [statistics.fmean(row) for row in rows if row]
    return Cell((statistics.fmean(means),)) if means else Cell()


# ---- Files -----------------------------------------------------------------------------------------------------------


def as_csv(results: Sequence[Result]) -> str:
    """Returns one line per result, with every metric. Accuracies are shares from 0 to 1, as in the result files."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "probe", "scope", "settings", *METRICS, "top1", "top5", "random", "chance", "file"])
    keys = varied_settings([result.evaluation for result in results])
    for result in results:
        made = result.evaluation
        references = [statistics.fmean(row) if row else "" for row in (made.reference.random, made.reference.chance)]
        numbers = ["" if value is None else value for value in map(made.metrics.last, METRICS)]
        writer.writerow(
            [
                result.run,
                made.probe,
                made.scope,
                settings_text(made, keys),
                *numbers,
                made.overall_top1[-1],
                made.overall_top5[-1],
                *references,
                result.path,
            ]
        )
    return file.getvalue()


def as_latex(tables: Sequence[Overview]) -> str:
    """Returns one `tabular` per table, in percent, for the package booktabs."""
    return "\n".join(["% Needs \\usepackage{booktabs}. Values in percent.", *map(_tabular, tables)]) + "\n"


def _tabular(table: Overview) -> str:
    spans = [(scope, sum(column.scope == scope for column in table.columns)) for scope in table.scopes]
    lines = [f"% {table.title}", f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}", "\\toprule"]
    lines.append(" & ".join(["", *(f"\\multicolumn{{{n}}}{{c}}{{{_escaped(scope)}}}" for scope, n in spans)]) + r" \\")
    at, rules = 2, []
    for _, count in spans:
        rules.append(f"\\cmidrule(lr){{{at}-{at + count - 1}}}")
        at += count
    lines.append(" ".join(rules))
    lines.append(" & ".join(["", *(_heading(column.metric) for column in table.columns)]) + r" \\")
    lines.append("\\midrule")
    was_reference = False
    for row in table.rows:
        if row.is_reference and not was_reference:
            lines.append("\\midrule")
        was_reference = row.is_reference
        cells = [str(cell).replace(" ± ", r" $\pm$ ") if cell.values else "--" for cell in row.cells]
        lines.append(" & ".join([_escaped(row.name), *cells]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def _heading(metric: MetricSpec) -> str:
    arrow = "uparrow" if metric.better == "higher" else "downarrow"
    return f"${metric.name}\\{arrow}$"


def _escaped(text: str) -> str:
    return "".join(_LATEX_SPECIAL.get(character, character) for character in text)
