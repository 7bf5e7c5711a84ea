"""Prints a report's tables on a terminal."""

from shlex import quote

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fastcssl.report import Report
from fastcssl.report.comparison import Comparison, lacking, mark
from fastcssl.runs.bottleneck import NAMES
from fastcssl.runs.metrics import AVERAGE, compared_metrics
from fastcssl.runs.overview_table import overview_table

_FEW_RUNS = 4  # more runs than this get a short sentence about their bottleneck


def summary(found: Report) -> RenderableType:
    """Returns the tables, their notes, the state of each run and the paths of the files."""
    parts: list[RenderableType] = []
    for table in found.overviews:
        parts += [Text(table.title, "bold"), overview_table(table)]
    for comparison in found.comparisons:
        if not comparison.is_telling:
            continue
        parts += [Text(f"{comparison.recipe}: {comparison.evaluation}", "bold"), _table(comparison)]
        for number, note in enumerate(comparison.notes):
            parts.append(Padding(Text(f"{mark(number)}  {note}", "dim"), (0, 0, 0, 1)))
        parts.append("")
    parts += [Text(text, "dim") for text in lacking(found.comparisons)]
    for run in found.runs:
        text = Text.assemble((run.title, "bold"), (f"  seed {run.seed}  {run.name}", "dim"))
        parts.append(text)
        if not run.is_finished:
            parts.append(Text(f" {len(run.tasks)} of {len(run.task_names)} tasks finished", "yellow"))
        if not run.evaluations:
            parts.append(Text(f" not evaluated; run fastcssl-eval {quote(run.name)}", "yellow"))
        if run.bound is not None:
            share = (
                f"Bottleneck: {NAMES[run.bound.stage]} ({100 * run.bound.shares[run.bound.stage]:.0f} % of the time)"
            )
            sentence = run.bound.sentence if len(found.runs) <= _FEW_RUNS else share
            parts.append(Padding(Text(sentence), (0, 0, 0, 1)))
    parts += ["", Text.assemble(("page     ", "dim"), str(found.page))]
    if found.tables:
        parts.append(Text.assemble(("tables   ", "dim"), ", ".join(map(str, found.tables))))
    if found.pictures:
        count = len(found.pictures)
        parts.append(Text.assemble(("figures  ", "dim"), f"{found.pictures[0].parent} ({count} PNG files)"))
    return Group(*parts)


def _table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column("")
    metrics = compared_metrics()
    for heading in ("seeds", *(metric.heading for metric in metrics)):
        table.add_column(heading, justify="right", no_wrap=True)
    has_published = any(row.published for row in comparison.rows)
    if has_published:
        table.add_column(f"published {AVERAGE.name}", justify="right", style="italic", no_wrap=True)
    for row in comparison.rows:
        cells = [str(row.metrics[name]) if name in row.metrics else "-" for name in (metric.name for metric in metrics)]
        if has_published:
            marks = comparison.marks(row)
            text = row.published.text(AVERAGE.name) if row.published else None
            cells.append(f"{text or '-'}{f' [{marks}]' if marks else ''}")
        table.add_row(*(Text(cell) for cell in (row.title, str(row.num_seeds), *cells)))
    return table
