"""Defines one optimisation step: the module that DDP wraps, and the forward and backward pass around it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastcssl.distributed.world import World, watched
from fastcssl.learn.methods import Inputs, Method
from fastcssl.learn.strategies import Strategy


class Step(nn.Module):
    """Computes named loss terms from views. DDP wraps this module.

    It holds only the parameters that are trained. Banks, frozen and slow copies live outside, because DDP must neither
    broadcast them nor expect gradients for them. A new Step is built for each task, because a strategy may add
    parameters.
    """

    def __init__(self, method: Method, strategy: Strategy) -> None:
        super().__init__()
        self.method, self.strategy = method, strategy

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        return self.strategy.terms(self.method, inputs.adjacent())

    def groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups for the optimiser. As in the references, the strategy has its own group."""
        own = [p for p in self.strategy.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"name": "method", "params": [p for p in self.method.parameters() if p.requires_grad]}
        ]
        if own:
            groups.append({"name": "strategy", "params": own, "lr_scale": self.strategy.lr_scale(self.method)})
        return groups


def wrapped_for_ranks(step: Step, world: World, device: torch.device) -> nn.Module:
    """Returns the step, in DDP if there are several ranks. BatchNorm is synchronised, so no buffers are broadcast."""
    if world.size == 1:
        return step
    return DistributedDataParallel(
        step,
        device_ids=[device] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def micro_batches(inputs: Inputs, count: int) -> Iterator[Inputs]:
    """Splits the inputs into `count` parts."""
    parts = [view.chunk(count) for view in inputs.views]
    for number, (label, sample_id) in enumerate(zip(inputs.label.chunk(count), inputs.id.chunk(count), strict=True)):
        yield Inputs(views=tuple(part[number] for part in parts), label=label, id=sample_id)


def optimise(
    module: nn.Module,
    inputs: Inputs,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    accumulate: int = 1,
    amp_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Does one step of the optimiser and returns the loss terms, averaged over micro-batches, on the device."""
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {}
    device_type = inputs.label.device.type
    for number, part in enumerate(micro_batches(inputs, accumulate)):
        with ExitStack() as stack:
            if number < accumulate - 1 and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            # DDP communicates in the forward pass, too, when it arranges its buckets.
            forward = watched("the forward pass", by_type=True)
            with forward, torch.autocast(device_type, amp_dtype, enabled=amp_dtype is not None):
                terms: dict[str, Tensor] = module(part)
                loss = torch.stack(list(terms.values())).sum()
                loss = loss if accumulate == 1 else loss / accumulate
            with watched("the backward pass"):
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for name, term in terms.items():
            share = term.detach() if accumulate == 1 else term.detach() / accumulate
            sums[name] = sums[name] + share if name in sums else share
    scaler.step(optimizer)
    scaler.update()
    return sums
