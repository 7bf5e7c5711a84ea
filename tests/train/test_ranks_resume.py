"""Two ranks that stop in the middle of an epoch report the same means when they resume as without the interruption."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from processes import run as on_ranks
from small_runs import lines, losses, prepared, run, tiny
from torch import Tensor

from fastcssl.distributed.world import World
from fastcssl.runs.checkpoint import load
from fastcssl.train.watch import Decision, Watch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("resume") / "data")


def training_task(world: World, data: Path, out: Path, stop_at: int | None) -> None:
    decide = Watch.decide

    def decided(watch: Watch, step: int, terms: dict[str, Tensor], *, last: bool) -> Decision:
        return Decision.STOP if step == stop_at else decide(watch, step, terms, last=last)

    with mock.patch.object(Watch, "decide", decided):
        run(tiny(), data, out, world=world)


def test_the_sums_of_an_epoch_are_those_of_every_rank(tmp_path: Path, data: Path) -> None:
    on_ranks(2, training_task, data, tmp_path / "whole", None)
    on_ranks(2, training_task, data, tmp_path / "run", 3)
    sums = load(tmp_path / "run/checkpoints/step-00000003.pt")["sums"]["loss"]
    assert sums.shape == (2,) and sums[0] != sums[1], "each rank sees its own images"
    on_ranks(2, training_task, data, tmp_path / "run", None)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    for kind in ("epoch", "task"):
        means = [(line["step"], line["loss"]) for line in lines(tmp_path / "run", kind)]
        assert means == [(line["step"], line["loss"]) for line in lines(tmp_path / "whole", kind)]


def test_one_rank_continues_with_the_mean_of_two_and_with_a_scalar_of_earlier_versions(
    tmp_path: Path, data: Path
) -> None:
    on_ranks(2, training_task, data, tmp_path / "run", 3)
    path = tmp_path / "run/checkpoints/step-00000003.pt"
    means = load(path)["sums"]["loss"].mean()
    for saved in (load(path)["sums"], {"loss": means}):
        found = _loaded(saved)
        assert found.ndim == 0 and torch.equal(found, means)


def _loaded(sums: dict[str, Tensor]) -> Tensor:
    from fastcssl.train.meter import Meter

    meter = Meter.__new__(Meter)
    meter._run, meter._sums = mock.Mock(world=World()), {}
    meter.rates, meter.stages = mock.Mock(), mock.Mock()
    meter.load({"rates": [0, 0.0, 0.0], "stages": {}, "sums": sums})
    return meter._sums["loss"]
