"""The learning rate: numbers by hand, the linear rule, the corners of short and long warm-ups."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from fastcssl.learn.optim import OptimConfig, lr_at, lr_peak

CIFAR = OptimConfig(lr=0.6)


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (0, 0.003),
        (1, 0.003 + 0.597 / 9),
        (5, 0.003 + 5 * 0.597 / 9),
        (9, 0.6),
        (10, 0.6),
        (11, 0.6 * (1 + math.cos(math.pi / 490)) / 2),
        (255, 0.3),  # 245 of 490
        (173 + 1 / 3, 0.6 * (1 + math.cos(math.pi * 163 / 490)) / 2),  # within epoch 173
        (377.5, 0.6 * (1 + math.cos(math.pi * 367 / 490)) / 2),
        (499, 0.6 * math.sin(math.pi / 980) ** 2),  # 6.2e-6: the last epoch is not quite at min_lr
        (500, 0.0),
        (700, 0.0),
    ],
)
def test_warmup_cosine_by_epochs(epoch: float, expected: float) -> None:
    assert lr_at(CIFAR, 0.6, epoch, 500) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_warmup_cosine_by_steps_joins_the_epochs_values() -> None:
    by_step = replace(CIFAR, schedule_unit="step", min_lr=6e-4)
    by_epoch = replace(by_step, schedule_unit="epoch")
    for epoch in range(501):
        assert lr_at(by_step, 0.6, epoch, 500) == lr_at(by_epoch, 0.6, epoch, 500)
    assert lr_at(by_step, 0.6, 0.5, 500) == pytest.approx(0.003 + 0.5 * 0.597 / 9)
    assert lr_at(by_step, 0.6, 9.5, 500) == 0.6  # the line stops at the peak
    assert lr_at(by_step, 0.6, 132.5, 500) == pytest.approx(6e-4 + 0.5994 * (1 + math.sqrt(0.5)) / 2)  # a quarter
    assert lr_at(by_epoch, 0.6, 0.999, 500) == 0.003
    curve = [lr_at(by_step, 0.6, step / 7, 500) for step in range(3501)]
    assert max(abs(b - a) for a, b in pairwise(curve)) < 0.01  # no jumps
    assert curve[-1] == pytest.approx(6e-4)


def test_cosine_has_no_warmup() -> None:
    config = replace(CIFAR, schedule="cosine")
    assert lr_at(config, 0.4, 0, 400) == 0.4
    assert lr_at(config, 0.4, 100, 400) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert lr_at(config, 0.4, 200, 400) == pytest.approx(0.2)
    assert lr_at(config, 0.4, 400, 400) == pytest.approx(0, abs=1e-15)


def test_constant() -> None:
    config = replace(CIFAR, schedule="constant")
    assert [lr_at(config, 0.4, epoch, 5) for epoch in (0, 2.5, 5)] == [0.4] * 3


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_no_warmup_is_cosine(unit: str) -> None:
    config = replace(CIFAR, warmup_epochs=0, schedule_unit=unit)
    for epoch in (0, 0.5, 7, 20):
        assert lr_at(config, 0.6, epoch, 20) == lr_at(replace(config, schedule="cosine"), 0.6, epoch, 20)


def test_one_epoch_of_warmup() -> None:
    config = replace(CIFAR, warmup_epochs=1)
    assert [lr_at(config, 0.6, epoch, 21) for epoch in (0, 0.5, 1, 11)] == pytest.approx([0.003, 0.003, 0.6, 0.3])
    by_step = replace(config, schedule_unit="step")
    assert [lr_at(by_step, 0.6, epoch, 21) for epoch in (0, 0.5, 1)] == pytest.approx([0.003, 0.3015, 0.6])


def test_a_task_shorter_than_its_warmup_is_not_compressed() -> None:
    long = [lr_at(CIFAR, 0.6, epoch, 500) for epoch in range(10)]
    for num_epochs in (1, 3, 9, 10):
        assert [lr_at(CIFAR, 0.6, epoch, num_epochs) for epoch in range(num_epochs)] == long[:num_epochs]
    assert lr_at(CIFAR, 0.6, 10, 10) == 0.6
    assert lr_at(CIFAR, 0.6, 50, 3) == long[3]
    assert lr_at(CIFAR, 0.6, 10, 11) == 0.6 and lr_at(CIFAR, 0.6, 11, 11) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_the_peak_is_the_highest(unit: str) -> None:
    low = 0.001  # below the warm-up's start and the cosine's end
    config = replace(CIFAR, min_lr=0.002, schedule_unit=unit)
    assert {lr_at(config, low, epoch / 3, 30) for epoch in range(91)} == {low}
    for peak in (0.1 + 0.2, 0.7, 0.123456789):
        assert max(lr_at(replace(CIFAR, schedule_unit=unit), peak, epoch / 3, 30) for epoch in range(91)) == peak


def test_linear_rule() -> None:
    assert lr_peak(CIFAR, 256) == 0.6
    assert lr_peak(CIFAR, 1024) == pytest.approx(2.4)
    assert lr_peak(CIFAR, 64) == pytest.approx(0.15)
    assert lr_at(CIFAR, lr_peak(CIFAR, 1024), 0, 500) == 0.003  # not scaled
    assert lr_at(replace(CIFAR, min_lr=6e-4), lr_peak(CIFAR, 1024), 500, 500) == pytest.approx(6e-4)


def test_impossible_moments_are_refused() -> None:
    for epoch, num_epochs in ((-1, 5), (math.nan, 5), (math.inf, 5), (0, 0)):
        with pytest.raises(ValueError, match=f"epoch is {epoch} of {num_epochs}"):
            lr_at(CIFAR, 0.6, epoch, num_epochs)
    with pytest.raises(ValueError, match="batch_size is 0"):
        lr_peak(CIFAR, 0)
