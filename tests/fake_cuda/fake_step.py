"""A real training step of a recipe on a fake card: the method, the strategy, the optimiser and autocast as in training.

The step is one of the second task, so that the strategy has its frozen network, banks and replay. With several ranks,
the process group is torch's fake one: collectives are dispatched and do nothing. DDP's own are not among them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fake_cuda import fake_operators
from fastcssl.config.recipes import recipe
from fastcssl.data.loader import Batch
from fastcssl.distributed.world import World
from fastcssl.learn import methods, strategies
from fastcssl.learn.methods import Inputs, Setting
from fastcssl.learn.nets import build_encoder
from fastcssl.learn.optim import build_optimizer, set_lr
from fastcssl.learn.precision import amp_dtype
from fastcssl.learn.step import Step, optimise
from fastcssl.learn.strategies import CurrentTask
from fastcssl.learn.strategies.der import Der
from fastcssl.learn.strategies.lump import Lump

DEVICE = torch.device("cuda", 0)
fake_operators.register()


def _moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module.to` for fake tensors, which torch's own cannot swap: parameters and buffers are replaced."""
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    for module in self.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                # Not `tensor.to`: torch knows the value of some fake tensors, and would copy that for real.
                wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                moved = torch.empty(tensor.shape, device=device or tensor.device, dtype=wanted)
                if layout is not None and moved.dim() == 4:
                    moved = moved.contiguous(memory_format=layout)
                tensors[name] = nn.Parameter(moved, tensor.requires_grad) if tensors is module._parameters else moved
    return self


class _Copying(TorchFunctionMode):
    """Lets `copy.deepcopy` work on fake tensors, which have no storage to copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__):
            tensor, memo = args
            if id(tensor) not in memo:
                copied = tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_card(world_size: int = 1, *, waits_allowed: bool = False) -> Iterator[World]:
    """Makes tensors fake, modules movable, and yields the world of rank 0.

    Without `waits_allowed`, an operation whose result's shape or value the host must know is an error.
    """
    with ExitStack() as stack:
        if world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(mock.patch.object(nn.Module, "to", _moved))
        # It would make a real tensor, to start a context that the fake runtime does not have.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        shape_env = ShapeEnv() if waits_allowed else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env))
        stack.enter_context(_Copying())
        yield World(0, world_size)


def fake_inputs(num_rows: int, size_px: int, num_views: int, dtype: torch.dtype) -> Inputs:
    """Returns a batch as the loader leaves it on the card."""
    views = tuple(
        torch.empty(num_rows, 3, size_px, size_px, dtype=dtype, device=DEVICE, memory_format=torch.channels_last)
        for _ in range(num_views)
    )
    label, sample_id = (torch.zeros(num_rows, dtype=torch.int64, device=DEVICE) for _ in range(2))
    return Inputs(views=views, label=label, id=sample_id)


class _Replayed:
    """A stream of earlier samples, of which only what a strategy asks for exists."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, self.ids = inputs, np.arange(5000)

    def epoch(self, number: int) -> Iterator[Batch]:  # noqa: ARG002
        valid = torch.ones(len(self._inputs.label), dtype=torch.bool, device=DEVICE)
        while True:
            yield Batch(views=self._inputs.views, label=self._inputs.label, id=self._inputs.id, valid=valid)


class FakeStep:
    """A run's step inside `fake_card`. `run()` makes one; `begin` has prepared the second task."""

    def __init__(self, method: str, strategy: str, world: World, *, encoder: nn.Module | None = None) -> None:
        self.config = recipe("imagenet100-class5", method, strategy).config
        self.amp_dtype = amp_dtype("auto", DEVICE)
        view = self.config.views.views()[0]
        dtype, num_views = self.amp_dtype or torch.float32, len(self.config.views.views())
        self.inputs = fake_inputs(self.config.batch_size // world.size, view.size_px, num_views, dtype)
        setting = Setting(world=world, seed=0, device=DEVICE, amp_dtype=self.amp_dtype)
        encoder = encoder or build_encoder(self.config.encoder, 0, view.size_px)
        self.method = methods.build(self.config.method, encoder, setting)
        self.strategy = strategies.build(self.config.strategy, setting)
        self.begin(0)
        if not type(self.strategy).union:
            self.begin(1)

    def begin(self, index: int) -> None:
        """Begins a task: the strategy's copies and predictors, and a new optimiser."""
        task = CurrentTask(
            index=index, tasks=(index,), earlier=tuple(range(index)), open=lambda _: _Replayed(self.inputs)
        )  # type: ignore[arg-type, return-value]
        self.strategy.begin_task(task, self.method)
        if isinstance(self.strategy, Der | Lump):  # opened once per task, which may wait; a step may not
            self.strategy.replay._batches = _Replayed(self.inputs).epoch(0)
        self.step = Step(self.method, self.strategy)
        self.step.train()
        self.optimizer = build_optimizer(self.step.groups(), self.config.optim)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp_dtype is torch.float16)

    def run(self) -> dict[str, Tensor]:
        """Makes one whole step, as `train_step` does, and returns the loss terms."""
        set_lr(self.optimizer, 0.1)
        terms = optimise(self.step, self.inputs, self.optimizer, self.scaler, amp_dtype=self.amp_dtype)
        self.method.after_step(0, 10)
        self.strategy.after_step(self.method)
        return terms
