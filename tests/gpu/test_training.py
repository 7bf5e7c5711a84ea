"""A short run on a card against the same run on the CPU: the same first loss, and the same losses in distribution."""

import dataclasses
import statistics
from pathlib import Path

import pytest
from small_runs import losses, prepared, run, tiny

pytestmark = pytest.mark.gpu

SEEDS = (5, 6, 7)


def curve(device: str, seed: int, data: Path, out: Path, precision: str = "fp32") -> list[float]:
    """The summed terms of each step."""
    found = tiny(seed=seed, precision=precision)
    config = dataclasses.replace(found.config, run=dataclasses.replace(found.config.run, device=device))
    run(dataclasses.replace(found, config=config), data, out)
    return [sum(terms.values()) for _, terms in losses(out)]


def test_a_run_is_the_cpus_in_distribution(device: str, tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    ours = [curve(device, seed, data, tmp_path / f"card{seed}") for seed in SEEDS]
    theirs = [curve("cpu", seed, data, tmp_path / f"cpu{seed}") for seed in SEEDS]
    for mine, its in zip(ours, theirs, strict=True):
        assert len(mine) == len(its)
        assert mine[0] == pytest.approx(its[0], rel=2e-3)  # same weights, same views, one forward pass
    last = [[statistics.fmean(each[-4:]) for each in side] for side in (ours, theirs)]
    spread = max(statistics.stdev(side) for side in last)
    assert statistics.fmean(last[0]) == pytest.approx(statistics.fmean(last[1]), abs=4 * spread + 0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision: str, card: str, tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    mixed = curve(card, 5, data, tmp_path / "mixed", precision)
    plain = curve(card, 5, data, tmp_path / "plain")
    assert mixed[0] == pytest.approx(plain[0], rel=3e-2)
    assert statistics.fmean(mixed[-4:]) == pytest.approx(statistics.fmean(plain[-4:]), rel=0.15)
