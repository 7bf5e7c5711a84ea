"""SupCon: SimCLR with labels. All samples of a class are each other's positives.

Khosla et al., Supervised Contrastive Learning, 2020, equation 2 (L_out), as CaSSLe trains it: the mean of the
log-probabilities of a row's positives, with every other row of the batch in the denominator. `align` does not use
labels. Deviation: the batch, and with it the positives, spans all ranks. In the references it spans one GPU
(`scope = local`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastcssl.learn.losses import label_positive
from fastcssl.learn.methods import Embeddings
from fastcssl.learn.methods.simclr import Simclr, SimclrConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SupconConfig(SimclrConfig):
    temperature: float = 0.1  # of the loss


class Supcon(Simclr):
    name = "supcon"
    Config = SupconConfig
    config: SupconConfig
    supervised = True

    def positive(self, z_MD: Tensor, keys_KD: Tensor, own_M: Tensor, e: Embeddings) -> Tensor:  # noqa: ARG002
        """Returns the mean of all other rows that have the row's label."""
        assert e.label is not None
        label_M = torch.cat([e.label] * len(e.z))
        return label_positive(label_M, keys_KD, self.world.gather(label_M), own_M)


METHOD = Supcon
