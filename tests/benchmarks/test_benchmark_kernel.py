"""The kernel benchmark runs from a clean start, says what it promises, measures what it says. Speed is not tested."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from smokes import BENCHMARKS, smoke

RATIOS = [
    f"vs_{peer}_n{rows}_d128_{threads}t"
    for threads in (1, 2)
    for rows in (256, 512)
    for peer in ("eager", "flash", "chunked", "two_gemms")
]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_kernel_benchmark(tmp_path: Path) -> None:
    done = smoke("kernel", "--smoke", numbers=tmp_path / "kernel.jsonl")
    (*rows, details), summary = done.lines, done.summary
    assert list(summary) == [*RATIOS, "memory_vs_eager_n256_d128", "max_error_vs_budget"]
    for key, value in summary.items():
        assert value is None if key.endswith("2t") else math.isfinite(value) and value > 0, key
    assert summary["max_error_vs_budget"] <= 1
    assert details["details"]["growth"]["ours"]["memory_mb_from_to"]
    by_part: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    assert set(by_part) >= {"headline", "grid", "growth", "errors", "step"}
    assert [row["name"] for row in by_part["headline"][:6]] == "moco logsumexp chunked flash gemms ours".split()
    for row in by_part["headline"]:
        assert row["failure"] is None, row
        assert 0 < row["seconds_best"] <= row["seconds_median"]
        if row["name"] != "gemms":
            assert max(row["errors"]) < 1e-4 and row["extra_mb"] >= 0
    (step,) = by_part["step"]
    assert step["largest_difference"] < 1e-4 * step["loss"]
    assert all(line["label"] == "predicted, never measured" for line in by_part.get("model", []))


def group(part: str, shape: tuple[int, int, int, int], seconds: dict[str, list[float]], **more: Any) -> Any:
    from kernel import Group
    from kernel_process import Shape
    from timing import Case

    cases = {
        name: Case(name=name, workers=1, num_items=1, num_bytes=0, run=lambda: 0.0, seconds=each)
        for name, each in seconds.items()
    }
    return Group(part=part, shape=Shape(*shape), cases=cases, **more)  # type: ignore[arg-type]


def bench(*groups: Any, **more: Any) -> Any:
    scale = SimpleNamespace(bank_size=64)
    return SimpleNamespace(
        **({"groups": groups, "accuracy": [], "step": {}, "notes": [], "scale": scale, "sgemm": {1: 90.0}} | more)
    )


def test_ratios_are_medians_of_rounds() -> None:
    from kernel_tables import summarize

    times = {"ours": [1.0, 1.0, 2.0], "moco": [4.0, 6.0, 6.0], "flash": [2.0, 1.0, 4.0], "gemms": [0.5, 0.75, 2.0]}
    found = group("headline", (256, 128, 64, 1), times, memory_mb={"ours": 1.0, "moco": 200.0})
    accuracy = [{"of_budget": 0.25}, {"of_budget": 0.5}]
    summary, details = summarize(bench(found, accuracy=accuracy))
    assert summary["vs_eager_n256_d128_1t"] == 4.0
    assert summary["vs_flash_n256_d128_1t"] == 2.0
    assert summary["vs_two_gemms_n256_d128_1t"] == 0.75
    assert summary["vs_chunked_n256_d128_1t"] is None and summary["vs_eager_n512_d128_2t"] is None
    assert summary["memory_vs_eager_n256_d128"] == 1 / 200
    assert summary["max_error_vs_budget"] == 0.5
    assert details["step"] is None


def test_growth_is_a_power_of_the_bank() -> None:
    from kernel_tables import growth

    groups = [
        group("growth", (256, 128, size, 1), {"ours": [1e-6 * size], "moco": [1e-9 * size**2]}, memory_mb={"ours": 2.0})
        for size in (4096, 16_384, 65_536)
    ]
    found = growth(bench(*groups))
    assert found["ours"]["time_exponent"] == pytest.approx(1)
    assert found["moco"]["time_exponent"] == pytest.approx(2)
    assert found["ours"]["memory_mb_from_to"] == [2.0, 2.0] and found["ours"]["bank_size_from_to"] == [4096, 65_536]


def test_aims_take_the_worst() -> None:
    from kernel_tables import Aim

    summary = {"vs_eager_n256_d128_1t": 5.0, "vs_eager_n512_d128_2t": 3.0, "vs_eager_x": None, "other": 0.0}
    aim = Aim("vs_eager_", "", 4, ".2f")
    assert aim.value(summary) == 3.0 and not aim.is_met(3.0) and aim.is_met(4.0)
    assert Aim("vs_flash_", "", 1, ".2f").value(summary) is None


def _allocate(num_mb: int) -> float:
    from kernel_process import extra_mb

    return extra_mb(lambda: torch.ones(num_mb * 250_000).sum())


@pytest.mark.parametrize("num_mb", [0, 8, 200])
def test_memory_is_what_a_call_takes(num_mb: int) -> None:
    """Also after memory of that size was freed before: nothing hides in the allocator."""
    from kernel_process import in_new_process

    assert in_new_process(_allocate, num_mb) == pytest.approx(num_mb, abs=1.0)
    assert in_new_process(_allocate_after_freeing, num_mb) == pytest.approx(num_mb, abs=1.0)


def _allocate_after_freeing(num_mb: int) -> float:
    for _ in range(3):
        torch.ones((num_mb + 1) * 250_000).sum()
    return _allocate(num_mb)


def test_the_released_way_is_the_same_loss() -> None:
    """Three steps of each, from the same weights: the terms agree, and both write the same keys."""
    from kernel_step import StepShape, Training

    shape = StepShape(8, 32, "resnet18-w8", 16, 1)
    ours, released = (Training(way, shape, seed=1) for way in ("ours", "released"))  # type: ignore[arg-type]
    for _ in range(3):
        mine, theirs = ours.step(), released.step()
        assert mine.keys() == theirs.keys() == {"plasticity", "stability"}
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-4)
    for a, b in zip(ours.banks(), released.banks(), strict=True):
        assert int(a.pointer) == int(b.pointer) == 24
        torch.testing.assert_close(a.rows_KD, b.rows_KD, atol=1e-3, rtol=0)


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_process

    def broken(_given: Any) -> Any:
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(kernel_process.peers, "compiled", lambda: broken)
    about = kernel_process.begin(kernel_process.Shape(4, 8, 16, 1), ("compile", "ours"), 0)
    assert about == {"compile": "failed: no compiler", "ours": ""}
    assert kernel_process.measure("ours").seconds > 0
