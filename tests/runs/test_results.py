"""Result files: whole or refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_results import evaluation

from fastcssl.runs.results import (
    ResultError,
    evaluations,
    load_evaluation,
    result_name,
)


def test_round_trip(tmp_path: Path) -> None:
    made = evaluation()
    path = made.save(tmp_path)
    assert path.parent == tmp_path / "evaluations" and path.name.startswith("linear-all-")
    assert load_evaluation(path) == made
    assert list(evaluations(tmp_path)) == [(path, made)]
    assert not list(path.parent.glob("*.part"))


def test_the_name_tells_evaluations_apart() -> None:
    names = {
        result_name("linear", "all", {"lr": 0.3}, "ab"),
        result_name("linear", "all", {"lr": 3.0}, "ab"),
        result_name("linear", "all", {"lr": 0.3}, "cd"),
        result_name("linear", "downstream:../x y", {"lr": 0.3}, "ab"),
        result_name("knn", "all", {"lr": 0.3}, "ab"),
    }
    assert len(names) == 5 and not any("/" in name or " " in name for name in names)
    assert result_name("linear", "all", {"a": 1, "b": 2}, "") == result_name("linear", "all", {"b": 2, "a": 1}, "")


def test_a_file_without_chance_still_opens(tmp_path: Path) -> None:
    path = evaluation().save(tmp_path)
    content = json.loads(path.read_text())
    del content["reference"]["chance"]
    path.write_text(json.dumps(content))
    assert load_evaluation(path) == evaluation()


def test_a_half_written_file(tmp_path: Path) -> None:
    path = evaluation().save(tmp_path)
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ResultError, match="not valid JSON: it is half-written or damaged"):
            list(evaluations(tmp_path))


@pytest.mark.parametrize("content", [{}, [], 3, {"format": 2}, {"schema": 1}])
def test_a_foreign_file(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match="is not a result that this version of fastcssl-eval can read"):
        load_evaluation(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top1": [[0.5, 0.25]]}, "top1 is not a table of 2 checkpoints and 2 columns"),
        ({"top5": [[0.5], [0.2]]}, "top5 is not a table"),
        ({"top1": [[0.5, 25.0], [0.5, 0.75]]}, "top1 holds numbers outside 0..1"),
        ({"num_val": [4]}, "do not fit"),
        ({"scope": "some"}, "not a scope"),
        ({"probe": "nonsense"}, "is not a valid value"),
        ({"overall_top1": "x"}, "is not a valid value"),
        ({"extra": 1}, "unknown"),
        ({"reference": {"ft": [0.5], "random": None}}, "a reference has 1 values"),
        ({"metrics": {"A": [0.5], "S": None, "P": None, "F": None, "missing": []}}, "metrics"),
        ({"metrics": {"S": None, "missing": []}}, "the key 'A' is missing"),
        ({"metrics": {"A": [0.5, 0.5], "S": "x", "missing": []}}, "is not a valid value"),
        ({"metrics": 3}, "expected an object"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(evaluation().as_json() | change))
    with pytest.raises(ResultError, match=says):
        load_evaluation(path)


def test_a_missing_key_and_numbers_that_are_none(tmp_path: Path) -> None:
    content = evaluation().as_json()
    del content["seconds"]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match="'seconds' is missing"):
        load_evaluation(path)
    with pytest.raises(ResultError, match=r"holds numbers outside 0\.\.1\."):
        evaluation(top1=[[float("nan"), 0.1], [0.5, 0.75]]).save(tmp_path)
