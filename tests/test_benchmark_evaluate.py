"""The evaluation benchmark runs from a clean start and says what it promises. Speed itself is never tested here."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KEYS = (
    "exact_side_by_side_vs_sequential",
    "exact_side_by_side_vs_bound",
    "cached_vs_exact_sequential",
    "cached_minus_exact_accuracy",
)


def test_evaluate_benchmark(tmp_path: Path) -> None:
    numbers = tmp_path / "evaluate.jsonl"
    command = [BENCHMARKS / "evaluate.py", "--smoke", "--device", "cpu", "--threads", "1", "--json", numbers]
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    *rows, accuracy, environment, last = map(json.loads, numbers.read_text().splitlines())
    assert json.loads(done.stdout.splitlines()[-1]) == last
    for key in KEYS:
        assert math.isfinite(last["summary"][key]), key
    names = ["side by side", "one at a time", "loader alone", "compute alone", "cached"]
    assert [row["name"] for row in rows] == names and all(row["round_seconds"][0] > 0 for row in rows)
    assert {"commit", "versions", "cpu", "cores", "seed", "encoder"} <= environment["environment"].keys()
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
