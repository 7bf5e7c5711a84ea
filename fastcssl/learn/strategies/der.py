"""DER: keeps the embeddings of replayed samples as they were when their task ended.

After Buzzega et al., Dark Experience for General Continual Learning, 2020, with embeddings instead of logits. CaSSLe
reports results for it in the self-supervised setting but does not publish its definition. This definition is ours:

    L + alpha x mean over replayed samples of ||z(x_b) - z_stored||^2      z = the projector's output

z_stored comes from the network at the end of the sample's task, in eval mode, for one draw of the first view. x_b is
the first view, with a new augmentation at each visit; it passes through the network in train mode, including BatchNorm.
`learn/replay.py` says which samples are replayed, and when. The squared distance is a sum over dimensions, so alpha
must suit the method's z: MoCo's has unit length, the others' are raw. On the first task, only the method's own loss is
trained. A run that starts from another run's task stores the current network's embeddings for all tasks so far.

B samples kept, D embedding width.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcssl.data.draws import Reserved
from fastcssl.data.prepared import Selection
from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.nets import mode
from fastcssl.learn.replay import Ids, Replay, as_inputs, check_budget, choice
from fastcssl.learn.strategies import CurrentTask, Strategy, StrategyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DerConfig(StrategyConfig):
    budget: int = 1000  # number of samples kept from all earlier tasks together
    alpha: float = 0.1  # weight of the replayed samples' squared distance

    def __post_init__(self) -> None:
        check_budget(self.budget)


class Embedded(Replay):
    """A replay with one stored embedding per sample."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.id_B = self.id_B.to(device)
        self.z_BD = torch.zeros(0, 0, device=device)
        self.is_filled = False  # if False, only the shapes are valid, so that a state can be loaded

    def keep(self, ids: Tensor, z_BD: Tensor) -> None:
        """Replaces the stored samples and embeddings with these."""
        self.id_B, order_B = ids.sort()
        self.z_BD, self.is_filled = z_BD[order_B], True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "z": self.z_BD}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.z_BD, self.is_filled = state["z"].to(self.z_BD.device, copy=True), len(state["z"]) > 0


class Der(Strategy):
    name = "der"
    Config = DerConfig
    config: DerConfig
    replays = True

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.replay = Embedded(setting.device)
        self.copies["replay"] = self.replay
        self._later = False

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        self._later = task.index > 0
        if self._later and not self.replay.is_filled:
            ids = self._choice(task, task.earlier)
            self.replay.id_B = _tensor(ids, self.setting.device)
            self.replay.z_BD = next(method.parameters()).new_zeros(len(ids), method.config.dim)
        self.replay.begin(task)

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        # This comes first, because torch.compile cannot trace it: so it does not split code with gradients.
        replayed = self.replay.next(inputs) if self._later else None
        e = method(inputs)
        terms = {"loss": method.loss_then_remember(e)}
        if replayed is not None:
            _, z_ND = method.online(replayed.views[0])
            stored_ND = self.replay.z_BD[torch.searchsorted(self.replay.id_B, replayed.id)]
            terms["replay"] = self.config.alpha * (z_ND - stored_ND).square().sum(dim=1).mean()
        return terms

    def end_task(self, task: CurrentTask, method: Method) -> None:
        """Keeps the stored embeddings of samples that are still chosen, and embeds the new ones now."""
        self.replay.close()
        before, z_BD = self.replay.id_B, self.replay.z_BD
        chosen = self._choice(task, task.earlier + task.tasks)
        stays_B = torch.isin(before, _tensor(chosen, before.device)) & self.replay.is_filled
        before, z_BD = before[stays_B], z_BD[stays_B]
        if len(new := np.setdiff1d(chosen, before.cpu().numpy())):
            ids, z = self._embedded(task, method, new)
            before, z_BD = torch.cat([before, ids]), torch.cat([z_BD, z]) if len(z_BD) else z
        self.replay.keep(before, z_BD)

    def _choice(self, task: CurrentTask, tasks: tuple[int, ...]) -> Ids:
        return choice(task, tasks, self.config.budget, self.setting.seed)

    @torch.no_grad()
    def _embedded(self, task: CurrentTask, method: Method, ids: Ids) -> tuple[Tensor, Tensor]:
        """Returns the ids seen in one pass and their embeddings, the same on every rank.

        These are all of `ids`, except those that cannot be decoded, which the loader replaces.
        """
        setting, like = self.setting, next(method.parameters())
        stream = task.open(Selection(tasks=task.earlier + task.tasks, ids=ids, order="endless"))
        found: list[Tensor] = []
        embeddings: list[Tensor] = []
        with (
            mode(method.online, training=False),
            torch.autocast(setting.device.type, setting.amp_dtype, enabled=setting.amp_dtype is not None),
            closing(stream.epoch(Reserved.STORE_EPOCH + task.index)) as batches,  # type: ignore[type-var]
        ):
            for batch in batches:
                _, z_ND = method.online(as_inputs(batch, like.dtype).views[0])
                found.append(self.world.gather_keys(batch.id.clone()))
                embeddings.append(self.world.gather_keys(z_ND.to(like.dtype)))
                if sum(map(len, found)) >= len(ids):
                    break
        met_B, z_BD = torch.cat(found)[: len(ids)], torch.cat(embeddings)[: len(ids)]
        _, first = np.unique(met_B.cpu().numpy(), return_index=True)
        rows = _tensor(first, met_B.device)
        return met_B[rows], z_BD[rows]


def _tensor(values: Ids, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


STRATEGY = Der
