"""Shows an overview of several runs on a terminal."""

from rich import box
from rich.table import Table
from rich.text import Text

from fastcssl.runs.metrics import AVERAGE
from fastcssl.runs.overview import Overview


def overview_table(overview: Overview) -> Table:
    """Returns the table of one probe: a row per run, a group of columns per scope, references below the runs.

    The best value of each column is bold and green.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False)
    table.add_column("run", overflow="fold")
    scope = ""
    for column in overview.columns:
        above = "" if column.scope == scope else column.scope
        scope = column.scope
        style = "bold" if column.metric is AVERAGE else ""
        table.add_column(f"{above}\n{column.metric.heading}", justify="right", no_wrap=True, style=style)
    for row in overview.rows:
        cells = [Text(str(cell), _style(overview.is_best(row, place))) for place, cell in enumerate(row.cells)]
        table.add_row(Text(row.name), *cells, style="italic dim" if row.is_reference else "")
    return table


def _style(is_best: bool) -> str:
    return "bold green" if is_best else ""
