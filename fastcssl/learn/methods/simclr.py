"""SimCLR: each embedding must find its other view among all embeddings of the batch.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, 2020, equation 1 (NT-Xent), as
CaSSLe and PNR train it: no BatchNorm in the projector. Deviation: the batch spans all ranks. In the references it spans
one GPU (`scope = local`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastcssl.learn.losses import symmetric_contrast, unit
from fastcssl.learn.methods import Embeddings, Inputs, Method, MethodConfig, Rows, Setting, check_temperatures, contrast
from fastcssl.learn.nets import mlp, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class SimclrConfig(MethodConfig):
    temperature: float = 0.2  # of the loss
    align_temperature: float = 0.2  # of align, the pull towards the frozen network

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        check_temperatures(temperature=self.temperature, align_temperature=self.align_temperature)


class Simclr(Method):
    name = "simclr"
    Config = SimclrConfig
    config: SimclrConfig
    num_views = 2
    contrastive = True
    in_batch = True

    def __init__(self, config: SimclrConfig, encoder: nn.Module, setting: Setting) -> None:
        with seeded(setting.seed, "projector"):
            projector = mlp((encoder.num_features, config.hidden, config.dim), norm=False)  # type: ignore[arg-type]
        super().__init__(encoder, projector, setting)
        self.config = config

    def forward(self, inputs: Inputs) -> Embeddings:
        h, z = self.each_view(inputs.views)
        return Embeddings(h=h, z=z, label=inputs.label)

    def rows(self, e: Embeddings) -> list[Rows]:
        z_MD = unit(torch.cat(e.z))
        keys_KD = self.world.gather(z_MD)
        own_M = self.world.first_row(len(z_MD)) + torch.arange(len(z_MD), device=z_MD.device)
        return [
            Rows(
                query_MD=z_MD,
                positive_MD=self.positive(z_MD, keys_KD, own_M, e),
                keys=(keys_KD,),
                filled=(None,),
                temperature=self.config.temperature,
                own_M=own_M,
                positive_in_denominator=False,  # it is among the keys
            )
        ]

    def positive(self, z_MD: Tensor, keys_KD: Tensor, own_M: Tensor, e: Embeddings) -> Tensor:  # noqa: ARG002
        """Returns the other view of each row's sample."""
        return z_MD.roll(len(z_MD) // 2, dims=0)

    def loss(self, e: Embeddings) -> Tensor:
        return contrast(self.rows(e))

    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        return symmetric_contrast(torch.cat(p), torch.cat(f), self.config.align_temperature, self.world)


METHOD = Simclr
