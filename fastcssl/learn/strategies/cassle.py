"""CaSSLe: a predictor g must predict the frozen network's embedding of a view from the new embedding.

Fini et al., Self-Supervised Models are Continual Learners, CVPR 2022. `align` is in the method's own units (VICReg's
already includes its factor 25), so the published weight is 1 for every method. Deviation: the frozen network is in eval
mode. `frozen = batch` normalises by batch statistics, as the release does.
"""

from dataclasses import dataclass

from torch import Tensor

from fastcssl.learn.methods import Inputs, Method
from fastcssl.learn.strategies import CurrentTask, Distilling, Frozen, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CassleConfig(StrategyConfig):
    weight: float = 1.0  # of align; lambda_d in the release, divided by the method's own factor
    frozen: Frozen = "eval"  # batch: normalise by batch statistics, as the release does


class Cassle(Distilling):
    name = "cassle"
    Config = CassleConfig
    config: CassleConfig

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        if task.index > 0:
            self.freeze(method, self.config.frozen)
            self.add_predictor(method, method.config.dim)

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        e = method(inputs)
        terms = {"loss": method.loss_then_remember(e)}
        if self.frozen is not None:
            terms["align"] = self.config.weight * method.align(self.predictions(e.z), self.frozen_embeddings(inputs))
        return terms

    def lr_scale(self, method: Method) -> float:
        # The release's "predictive" distiller, BYOL's, raises g's learning rate when the weight is below 1.
        return 1 / self.config.weight if method.predictive and 0 < self.config.weight < 1 else 1.0


STRATEGY = Cassle
