"""The quality and sweep benchmarks run from a clean start, go on where they stopped, and count what they say."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from smokes import BENCHMARKS, ORIGIN, read_lines, smoke


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    found: ModuleType = quality
    return found


def test_quality_goes_on_where_it_stopped(tmp_path: Path) -> None:
    numbers = tmp_path / "quality.jsonl"
    args = ("--study", "smoke", "--work", tmp_path / "work", "--json", numbers)
    smoke("quality", *args, width=999)
    lines = read_lines(numbers)
    assert [(line["strategy"], line["seed"]) for line in lines] == [
        (strategy, seed) for seed in (5, 6) for strategy in ("joint", "pnr", "finetune")
    ]
    for line in lines:
        assert line["environment"].keys() >= ORIGIN
        num_rows = 1 if line["strategy"] == "joint" else 5
        for probe in ("linear", "knn"):
            table = line[f"{probe}_t_i"]
            assert len(table) == num_rows and all(len(row) == 5 for row in table)
            assert all(0 <= value <= 1 for row in table for value in row)
        if line["strategy"] == "finetune":  # it goes on from the other's first task
            assert line["knn_t_i"][0] == lines[1 if line["seed"] == 5 else 4]["knn_t_i"][0]
    numbers.write_text("".join(json.dumps(line) + "\n" for line in lines[:5]))
    said = smoke("quality", *args, width=999).said
    again = read_lines(numbers)
    assert again[:5] == lines[:5] and again[5]["knn_t_i"] == lines[5]["knn_t_i"]
    assert "finetune" in said and "±" in said


def test_measures_against_numbers_by_hand(quality: ModuleType) -> None:
    table = [[0.5, 0.1, 0.0], [0.4, 0.6, 0.1], [0.2, 0.5, 0.8]]
    assert quality.average(table) == pytest.approx(0.5)
    assert quality.forgetting(table) == pytest.approx((0.3 + 0.1) / 2)
    assert quality.after_learning(table) == pytest.approx((-0.3 - 0.1) / 2)
    assert quality.forgetting(table[-1:]) is None
    run = {"study": "smoke", "strategy": "pnr", "linear_t_i": table, "knn_t_i": table}
    other = {**run, "seed": 6, "linear_t_i": [*table[:2], [0.2, 0.5, 0.2]]}
    found = quality.summary([{**run, "seed": 5}, other])["smoke"]["pnr"]
    assert found["seeds"] == [5, 6]
    assert found["linear A"] == pytest.approx((40.0, 200**0.5))


def test_sweep(tmp_path: Path) -> None:
    done = smoke("sweep", "--only", "vicreg/lessforget", numbers=tmp_path / "sweep.jsonl")
    (line,) = done.lines
    assert (line["method"], line["strategy"], line["failure"]) == ("vicreg", "lessforget", None)
    assert len(line["loss_by_task"]) == 2 and set(line["terms"]) > {"loss"}
    assert done.summary == {"num_combinations": 1, "num_failed": 0}
    assert "1 of 1 combinations trained" in done.said
