"""EWC: holds weights that mattered to earlier tasks close to their values.

After Kirkpatrick et al., Overcoming Catastrophic Forgetting in Neural Networks, 2017. CaSSLe reports results for it in
the self-supervised setting but does not publish its definition. This definition is ours:

    L + weight / 2 x sum_i F_i (theta_i - theta*_i)^2      over encoder and projector

theta* are the weights at the end of the last task. F is the mean over mini-batches of the squared gradient of the
batch's self-supervised loss at theta*, summed over tasks. (It is a batch's gradient, because a loss that compares
samples has no gradient of a single sample.) F is scaled to a mean of 1, so the weight means the same for every method.
On the first task, only the method's own loss is trained. A run that starts from a later task of another run knows only
the Fisher information of that task.

P weights in total.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fastcssl.data.draws import Reserved
from fastcssl.data.prepared import Selection
from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.nets import mode
from fastcssl.learn.replay import as_inputs
from fastcssl.learn.step import micro_batches
from fastcssl.learn.strategies import CurrentTask, Strategy, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EwcConfig(StrategyConfig):
    # A step pulls parameter i back by the fraction lr x weight x F_i. The largest F_i are some hundreds: keep it small.
    weight: float = 0.01  # of the penalty; lambda in the paper
    fisher_batches: int = 50  # batches for the Fisher information of a task; at most one epoch

    def __post_init__(self) -> None:
        if self.fisher_batches < 1:
            raise ValueError(f"strategy.fisher_batches is {self.fisher_batches}; use at least one.")


class Importance:
    """Holds theta*, and F summed over tasks but not yet scaled. Both are empty until a task has ended."""

    def __init__(self, device: torch.device) -> None:
        self.fisher_P, self.anchor_P = torch.zeros(0, device=device), torch.zeros(0, device=device)

    def resize(self, weights_P: Tensor) -> None:
        """Takes these weights as theta*, with an F of zero."""
        self.fisher_P, self.anchor_P = torch.zeros_like(weights_P), weights_P.clone()

    def penalty(self, weights_P: Tensor) -> Tensor:
        """Returns sum_i F_i (theta_i - theta*_i)^2, with F scaled to a mean of 1."""
        tiny = torch.finfo(self.fisher_P.dtype).tiny
        return (self.fisher_P * (weights_P - self.anchor_P).square()).sum() / self.fisher_P.mean().clamp_min(tiny)

    def state_dict(self) -> dict[str, Any]:
        return {"fisher": self.fisher_P, "anchor": self.anchor_P}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fisher_P, self.anchor_P = (state[key].to(self.fisher_P.device, copy=True) for key in ("fisher", "anchor"))


class Ewc(Strategy):
    name = "ewc"
    Config = EwcConfig
    config: EwcConfig

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.importance = Importance(setting.device)
        self.copies["importance"] = self.importance
        self._later = False

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        self._later = task.index > 0
        if self._later and not len(self.importance.fisher_P):
            self.importance.resize(_flat(_trained(method.online)).detach())

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        e = method(inputs)
        terms = {"loss": method.loss_then_remember(e)}
        if self._later:
            terms["penalty"] = self.config.weight / 2 * self.importance.penalty(_flat(_trained(method.online)))
        return terms

    def end_task(self, task: CurrentTask, method: Method) -> None:
        fisher_P = self.fisher(task, method)
        if len(self.importance.fisher_P):
            fisher_P += self.importance.fisher_P
        self.importance.fisher_P = fisher_P
        self.importance.anchor_P = _flat(_trained(method.online)).detach().clone()

    def fisher(self, task: CurrentTask, method: Method) -> Tensor:
        """Returns F of one task, from global batches of a separate epoch. The method does not change."""
        stream = task.open(Selection(tasks=task.tasks))
        weights = _trained(method.online)
        fisher_P = torch.zeros_like(_flat(weights).detach())
        num_batches = min(self.config.fisher_batches, len(stream))
        with (
            _undisturbed(method, self.setting.device),
            mode(method, training=True),
            closing(stream.epoch(Reserved.FISHER_EPOCH + task.index)) as batches,  # type: ignore[type-var]
        ):
            for batch in islice(batches, num_batches):
                gradient_P = self._gradient(method, weights, as_inputs(batch, weights[0].dtype))
                fisher_P += gradient_P.square() / num_batches
        return fisher_P

    def _gradient(self, method: Method, weights: list[nn.Parameter], inputs: Inputs) -> Tensor:
        """Returns the gradient of the global batch's loss, the same on every rank."""
        setting, parts = self.setting, []
        # Not in float16, which would need a scaler for small gradients.
        dtype = setting.amp_dtype if setting.amp_dtype is torch.bfloat16 else None
        for part in micro_batches(inputs, setting.accumulate):
            with torch.enable_grad(), torch.autocast(setting.device.type, dtype, enabled=dtype is not None):
                loss = method.loss(method(part))
            parts.append(_flat(torch.autograd.grad(loss, weights)))
        everyone = replace(self.world, scope="global")
        return everyone.total(torch.stack(parts).mean(dim=0)) / everyone.size


def _trained(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.requires_grad]


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@contextmanager
def _undisturbed(method: Method, device: torch.device) -> Iterator[None]:
    """Restores what a forward pass changes: BatchNorm's statistics, also in slow copies, and the random state."""
    buffers = [(buffer, buffer.clone()) for buffer in method.buffers()]
    copies = [
        (item, {key: value.clone() for key, value in item.state_dict().items()}) for item in method.copies.values()
    ]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
                for item, state in copies:
                    item.load_state_dict(state)


STRATEGY = Ewc
