"""LUMP: mixes every image with a replayed one, and the method learns only from the mixture.

After Madaan et al., Representational Continuity for Unsupervised Continual Learning, 2022. CaSSLe reports results for
it but does not publish its definition. This definition is ours:

    x~_v = lambda x_v + (1 - lambda) b_v  for both views,  lambda ~ Beta(alpha, alpha), one for a whole batch
    L(x~), or with labels  lambda L(x~, y) + (1 - lambda) L(x~, y_b)

b is a replayed sample, with a new augmentation at each visit. `learn/replay.py` says which samples are replayed, and
when. lambda is a function of (seed, task, number of the batch), so all ranks, micro-batches and resumed runs draw the
same value. On the first task, only the method's own loss is trained.
"""

from dataclasses import dataclass
from dataclasses import replace as changed

import numpy as np
import torch
from torch import Tensor

from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.replay import Replay, check_budget, choice
from fastcssl.learn.strategies import CurrentTask, Strategy, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LumpConfig(StrategyConfig):
    budget: int = 1000  # number of samples kept from all earlier tasks together
    alpha: float = 0.4  # the mixing weight is drawn from Beta(alpha, alpha)

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if not self.alpha > 0:
            raise ValueError(f"strategy.alpha is {self.alpha}; a Beta distribution needs a value above 0.")


class Lump(Strategy):
    name = "lump"
    Config = LumpConfig
    config: LumpConfig
    replays = True

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.replay = Replay()
        self.copies["replay"] = self.replay
        self._later = False

    def begin_task(self, task: CurrentTask, method: Method) -> None:  # noqa: ARG002
        self._later = task.index > 0
        if self._later:
            ids = choice(task, task.earlier, self.config.budget, self.setting.seed)
            self.replay.id_B = torch.from_numpy(ids)
        self.replay.begin(task)

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        if not self._later:
            return {"loss": method.loss_then_remember(method(inputs))}
        share, replayed = self._drawn(inputs), self.replay.next(inputs)
        views = tuple(torch.lerp(b, x, share.to(x.dtype)) for x, b in zip(inputs.views, replayed.views, strict=True))
        e = method(changed(inputs, views=views))
        if not method.supervised:
            return {"loss": method.loss_then_remember(e)}
        by_other = (1 - share) * method.loss(changed(e, label=replayed.label))
        return {"loss": share * method.loss_then_remember(e) + by_other}

    def end_task(self, task: CurrentTask, method: Method) -> None:  # noqa: ARG002
        self.replay.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drawn(self, inputs: Inputs) -> Tensor:
        """Returns lambda for the current batch of the replay."""
        counter = np.random.Philox(key=self.setting.seed, counter=[0, 0, self.replay.batch, self.replay.epoch])
        share = np.random.Generator(counter).beta(self.config.alpha, self.config.alpha)
        view = inputs.views[0]
        # A fill, not torch.tensor: that copies from the host, and on a GPU the host would wait for it in every step.
        return torch.full((), share, dtype=torch.promote_types(view.dtype, torch.float32), device=view.device)


STRATEGY = Lump
