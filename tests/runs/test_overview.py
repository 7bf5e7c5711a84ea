"""The table of several runs, on a screen, in CSV and in LaTeX."""

import csv
import io
from dataclasses import replace
from pathlib import Path

from made_results import evaluation

from fastcssl.runs.overview import Cell, Result, as_csv, as_latex, overviews
from fastcssl.runs.results import Evaluation, Metrics, References


def result(run: str, average: float = 0.5, **changes: object) -> Result:
    made: Evaluation = evaluation(metrics=Metrics(A=[0.1, average], numbers={"S": 0.05}), **changes)
    return Result(run=Path(run), path=Path(run) / "evaluations" / "x.json", evaluation=made)


def test_seeds_share_a_row_with_mean_and_deviation() -> None:
    (table,) = overviews([result("runs/pnr/seed5", 0.5), result("runs/pnr/seed6", 0.7), result("runs/cassle", 0.4)])
    assert [row.name for row in table.rows] == ["runs/pnr, 2 seeds", "runs/cassle", "random encoder"]
    assert str(table.rows[0].cells[0]) == "60.00 ± 14.14" and str(table.rows[1].cells[0]) == "40.00"
    assert [column.metric.name for column in table.columns] == ["A", "S"]  # nothing has P
    assert str(table.rows[2].cells[1]) == "-" and str(Cell((-1e-9,))) == "0.00"


def test_a_single_seed_keeps_its_own_name() -> None:
    (table,) = overviews([result("runs/pnr/seed5")])
    assert table.rows[0].name == "runs/pnr/seed5"


def test_chance_is_the_mean_over_tasks() -> None:
    (table,) = overviews([result("runs/pnr", reference=References(chance=[0.1, 0.3]))])
    assert table.rows[-1].name == "chance" and str(table.rows[-1].cells[0]) == "20.00"


def test_runs_with_other_defaults_share_a_table() -> None:
    """The method decides the learning rate, so it differs between runs without being a grid."""
    one, other = result("runs/a", settings={"lr": 3.0}), result("runs/b", settings={"lr": 0.1})
    other = replace(
        other,
        evaluation=replace(other.evaluation, checkpoints=[replace(other.evaluation.checkpoints[0], sha256="x")] * 2),
    )
    assert [table.title for table in overviews([one, other])] == ["linear"]
    grid = [one, replace(one, evaluation=replace(one.evaluation, settings={"lr": 0.3}))]
    assert [table.title for table in overviews(grid)] == ["linear, lr 3.0", "linear, lr 0.3"]


def test_csv_has_every_result() -> None:
    text = as_csv([result("runs/a,b"), result("runs/pnr", scope="per-task")])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0]["run"] == "runs/a,b" and rows[1]["scope"] == "per-task"
    assert rows[0]["A"] == "0.5" and rows[0]["S"] == "0.05" and rows[0]["P"] == "" and rows[0]["random"] == "0.1"


def test_latex_is_escaped_and_has_as_many_cells_as_columns() -> None:
    text = as_latex(overviews([result("runs/my_pnr/seed5"), result("runs/my_pnr/seed6", 0.7), result("runs/50%")]))
    assert r"runs/my\_pnr, 2 seeds & 60.00 $\pm$ 14.14 & 5.00 $\pm$ 0.00 \\" in text and r"runs/50\%" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count(" & ") + line.startswith("& ") for line in body} == {2} and text.count("toprule") == 1
    assert r"$A\uparrow$" in text and r"$S\downarrow$" in text and "-- " in text


def test_the_best_run_is_marked_unless_runs_are_equal_or_joint() -> None:
    joint = result("runs/joint", 0.9)
    all_tasks = replace(joint.evaluation.checkpoints[0], seen=[0, 1])
    made = joint.evaluation
    joint = replace(joint, evaluation=replace(made, checkpoints=[all_tasks], metrics=replace(made.metrics, A=[0.9])))
    (table,) = overviews([result("runs/a", 0.5), joint, result("runs/b", 0.7)])
    assert [[table.is_best(row, place) for row in table.rows] for place in (0, 1)] == [
        [False, False, True, False],  # A; the last row is the random encoder
        [False] * 4,  # S is equal
    ]
    (alone,) = overviews([result("runs/a"), joint])
    assert not any(alone.is_best(row, 0) for row in alone.rows)


def test_runs_on_other_data_have_a_table_of_their_own() -> None:
    tables = overviews([replace(result("runs/a"), data="cifar"), replace(result("runs/b"), data="pacs")])
    assert [(table.title, len(table.rows)) for table in tables] == [("linear, cifar", 2), ("linear, pacs", 2)]
