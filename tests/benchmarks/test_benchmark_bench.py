"""`make bench`: goes on past a benchmark that fails, shows what was missed, draws what it has. Speed is not tested."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from smokes import BENCHMARKS, ORIGIN, read_lines, smoke

STORED = BENCHMARKS / "results"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_one_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    """prep has no photos; train then runs, and is told and drawn. An older file of prep's is left as it was."""
    out = tmp_path / "results"
    out.mkdir()
    (out / "prep-smoke.jsonl").write_text("as it was")
    args = ("--smoke", "--only", "prep,train", "--images", tmp_path / "nowhere", "--out", out, "--threads", 1)
    done = smoke("bench", *args, status=1, width=120)
    said = " ".join(done.said.split())  # long paths are wrapped
    assert "prep failed: " in said and "holds no JPEG" in said
    assert (out / "prep-smoke.jsonl").read_text() == "as it was"
    assert "waits for data" in done.said and "writing shards" not in done.said
    assert {path.name for path in out.iterdir()} == {
        "prep-smoke.jsonl", "train-smoke.jsonl", "train-smoke.png", "bench-smoke.jsonl",
    }  # fmt: skip
    *rows, origin, last = read_lines(out / "bench-smoke.jsonl")
    assert {row["script"] for row in rows} == {"train"} and rows[0]["results"] == "train-smoke.jsonl"
    assert 0 < rows[0]["value"] < 1
    assert origin["environment"].keys() >= {*ORIGIN, "seed", "seconds"}
    assert [*last["summary"]["failures"]] == ["prep"]


def test_stored_results_are_told_and_drawn(tmp_path: Path) -> None:
    """Every picture is for a page's width at twice the resolution, small, and beside its numbers."""
    for path in STORED.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    done = smoke("bench", "--charts-only", "--out", tmp_path, width=120)
    assert "native, full policy, against torchvision on PIL images" in done.said
    assert "✓ met" in done.said and "aims met" in done.said
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert drawn >= {"loader", "loader-quick", "kernel", "train-quick"}
    for path in tmp_path.glob("*.png"):
        assert path.stat().st_size < 150_000
        with Image.open(path) as image:
            assert image.width == 1440 and image.height < 2000
            assert len(image.getcolors() or []) > 8
    assert {path.name for path in STORED.glob("*.jsonl")} == {path.name for path in tmp_path.glob("*.jsonl")}


def results(tmp_path: Path, name: str, lines: list[dict[str, Any]]) -> Any:
    from charts import Results

    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Results.read(path)


def test_ceilings_are_those_of_the_run(tmp_path: Path) -> None:
    from bench_table import loader_rows

    def line(section: str, contender: str, *seconds: float) -> dict[str, Any]:
        about = {"section": section, "contender": contender, "workers": 1, "num_images": 10}
        return {**about, "round_seconds": list(seconds), "images_per_s_median": 1.0}

    lines = [line("full", "decode", 1.0, 2.0, 1.0), line("full", "pil", 30.0, 40.0, 20.0), line("full", "dali")]
    summary = {"native_full_vs_torchvision_pil_1t": 7.0, "native_task_switch_ms": 49.0}
    found = {row.text: row for row in loader_rows(results(tmp_path, "loader", [*lines, {"summary": summary}]))}
    pil = found["native, full policy, against torchvision on PIL images"]
    assert (pil.value, pil.ceiling, pil.aim, pil.verdict) == (7.0, 20.0, 8, "✗ missed")
    assert found["native, another task, milliseconds lost"].verdict == "✓ met"
    dali = found["native, full policy, against DALI on the CPU"]
    assert dali.ceiling is None and dali.is_met is None and dali.verdict == "not measured"
    assert found["native, two threads against one"].aim is None


def test_kernel_is_told_by_its_worst_shape(tmp_path: Path) -> None:
    from bench_table import kernel_rows

    summary = {"vs_eager_n256_d128_1t": 6.0, "vs_eager_n512_d128_1t": 5.0, "vs_two_gemms_n256_d128_1t": 1.0}
    summary |= {"vs_two_gemms_n512_d128_1t": 0.8, "memory_vs_eager_n256_d128": 0.001}
    details = {"growth": {"ours": {"time_exponent": 1.2, "memory_mb_from_to": [0.5, 0.75]}}, "step": None}
    rows = list(kernel_rows(results(tmp_path, "kernel", [{"details": details}, {"summary": summary}])))
    eager, products = rows[0], rows[3]
    assert (eager.value, eager.ceiling, eager.verdict) == (5.0, 6.25, "✓ met")
    assert (products.value, products.verdict) == (0.8, "✗ missed")
    by_text = {row.text: row.verdict for row in rows}
    assert by_text["its time grows as K to the power of"] == "✗ missed"
    assert by_text["its memory grows with K by"] == "✓ met"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0303, "%", "3.0 %"),
        (0.00078, "%", "0.08 %"),
        (1.0423, "%", "104 %"),
        (1602.4, "x", "1,602x"),
        (11.57, "x", "11.6x"),
        (-0.04, "MB", "0.0 MB"),
        (0.005, "points", "+0.5 pt"),
        (None, "x", ""),
    ],
)
def test_numbers_as_shown(value: float | None, unit: Any, text: str) -> None:
    from bench_table import shown

    assert shown(value, unit) == text


def test_the_time_left_follows_the_pace() -> None:
    from bench import SECONDS, Forecast

    forecast = Forecast(("loader", "kernel", "prep"))
    assert forecast.left(10) == sum(SECONDS[name] for name in ("loader", "kernel", "prep")) - 10
    forecast.took["loader"] = 2 * SECONDS["loader"]
    assert forecast.left(0) == 2 * (SECONDS["kernel"] + SECONDS["prep"])
    assert forecast.left(1e6) == 2 * SECONDS["prep"]
    forecast.took |= {"kernel": 1.0, "prep": 1.0}
    assert forecast.left(0) == 0


def test_an_unknown_benchmark_is_a_sentence(tmp_path: Path) -> None:
    from bench import Options

    with pytest.raises(SystemExit, match="--only disk: the benchmarks are loader, kernel, prep, evaluate, train"):
        Options(only="loader,disk", out=tmp_path).scripts()
    assert Options(images=Path("here"), cifar=Path("there")).words("train") == ["--quick"]
    assert Options(threads=1).words("train") == ["--quick", "--threads", "1"]
    assert Options(images=Path("here"), smoke=True).words("prep") == ["--smoke", "--images", "here"]
