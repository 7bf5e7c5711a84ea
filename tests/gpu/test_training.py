"""Short runs on a card: as on the CPU in distribution, and no step of theirs waits for the card."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_runs import losses, prepared, run, tiny

from fastcssl.data.loader import Batch
from fastcssl.train import loop
from fastcssl.train.build import Run
from fastcssl.train.state import TaskState

pytestmark = pytest.mark.gpu

SEEDS = (5, 6, 7)


def curve(device: str, seed: int, data: Path, out: Path, precision: str = "fp32") -> list[float]:
    """The summed terms of each step."""
    run(tiny(seed=seed, precision=precision), data, out, device=torch.device(device))
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


@contextmanager
def nothing_waits(device: str) -> Iterator[None]:
    """Raises inside the block where the host would wait for the card. On the CPU, in a rehearsal, it does nothing."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("method", "strategy"), [("moco", "pnr"), ("byol", "pnr"), ("simclr", "cassle")])
def test_no_step_waits_for_the_card(
    method: str, strategy: str, precision: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps of the trainer, in the first task and in the second, in which the strategy acts."""
    real, steps = loop.train_step, {0: 0, 1: 0}

    def watched_step(run: Run, task: TaskState, batch: Batch) -> dict[str, torch.Tensor]:
        steps[task.index] += 1
        if steps[task.index] <= 2:  # cuDNN and the allocator settle
            return real(run, task, batch)
        with nothing_waits(device):
            return real(run, task, batch)

    monkeypatch.setattr(loop, "train_step", watched_step)
    found = tiny(method, strategy, precision=precision)
    run(found, prepared(tmp_path / "data"), tmp_path / "run", device=torch.device(device))
    assert min(steps.values()) > 2
