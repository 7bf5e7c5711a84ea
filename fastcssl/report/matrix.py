"""The table of accuracies of one evaluation: a row per checkpoint, a column per task, references below."""

from collections.abc import Iterator, Sequence

from fastcssl.report.markup import Html, el
from fastcssl.runs.results import Evaluation


def short_names(found: Evaluation) -> list[str]:
    """Returns the columns' names if they are short enough for an axis, otherwise their numbers."""
    names = found.columns
    if max(map(len, names)) <= (9 if len(names) <= 7 else 4):
        return list(names)
    return [str(number) for number in range(len(names))]


def after(found: Evaluation, row: int) -> str:
    """Returns the label of a row: the last task that its encoder has learnt."""
    seen = found.checkpoints[row].seen
    return "all" if len(seen) > 1 and len(found.checkpoints) == 1 else str(found.checkpoints[row].task)


def references(found: Evaluation, *, with_ft: bool = True) -> list[tuple[str, Sequence[float | None]]]:
    """Returns the titles and the accuracies of references, which stand below the checkpoints."""
    rows = (
        ("single task", found.reference.ft if with_ft else None),
        ("random encoder", found.reference.random),
        ("chance", found.reference.chance),
    )
    return [(title, row) for title, row in rows if row is not None]


def border(seen: Sequence[set[int]], num_columns: int) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yields the edges between cells of learnt tasks and cells of later tasks."""
    for t, tasks in enumerate(seen):
        if not tasks:
            continue
        for i in range(num_columns - 1):
            if (i in tasks) != (i + 1 in tasks):
                yield (i + 0.5, max(t - 0.5, -0.46)), (i + 0.5, min(t + 0.5, len(seen) - 0.54))
        for i in range(num_columns):
            if t + 1 < len(seen) and (i in tasks) != (i in seen[t + 1]):
                yield (max(i - 0.5, -0.47), t + 0.5), (min(i + 0.5, num_columns - 0.53), t + 0.5)


def matrix_table(found: Evaluation, low: float, high: float) -> Html:
    """Returns the table for the page. `low` and `high`: the range of colours in percent."""
    names = short_names(found)
    head = el("tr", el("th", "after task", scope="col"), *(el("th", name, scope="col") for name in (*names, "A")))
    rows = [_row(found, t, low, high) for t in range(len(found.top1))]
    for title, values in references(found):
        cells = (el("td", "-" if value is None else f"{100 * value:.1f}") for value in values)
        rows.append(el("tr", el("th", title, scope="row"), *cells, el("td"), class_="reference"))
    return el("div", el("table", el("thead", head), el("tbody", *rows), class_="matrix"), class_="scroll")


def _row(found: Evaluation, t: int, low: float, high: float) -> Html:
    seen = [set(encoder.seen) for encoder in found.checkpoints]
    cells = []
    for i, share in enumerate(found.top1[t]):
        shade = (100 * share - low) / (high - low) if high > low else 0.5
        kinds = ["cell", "strong"] if shade > 0.55 else ["cell"]
        if seen[t] and i + 1 < len(found.columns) and (i in seen[t]) != (i + 1 in seen[t]):
            kinds.append("edge-right")
        if seen[t] and t + 1 < len(seen) and (i in seen[t]) != (i in seen[t + 1]):
            kinds.append("edge-below")
        cells.append(el("td", f"{100 * share:.1f}", class_=" ".join(kinds), style=f"--shade:{100 * shade:.0f}%"))
    mean = el("td", f"{100 * found.metrics.A[t]:.1f}", class_="mean")
    return el("tr", el("th", after(found, t), scope="row"), *cells, mean)
