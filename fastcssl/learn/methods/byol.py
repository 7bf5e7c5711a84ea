"""BYOL: predicts the slow network's embedding of the other view.

Grill et al., Bootstrap Your Own Latent, 2020, as CaSSLe and PNR train it: the two directions are summed, not averaged.
In each task, the EMA's weight rises from 0.99 to 1 along a cosine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastcssl.distributed.batchnorm import synchronised
from fastcssl.learn.losses import cosine_distance
from fastcssl.learn.memory import EmaCopy
from fastcssl.learn.methods import Embeddings, Inputs, Method, MethodConfig, Setting, check_ema, ema_momentum
from fastcssl.learn.nets import ViewPass, mlp, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class ByolConfig(MethodConfig):
    hidden: int = 4096
    dim: int = 256
    predictor_hidden: int = 8192  # width of the predictor's hidden layer
    ema_base: float = 0.99  # the slow network's EMA weight at the start of a task
    ema_final: float = 1.0  # the slow network's EMA weight at the end of a task

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        check_ema(ema_base=self.ema_base, ema_final=self.ema_final)


class Byol(Method):
    name = "byol"
    Config = ByolConfig
    config: ByolConfig
    predictive = True
    num_views = 2

    def __init__(self, config: ByolConfig, encoder: nn.Module, setting: Setting) -> None:
        with seeded(setting.seed, "projector"):
            projector = mlp((encoder.num_features, config.hidden, config.dim), norm=True)  # type: ignore[arg-type]
        super().__init__(encoder, projector, setting)
        self.config = config
        with seeded(setting.seed, "predictor"):
            predictor = mlp((config.dim, config.predictor_hidden, config.dim), norm=True)
        self.predictor = synchronised(predictor, self.world)
        self.predict_each = ViewPass(self.predictor)
        self.slow = EmaCopy(self.online)
        self.copies = {"slow": self.slow}

    def forward(self, inputs: Inputs) -> Embeddings:
        h, z = self.each_view(inputs.views)
        _, target = self.slow.each(inputs.views)
        return Embeddings(h=h, z=z, target=target, prediction=self.predict_each(z))

    def loss(self, e: Embeddings) -> Tensor:
        return cosine_distance(e.prediction[0], e.target[1]) + cosine_distance(e.prediction[1], e.target[0])

    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([cosine_distance(p_ND, f_ND) for p_ND, f_ND in zip(p, f, strict=True)]).mean()

    def after_step(self, step: int, num_steps: int) -> None:
        self.slow.update(self.online, ema_momentum(self.config.ema_base, self.config.ema_final, step, num_steps))


METHOD = Byol
