"""Measures a step of MoCo + PNR in its second task, on a batch held in memory: with our operator, and as released.

The released code clones both banks of the other view in every step, because autograd keeps its operands and the banks
are overwritten before the backward pass. It concatenates the banks, and does so again for the second loss. It writes
all logits, with the positive's first, and passes them to cross-entropy. Everything else is the same code with the same
weights.
"""

import time
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from kernel_process import extra_mb, in_new_process
from torch import Tensor
from torch.nn import functional

from fastcssl.learn import methods, strategies
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.losses import unit
from fastcssl.learn.memory import Bank
from fastcssl.learn.methods import BankConfig, Inputs, Method, Setting
from fastcssl.learn.nets import build_encoder
from fastcssl.learn.optim import OptimConfig, build_optimizer
from fastcssl.learn.step import Step, optimise
from fastcssl.learn.strategies import CurrentTask
from fastcssl.learn.strategies.pnr import Pnr, PnrConfig

Way = Literal["ours", "released"]
NUM_COMPARED = 3  # the number of steps whose losses are compared


class StepShape(NamedTuple):
    batch_size: int
    bank_size: int
    encoder: str
    size_px: int
    num_threads: int


class AsReleased(Pnr):
    """PNR with the loss of its authors' code. The banks must be full, because that code hides no rows."""

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        assert self.frozen is not None
        e = method(inputs)
        p, f = self.predictions(e.z), self.frozen_embeddings(inputs)
        plasticity, stability = [], []
        for view, rows in enumerate(method.rows(e)):
            current_KD, frozen_KD = rows.keys[0].clone(), self.banks[1 - view].rows_KD.clone()
            for query_ND, positive_ND, temperature, losses in (
                (rows.query_MD, rows.positive_MD, rows.temperature, plasticity),
                (unit(p[view]), unit(f[view]), self.config.temperature, stability),
            ):
                keys_KD = torch.cat([current_KD, frozen_KD])
                positive_N1 = (query_ND * positive_ND).sum(dim=1, keepdim=True)
                logits_NK = torch.cat([positive_N1, query_ND @ keys_KD.T], dim=1)
                logits_NK /= temperature
                losses.append(functional.cross_entropy(logits_NK, logits_NK.new_zeros(len(p[view]), dtype=torch.int64)))
        for bank in self.banks:
            bank.push(self.world.gather_keys(f[bank.view]))
        for bank, keys_ND in zip(method.banks, e.target, strict=True):
            bank.push(self.world.gather_keys(keys_ND))
        return {"plasticity": torch.stack(plasticity).mean(), "stability": torch.stack(stability).mean()}


class Training:
    def __init__(self, way: Way, shape: StepShape, seed: int) -> None:
        torch.set_num_threads(shape.num_threads)
        torch.manual_seed(seed)
        setting = Setting(seed=seed)
        config: Any = methods.find("moco").Config()
        config = replace(config, bank=BankConfig(size=shape.bank_size, initial="random"))
        encoder = build_encoder(EncoderConfig(name=shape.encoder, stem="cifar"), seed, shape.size_px)
        self.method = methods.build(config, encoder, setting)
        self.strategy: Any = (AsReleased if way == "released" else strategies.find("pnr"))(PnrConfig(), setting)
        for index in (0, 1):
            task = CurrentTask(index=index, tasks=(index,), earlier=tuple(range(index)), open=_no_data)
            self.strategy.begin_task(task, self.method)
            if index == 0:
                self.strategy.end_task(task, self.method)
        self.module = Step(self.method, self.strategy).train()
        self.optimizer = build_optimizer(
            self.module.groups(), OptimConfig(name="sgd", lr=0.03, exclude_bias_and_norm=False)
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        generator = torch.Generator().manual_seed(seed)
        views = [torch.randn(shape.batch_size, 3, shape.size_px, shape.size_px, generator=generator) for _ in range(2)]
        ids = torch.arange(shape.batch_size)
        channels_last = tuple(view.to(memory_format=torch.channels_last) for view in views)
        self.batch = Inputs(views=channels_last, label=ids % 10, id=ids)
        self.num_steps = 0

    def step(self) -> dict[str, float]:
        terms = optimise(self.module, self.batch, self.optimizer, self.scaler)
        self.method.after_step(self.num_steps, 1000)
        self.strategy.after_step(self.method)
        self.num_steps += 1
        return {name: float(value) for name, value in terms.items()}

    def banks(self) -> tuple[Bank, ...]:
        return (*self.method.banks, *self.strategy.banks)


def _no_data(*_args: Any, **_options: Any) -> Any:
    raise AssertionError("MoCo and PNR read nothing at the start of a task")


class _Held:
    ways: ClassVar[dict[Way, Training]] = {}


def begin_steps(shape: StepShape, seed: int) -> dict[str, float]:
    """Builds and warms up both ways. Returns the largest difference of their first losses, and the loss."""
    _Held.ways = {way: Training(way, shape, seed) for way in ("ours", "released")}
    pairs = [[training.step() for training in _Held.ways.values()] for _ in range(NUM_COMPARED)]
    difference = max(abs(mine[name] - theirs[name]) for mine, theirs in pairs for name in theirs)
    return {"loss": sum(pairs[-1][0].values()), "largest_difference": difference}


def measure_step(way: Way) -> float:
    began = time.perf_counter()
    _Held.ways[way].step()
    return time.perf_counter() - began


def step_extra_mb(way: Way, shape: StepShape, seed: int) -> float:
    """Returns the memory of a step beyond what training holds between steps: networks, optimiser, banks and batch."""
    found: float = in_new_process(_peak_of_step, way, shape, seed)
    return found


def _peak_of_step(way: Way, shape: StepShape, seed: int) -> float:
    training = Training(way, shape, seed)
    training.step()
    return extra_mb(training.step, num_calls=1)  # hundreds of MB, so Python's own memory is negligible
