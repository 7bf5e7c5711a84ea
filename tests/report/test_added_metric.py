"""One more row of the table of metrics, and it is computed, stored, loaded, printed and drawn."""

import io
import json
from pathlib import Path

import pytest
from made_results import evaluation
from made_runs import evaluated, made_run
from rich.console import Console

from fastcssl.evaluate.options import Evaluated
from fastcssl.evaluate.scoreboard import matrix, summary
from fastcssl.evaluate.targets import open_targets
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.report import report_runs
from fastcssl.report.summary import summary as report_summary
from fastcssl.runs.metrics import METRICS, MetricSpec, Need
from fastcssl.runs.results import Evaluation, References, evaluations, load_evaluation, metrics_named_in, metrics_of

ROW = MetricSpec(
    name="BWT",
    better="lower",
    needs=(Need.EVERY_TASK, Need.REFERENCES),
    compute=lambda known: known.top1[-1][0] / 4,
    title="made up",
    description="made up: a quarter of the first task's accuracy at the end",
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, ROW.name, ROW)


def printed(what: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(what)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def computed() -> Evaluation:
    made = evaluation()
    return evaluation(metrics=metrics_of(made.top1, [[0], [0, 1]], made.reference))


@pytest.mark.usefixtures("added")
def test_it_is_computed_and_stored(tmp_path: Path) -> None:
    made = computed()
    assert made.metrics.BWT == made.metrics.last("BWT") == pytest.approx(0.5 / 4)
    path = made.save(tmp_path)
    stored = json.loads(path.read_text())["metrics"]
    assert list(stored) == ["A", "S", "P", "F", "BWT", "missing"] and stored["BWT"] == pytest.approx(0.125)
    assert load_evaluation(path) == made


@pytest.mark.usefixtures("added")
def test_what_it_needs_is_said_with_the_others() -> None:
    made = evaluation()
    bare = metrics_of(made.top1, [[0], [0, 1]], References(random=[0.1, 0.1]))
    assert bare.BWT is None and bare.missing[0].startswith(
        "P and BWT need models trained on one task alone; those of task 1 are"
    )
    assert metrics_named_in(bare.missing[0]) == ["P", "BWT"]
    early = metrics_of(made.top1[:1], [[0]], made.reference)
    assert early.missing[0].startswith("S, P, F and BWT compare checkpoints")


@pytest.mark.usefixtures("added")
def test_it_is_on_the_scoreboard(tmp_path: Path) -> None:
    made = computed()
    assert "BWT 12.50 made up, lower is better" in printed(matrix(made))
    file = tmp_path / "encoder.pth"
    _untrained(file)
    (target,) = open_targets([file], architecture=EncoderConfig(), family="cifar", size_px=None, out=None)
    grid = [
        Evaluated(
            target=target, path=file, evaluation=evaluation(settings={"lr": lr}, metrics=made.metrics), was_there=False
        )
        for lr in (0.3, 3.0)
    ]
    assert printed(summary(grid)).count("BWT ↓") == 2


def _untrained(file: Path) -> None:
    import torch

    from fastcssl.learn.nets import build_encoder

    torch.save(build_encoder(EncoderConfig(), 0, 32).state_dict(), file)


@pytest.mark.usefixtures("added")
def test_it_is_in_the_report(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    evaluated(run, top1=[[0.8, 0.5, 0.6], [0.6, 0.9, 0.7], [0.5, 0.6, 0.7]])
    found = report_runs([run])
    assert str(found.comparisons[0].rows[0].metrics["BWT"]) == "12.50"
    assert "BWT ↓" in printed(report_summary(found))
    page = found.page.read_text()
    assert "BWT ↓" in page and "BWT 12.50" in page and f"{ROW.description}. Lower is better." in page


def test_files_of_before_and_after_it_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = computed().save(tmp_path)
    monkeypatch.setitem(METRICS, ROW.name, ROW)
    older = load_evaluation(path)
    assert older.metrics.BWT is None and older.metrics.S is not None
    assert "BWT" not in printed(matrix(older))
    computed().save(tmp_path)
    monkeypatch.delitem(METRICS, ROW.name)
    ((_, newer),) = evaluations(tmp_path)
    assert newer == computed() and "BWT" not in newer.as_json()["metrics"]
    with pytest.raises(AttributeError):
        _ = newer.metrics.BWT
