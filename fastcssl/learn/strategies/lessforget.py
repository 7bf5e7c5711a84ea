"""Less-Forget: keeps the direction of the encoder's features close to the frozen network's, without a predictor.

After Jung et al., Less-forgetting Learning in Deep Neural Networks, 2016. CaSSLe reports results for it in the
self-supervised setting but does not publish its definition. This definition is ours:

    L + weight x mean over views of mean [1 - cos(h, h_frozen)],   h = features of the encoder, not of the projector

On the first task, only the method's own loss is trained.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastcssl.learn.losses import cosine
from fastcssl.learn.memory import FrozenCopy
from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.strategies import CurrentTask, Frozen, Strategy, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LessforgetConfig(StrategyConfig):
    weight: float = 1.0  # of the features' distance
    frozen: Frozen = "eval"  # batch: normalise by batch statistics


class Lessforget(Strategy):
    name = "lessforget"
    Config = LessforgetConfig
    config: LessforgetConfig

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.frozen: FrozenCopy | None = None

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        if task.index > 0:
            self.frozen = FrozenCopy(method.online.encoder, batch_statistics=self.config.frozen == "batch")
            self.copies["frozen"] = self.frozen

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        e = method(inputs)
        terms = {"loss": method.loss_then_remember(e)}
        if self.frozen is not None:
            away = [1 - cosine(h_NF, f_NF) for h_NF, f_NF in zip(e.h, self.frozen.each(inputs.views), strict=True)]
            terms["features"] = self.config.weight * torch.stack(away).mean()
        return terms


STRATEGY = Lessforget
