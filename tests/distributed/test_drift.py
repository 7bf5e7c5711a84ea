"""Two ranks drift from one process only as one process drifts from itself when its sums have another order.

In float64 they agree to rounding over many steps, with every optimiser: there is no error of scale. In float32 the
distance grows quickly, because rounding changes the sign of activations near zero, and ReLU turns that into a jump of
the gradient. The same batch in reversed order, on one process, drifts as far.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import Lab
from processes import run
from small_runs import prepared
from torch import Tensor

from fastcssl.distributed.world import World
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.methods import BankConfig
from fastcssl.learn.nets import build_encoder
from fastcssl.learn.optim import OptimConfig, OptimizerName, build_optimizer, set_lr

LEARNING_RATES: dict[OptimizerName, float] = {"sgd": 0.05, "lars": 0.3, "adamw": 0.003}
NUM_STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("drift") / "data")


def walked(
    world: World, data: Path, name: OptimizerName, dtype: torch.dtype, *, num_steps: int = NUM_STEPS, flip: bool = False
) -> list[tuple[float, Tensor]]:
    """Trains a small ResNet. Returns the loss before and the weights after each step."""
    torch.set_num_threads(1)
    encoder = build_encoder(EncoderConfig(name="resnet18-w8", stem="cifar"), 3)
    # A multiple of the batch, so that a reversed batch replaces the same keys.
    settings: dict[str, Any] = {"bank": BankConfig(size=48)}
    lab = Lab("moco", "finetune", data, world, first_task_steps=0, method_config=settings, encoder=encoder, dtype=dtype)
    optimizer = build_optimizer(lab.step.groups(), OptimConfig(name=name))
    set_lr(optimizer, LEARNING_RATES[name])
    found = []
    for step in range(num_steps):
        batch = next(lab.inputs)
        if flip:
            views, label, id = tuple(view.flip(0) for view in batch.views), batch.label.flip(0), batch.id.flip(0)
            batch = dataclasses.replace(batch, views=views, label=label, id=id)
        terms = lab.backward(batch)
        optimizer.step()
        lab.method.after_step(step, num_steps)
        lab.strategy.after_step(lab.method)
        weights = torch.cat([p.detach().flatten().double() for p in lab.parameters().values()])
        found.append((float(torch.stack(list(terms.values())).sum()), weights))
    lab.close()
    return found


def drift(one: list[tuple[float, Tensor]], other: list[tuple[float, Tensor]]) -> list[tuple[float, float]]:
    """Returns for each step the distance of the losses, and that of the weights relative to their norm."""
    return [
        (abs(a - b), float((weights - others).norm() / weights.norm()))
        for (a, weights), (b, others) in zip(one, other, strict=True)
    ]


def of_ranks(found: list[list[tuple[float, Tensor]]]) -> list[tuple[float, Tensor]]:
    """Returns the mean losses of the ranks, and the weights, which they share."""
    return [(sum(loss for loss, _ in step) / len(step), step[0][1]) for step in zip(*found, strict=True)]


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_two_ranks_stay_with_one_in_float64(name: OptimizerName, data: Path) -> None:
    alone = walked(World(), data, name, torch.float64)
    assert alone[0][1].dist(alone[-1][1]) > 0.01 * alone[0][1].norm(), "nothing was learnt, so nothing can drift"
    both = of_ranks(run(2, walked, data, name, torch.float64))
    assert max(loss for loss, _ in drift(alone, both)) < 1e-11
    assert max(weights for _, weights in drift(alone, both)) < 1e-11


def second_gradient(world: World, data: Path, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of the second batch. The first one only fills the bank."""
    torch.set_num_threads(1)
    encoder = build_encoder(EncoderConfig(name="resnet18-w8", stem="cifar"), 3)
    lab = Lab("moco", "finetune", data, world, first_task_steps=0, encoder=encoder, dtype=dtype)
    lab.train()
    lab.backward()
    found = torch.cat([p.grad.flatten().double() for p in lab.parameters().values() if p.grad is not None])
    lab.close()
    return found


def test_a_gradient_in_float32_is_as_exact_on_two_ranks(data: Path) -> None:
    exact = second_gradient(World(), data, torch.float64)
    for found in (second_gradient(World(), data, torch.float32), *run(2, second_gradient, data, torch.float32)):
        assert (found - exact).norm() < 1e-4 * exact.norm()
