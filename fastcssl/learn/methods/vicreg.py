"""VICReg: the views' embeddings agree, every dimension varies, and no two dimensions vary together.

Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning, 2022, as CaSSLe and
PNR train it. Deviation: variances and covariances span all ranks. In the references they span one GPU
(`scope = local`).

Units: `align` is the mean squared difference times its weight in the loss, 25. So CaSSLe's published factor of 25 is a
strategy.weight of 1. `repel` is the raw mean squared difference, so PNR's published 23 is the strategy.weight itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastcssl.data.policies import policy
from fastcssl.data.views import Family, Policy
from fastcssl.learn.losses import mean_squared, vicreg
from fastcssl.learn.methods import Embeddings, Inputs, Method, MethodConfig, Setting
from fastcssl.learn.nets import mlp, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class VicregConfig(MethodConfig):
    hidden: int = 2048
    dim: int = 2048
    similarity_weight: float = 25.0  # of the squared difference between the views
    variance_weight: float = 25.0  # of dimensions that vary too little
    covariance_weight: float = 1.0  # of dimensions that vary together


class Vicreg(Method):
    name = "vicreg"
    Config = VicregConfig
    config: VicregConfig
    num_views = 2
    in_batch = True

    def __init__(self, config: VicregConfig, encoder: nn.Module, setting: Setting) -> None:
        with seeded(setting.seed, "projector"):
            projector = mlp((encoder.num_features, config.hidden, config.hidden, config.dim), norm=True)  # type: ignore[arg-type]
        super().__init__(encoder, projector, setting)
        self.config = config

    @classmethod
    def views(cls, family: Family) -> Policy:
        """Returns the authors' two views. Both are the same, with larger crops than in other methods."""
        return policy(f"pnr-vicreg-{family}")

    def forward(self, inputs: Inputs) -> Embeddings:
        h, z = self.each_view(inputs.views)
        return Embeddings(h=h, z=z)

    def loss(self, e: Embeddings) -> Tensor:
        z1_ND, z2_ND = e.z
        return vicreg(
            z1_ND,
            z2_ND,
            self.world,
            similarity=self.config.similarity_weight,
            variance=self.config.variance_weight,
            covariance=self.config.covariance_weight,
        )

    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        return self.config.similarity_weight * self.repel(p, f)

    def repel(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...], form: str = "code") -> Tensor:  # noqa: ARG002
        """Returns the mean squared difference of the raw vectors, for both forms."""
        return torch.stack([mean_squared(p_ND, f_ND) for p_ND, f_ND in zip(p, f, strict=True)]).mean()


METHOD = Vicreg
