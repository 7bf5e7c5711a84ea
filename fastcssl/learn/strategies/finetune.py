"""Fine-tuning: trains the method's loss task after task and does nothing against forgetting."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastcssl.learn.methods import Inputs, Method
from fastcssl.learn.strategies import Strategy, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig(StrategyConfig):
    pass


class Finetune(Strategy):
    name = "finetune"
    Config: ClassVar[type[StrategyConfig]] = FinetuneConfig

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        return {"loss": method.loss_then_remember(method(inputs))}


STRATEGY = Finetune
