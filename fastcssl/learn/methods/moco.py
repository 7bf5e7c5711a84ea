"""MoCo v2+: momentum contrast against a bank of keys, both views as queries.

Chen et al., Improved Baselines with Momentum Contrastive Learning, 2020, as CaSSLe and PNR train it: symmetric, no
BatchNorm in the projector, no shuffled BatchNorm (it is synchronised instead), and an EMA weight that follows a cosine.
Deviation: rows of the bank that were never written are masked. `bank.initial = random` does as the references do.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastcssl.learn.losses import symmetric_contrast
from fastcssl.learn.memory import Bank, EmaCopy
from fastcssl.learn.methods import (
    BankConfig,
    Embeddings,
    Inputs,
    Method,
    MethodConfig,
    Rows,
    Setting,
    check_ema,
    check_temperatures,
    contrast,
    ema_momentum,
)
from fastcssl.learn.nets import mlp, seeded


@dataclass(frozen=True, slots=True, kw_only=True)
class MocoConfig(MethodConfig):
    temperature: float = 0.2  # of the loss
    align_temperature: float = 0.2  # of align, the pull towards the frozen network
    ema_base: float = 0.99  # the slow network's EMA weight at the start of a task
    ema_final: float = 0.999  # the slow network's EMA weight at the end of a task
    bank: BankConfig = field(default_factory=BankConfig)

    def __post_init__(self) -> None:
        MethodConfig.__post_init__(self)
        check_temperatures(temperature=self.temperature, align_temperature=self.align_temperature)
        check_ema(ema_base=self.ema_base, ema_final=self.ema_final)


class Moco(Method):
    name = "moco"
    Config = MocoConfig
    config: MocoConfig
    num_views = 2
    contrastive = True

    def __init__(self, config: MocoConfig, encoder: nn.Module, setting: Setting) -> None:
        with seeded(setting.seed, "projector"):
            projector = mlp((encoder.num_features, config.hidden, config.dim), norm=False)  # type: ignore[arg-type]
        super().__init__(encoder, projector, setting, normalise=True)
        self.config = config
        self.slow = EmaCopy(self.online)
        self.banks = tuple(
            Bank(
                config.bank.size,
                config.dim,
                view=view,
                initial=config.bank.initial,
                seed=2 * setting.seed + view,
                dtype=getattr(torch, config.bank.dtype),
            )
            for view in (0, 1)
        )
        self.copies = {"slow": self.slow, "bank0": self.banks[0], "bank1": self.banks[1]}

    def forward(self, inputs: Inputs) -> Embeddings:
        h, q = self.each_view(inputs.views)
        _, k = self.slow.each(inputs.views)
        return Embeddings(h=h, z=q, target=k)

    def rows(self, e: Embeddings) -> list[Rows]:
        return [
            Rows(
                query_MD=e.z[view],
                positive_MD=e.target[1 - view],
                keys=(self.banks[1 - view].rows_KD,),
                filled=(self.banks[1 - view].filled,),
                temperature=self.config.temperature,
            )
            for view in (0, 1)
        ]

    def loss(self, e: Embeddings) -> Tensor:
        return contrast(self.rows(e))

    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        return symmetric_contrast(torch.cat(p), torch.cat(f), self.config.align_temperature, self.world)

    def keys(self, e: Embeddings) -> tuple[Tensor, ...]:
        return tuple(self.world.gather_keys(keys_ND) for keys_ND in e.target)

    def loss_then_remember(self, e: Embeddings) -> Tensor:
        first, second = zip(self.banks, self.keys(e), strict=True)
        return contrast(self.rows(e), [(second,), (first,)])  # a view's queries sweep the bank of the other view

    def after_step(self, step: int, num_steps: int) -> None:
        self.slow.update(self.online, ema_momentum(self.config.ema_base, self.config.ema_final, step, num_steps))


METHOD = Moco
