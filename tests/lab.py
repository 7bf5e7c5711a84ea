"""A small bench for any method under any strategy: a tiny network, prepared data for replay, float64 unless asked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import with_size
from fastcssl.distributed.world import World
from fastcssl.learn import methods, strategies
from fastcssl.learn.memory import Bank
from fastcssl.learn.methods import BankConfig, Inputs, Method, MethodConfig, Setting
from fastcssl.learn.nets import seeded
from fastcssl.learn.step import Step
from fastcssl.learn.strategies import CurrentTask, Distilling, Strategy

BATCH, SIZE_PX, NUM_STEPS = 16, 12, 20
SMALL = {"hidden": 16, "dim": 8, "predictor_hidden": 16, "bank": BankConfig(size=40)}  # 40: no multiple of the batch


def small(config: MethodConfig) -> MethodConfig:
    present = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{key: value for key, value in SMALL.items() if key in present})


def small_encoder() -> nn.Module:
    """Convolutions and BatchNorm, as a ResNet has them, and quick."""
    with seeded(3, "small encoder"):
        layers = []
        for inputs, outputs in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network.num_features = 16  # type: ignore[assignment]
    return network


def as_float64(method: Method) -> None:
    method.double()
    for item in method.copies.values():
        if isinstance(item, Bank):
            item.rows_KD = item.rows_KD.double()
        else:
            item.module.double()


def batches(rank: int = 0, size: int = 1, *, seed: int = 0) -> Iterator[Inputs]:
    """This rank's rows of an endless sequence of global batches. Samples look like their label, so that it matters."""
    generator = torch.Generator().manual_seed(seed)
    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    looks = torch.randn(4, 3, SIZE_PX, SIZE_PX, generator=generator, dtype=torch.float64)
    while True:
        label = torch.randint(4, (BATCH,), generator=generator)
        views = tuple(
            (looks[label] + torch.randn(BATCH, 3, SIZE_PX, SIZE_PX, generator=generator, dtype=torch.float64))[rows]
            for _ in range(2)
        )
        yield Inputs(views=views, label=label[rows], id=torch.arange(BATCH)[rows])


class Lab:
    """One process's method and strategy, walked through the end of a first task into the second."""

    def __init__(
        self,
        method: str,
        strategy: str,
        data: Path,
        world: World | None = None,
        *,
        first_task_steps: int = 2,
        method_config: dict[str, Any] | None = None,
        strategy_config: dict[str, Any] | None = None,
        encoder: nn.Module | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.world = world or World()
        setting = Setting(world=self.world, seed=3)
        config = dataclasses.replace(small(methods.find(method).Config()), **(method_config or {}))
        self.method: Method = methods.build(config, encoder or small_encoder(), setting)
        self.dtype = dtype
        if dtype == torch.float64:
            as_float64(self.method)
        own = strategies.find(strategy).Config(**(strategy_config or {}))
        self.strategy: Strategy = strategies.build(own, setting)
        if isinstance(self.strategy, Distilling):
            self.strategy.predictor_hidden = SMALL["predictor_hidden"]  # plain descent diverges on VICReg's at 2048
        views = with_size(policy("pnr-simclr-cifar"), SIZE_PX)
        self.loader = Loader(
            Prepared.open(data), LoaderConfig(policy=views, batch_size=BATCH, seed=3, num_threads=1), self.world
        )
        self.inputs = batches(self.world.rank, self.world.size)
        self.num_steps = 0
        self.begin(0)
        for _ in range(first_task_steps):
            self.train()
        if first_task_steps:
            self.strategy.end_task(self.task(0), self.method)
            self.begin(1)

    def task(self, index: int) -> CurrentTask:
        return CurrentTask(index=index, tasks=(index,), earlier=tuple(range(index)), open=self.loader.open)

    def begin(self, index: int) -> None:
        self.strategy.begin_task(self.task(index), self.method)
        self.step = Step(self.method, self.strategy)
        self.step.train()
        self.wrapped: Any = self.step
        if self.world.size > 1:
            self.wrapped = DistributedDataParallel(self.step, forward_sync_buffers=False)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.step.named_parameters() if p.requires_grad}

    def backward(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Gradients of the next batch."""
        self.step.zero_grad()
        inputs = inputs or next(self.inputs)
        inputs = dataclasses.replace(inputs, views=tuple(view.to(self.dtype) for view in inputs.views))
        terms: dict[str, Tensor] = self.wrapped(inputs)
        torch.stack(list(terms.values())).sum().backward()
        return {name: value.detach() for name, value in terms.items()}

    def train(self) -> dict[str, Tensor]:
        """One plain step of gradient descent."""
        terms = self.backward()
        with torch.no_grad():
            for p in self.parameters().values():
                assert p.grad is not None
                p -= 0.05 * p.grad
        self.method.after_step(self.num_steps, NUM_STEPS)
        self.strategy.after_step(self.method)
        self.num_steps += 1
        return terms

    def banks(self) -> dict[str, Tensor]:
        found = {"method": self.method.banks, "strategy": self.strategy.banks}
        return {f"{whose}{bank.view}": bank.rows_KD.clone() for whose, banks in found.items() for bank in banks}

    def state(self) -> dict[str, Any]:
        """What must be put back to go on as if nothing had happened."""
        return {
            "method": {k: v.clone() for k, v in self.method.state_dict().items()},
            "method_copies": {k: _cloned(c.state_dict()) for k, c in self.method.copies.items()},
            "strategy": {k: v.clone() for k, v in self.strategy.state_dict().items()},
            "strategy_copies": {k: _cloned(c.state_dict()) for k, c in self.strategy.copies.items()},
        }

    def close(self) -> None:
        self.loader.close()


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def followed(
    world: World, method: str, strategy: str, data: Path, settings: dict[str, Any], num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    """In any process: the second task's first gradients, then 20 steps. All that must not depend on the ranks."""
    lab = Lab(method, strategy, data, world, **settings)
    lab.train()  # so that no bank is empty
    first = lab.backward()
    gradients = {name: p.grad.clone() for name, p in lab.parameters().items() if p.grad is not None}
    terms = [first] + [lab.train() for _ in range(num_steps)]
    banks, weights = lab.banks(), {name: p.detach().clone() for name, p in lab.parameters().items()}
    lab.close()
    return {"terms": terms, "gradients": gradients, "banks": banks, "weights": weights}
