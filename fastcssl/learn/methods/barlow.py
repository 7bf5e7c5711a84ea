"""Barlow Twins: makes the cross-correlation of the two views' dimensions the identity.

Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, 2021, as CaSSLe and PNR train it: the
loss is multiplied by 0.1. Deviation: statistics and their gradient span all ranks. On several GPUs, the release
standardises on each GPU, and its gradient is divided by their number (`gradient = reference`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fastcssl.learn.losses import barlow, cosine, cosine_distance
from fastcssl.learn.methods import Embeddings, Inputs, Method, MethodConfig, Setting
from fastcssl.learn.nets import mlp, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class BarlowConfig(MethodConfig):
    hidden: int = 2048
    dim: int = 2048
    off_diagonal_weight: float = 5e-3  # of the off-diagonal terms; lambda in the paper
    scale: float = 0.1  # factor on the whole loss
    gradient: Literal["exact", "reference"] = "exact"  # reference: as released; they differ only on several ranks


class Barlow(Method):
    name = "barlow"
    Config = BarlowConfig
    config: BarlowConfig
    num_views = 2
    in_batch = True

    def __init__(self, config: BarlowConfig, encoder: nn.Module, setting: Setting) -> None:
        with seeded(setting.seed, "projector"):
            projector = mlp((encoder.num_features, config.hidden, config.hidden, config.dim), norm=True)  # type: ignore[arg-type]
        super().__init__(encoder, projector, setting)
        self.config = config

    def forward(self, inputs: Inputs) -> Embeddings:
        h, z = self.each_view(inputs.views)
        return Embeddings(h=h, z=z)

    def loss(self, e: Embeddings) -> Tensor:
        z1_ND, z2_ND = e.z
        return self._correlated(z1_ND, z2_ND)

    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        """Returns the same loss between predictions and frozen embeddings, averaged over views."""
        return torch.stack([self._correlated(p_ND, f_ND) for p_ND, f_ND in zip(p, f, strict=True)]).mean()

    def repel(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...], form: str) -> Tensor:
        """Returns - cos for "code", as released (half of BYOL's slope), or the unit vectors' distance^2 for "paper"."""
        pairs = zip(p, f, strict=True)
        if form == "code":
            return torch.stack([-cosine(p_ND, f_ND) for p_ND, f_ND in pairs]).mean()
        return torch.stack([cosine_distance(p_ND, f_ND) for p_ND, f_ND in pairs]).mean()

    def _correlated(self, a_ND: Tensor, b_ND: Tensor) -> Tensor:
        config = self.config
        return barlow(
            a_ND,
            b_ND,
            self.world,
            off_diagonal_weight=config.off_diagonal_weight,
            scale=config.scale,
            gradient=config.gradient,
        )


METHOD = Barlow
