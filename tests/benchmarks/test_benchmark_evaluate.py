"""The evaluation benchmark runs from a clean start and says what it promises. Speed itself is never tested here."""

import json
import math
from pathlib import Path

import pytest
from smokes import BENCHMARKS, smoke

KEYS = (
    "exact_side_by_side_vs_sequential",
    "exact_side_by_side_vs_bound",
    "cached_vs_exact_sequential",
    "cached_minus_exact_accuracy",
)


def test_evaluate_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "evaluate.jsonl"
    done = smoke("evaluate", "--smoke", "--device", "cpu", "--threads", 1, numbers=numbers, width=10_000)
    *rows, accuracy = done.lines
    assert json.loads(done.said.splitlines()[-1]) == {"summary": done.summary}
    for key in KEYS:
        assert math.isfinite(done.summary[key]), key
    names = ["side by side", "one at a time", "loader alone", "compute alone", "cached"]
    assert [row["name"] for row in rows] == names and all(row["round_seconds"][0] > 0 for row in rows)
    assert done.environment["encoder"] == "resnet18-w8"
    assert len(accuracy["accuracy"]["exact_top1"]) == len(accuracy["accuracy"]["cached_top1"]) == 2


def test_ratios_are_those_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import evaluate
    from timing import Case

    def case(*seconds: float) -> Case:
        return Case(name="", workers=1, num_items=1, num_bytes=0, run=lambda: 0.0, seconds=list(seconds))

    cases = {
        "side by side": case(2.0, 4.0, 2.0),
        "one at a time": case(6.0, 12.0, 5.0),
        "loader alone": case(1.0, 2.0, 1.0),
        "compute alone": case(0.8, 1.6, 0.9),
        "cached": case(3.0, 6.0, 2.5),
    }
    found = evaluate.summarize(cases, {"difference": [0.01, -0.03]}, on_gpu=False)
    assert found["exact_side_by_side_vs_sequential"] == pytest.approx(3.0)
    assert found["exact_side_by_side_vs_bound"] == pytest.approx(0.9)
    assert found["cached_vs_exact_sequential"] == pytest.approx(200.0)
    assert found["cached_minus_exact_accuracy"] == pytest.approx(-0.01)
    assert found["largest_cached_minus_exact_accuracy"] == -0.03
    assert evaluate.summarize(cases, {"difference": [0.0]}, on_gpu=True)["exact_side_by_side_vs_bound"] == 0.5
