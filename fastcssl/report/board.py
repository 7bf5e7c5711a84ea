"""Shows the overview of several runs on the page: one table per probe, with the best run of each column marked."""

import os
from collections.abc import Sequence

from fastcssl.report.comparison import PROBES, SCOPES
from fastcssl.report.markup import Html, el, joined
from fastcssl.report.runs import RunRecord
from fastcssl.runs.metrics import AVERAGE
from fastcssl.runs.overview import Cell, Overview, OverviewRow
from fastcssl.runs.results import DOWNSTREAM


def board(table: Overview, runs: Sequence[RunRecord]) -> Html:
    """Returns a heading and the table. The names of the rows lead to the sections #run0, #run1 and so on."""
    title = ", ".join(part for part in (PROBES.get(table.probe, table.probe), table.settings, table.data) if part)
    body = (_row(table, row, runs) for row in table.rows)
    parts = el("table", el("thead", *_head(table)), el("tbody", *body), class_="board")
    return joined(el("h3", title), el("div", parts, class_="scroll"))


def _head(table: Overview) -> list[Html]:
    groups = [(scope, sum(column.scope == scope for column in table.columns)) for scope in table.scopes]
    above = (el("th", scope_title(scope), scope="colgroup", colspan=str(count)) for scope, count in groups)
    starts = _starts(table)
    names = (
        el("th", column.metric.heading, scope="col", class_="starts" if place in starts else None)
        for place, column in enumerate(table.columns)
    )
    return [el("tr", el("td", rowspan="2"), *above, class_="scopes"), el("tr", *names)]


def scope_title(scope: str) -> str:
    """Returns a scope in words."""
    return SCOPES.get(scope) or f"on {scope.removeprefix(DOWNSTREAM)}"


def _starts(table: Overview) -> set[int]:
    """Returns the places of the columns that are the first of their scope."""
    scopes = [column.scope for column in table.columns]
    return {place for place, scope in enumerate(scopes) if place == 0 or scopes[place - 1] != scope}


def _row(table: Overview, row: OverviewRow, runs: Sequence[RunRecord]) -> Html:
    starts = _starts(table)
    cells = []
    for place, cell in enumerate(row.cells):
        kinds = {
            "starts": place in starts,
            "average": table.columns[place].metric is AVERAGE,
            "best": table.is_best(row, place),
        }
        cells.append(_cell(cell, " ".join(kind for kind, holds in kinds.items() if holds) or None))
    return el("tr", _name(row, runs), *cells, class_="reference" if row.is_reference else None)


def _cell(cell: Cell, kinds: str | None) -> Html:
    deviation = el("small", cell.deviation) if cell.deviation else None
    return el("td", el("span", cell.mean), deviation, class_=kinds)


def _name(row: OverviewRow, runs: Sequence[RunRecord]) -> Html:
    if row.is_reference:
        return el("th", row.name, scope="row")
    place, run = next((place, run) for place, run in enumerate(runs) if run.folder == row.runs[0])
    # What all names begin with tells the rows apart in no way, and a phone has no room for it.
    folders = [str(run.folder.absolute()) for run in runs]
    shared = os.path.commonpath(folders) if len(folders) > 1 else os.path.dirname(folders[0])
    number = f", {len(row.runs)} seeds" if len(row.runs) > 1 else ""
    name = os.path.relpath(run.folder.parent if number else run.folder, shared)
    path = f"{os.path.basename(shared) if name == os.curdir else name}{number}"
    return el("th", el("a", run.title, href=f"#run{place}"), el("span", path, class_="path"), scope="row")
