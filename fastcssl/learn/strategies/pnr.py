"""PNR: adds pseudo-negatives, from the frozen network to plasticity and from the current network to stability.

Cha et al., Regularizing with Pseudo-Negatives for Continual Self-Supervised Learning, ICML 2024.

Contrastive methods (section 3.2): L1 (plasticity) pulls z towards its other view. L2 (stability) pulls g(z) towards the
frozen embedding of its own view. Both have the same negatives: the current model's and the frozen model's (PN1 adds the
frozen ones to L1, PN2 the current ones to L2).
Other methods (section 3.3): CaSSLe's terms, minus weight x repel from the frozen embedding of the other view (PN2).

form = code   as released. MoCo: the negatives of a view are the banks of the other view, with the positive in both
              denominators. SimCLR: the positive is only in the denominator of L1.
form = paper  MoCo: the negatives are the banks of both views of both models and the sample's own frozen embedding of
              the other view; the positive is only in the denominator of L1. SimCLR: the same as code. Barlow, BYOL,
              VICReg: the method's `repel`.

Neither the release nor the paper has SupCon. Ours is SimCLR's form with label positives in L1. Entries with the row's
label stay negatives, as does the other view's frozen embedding. `exclude_same_label` hides them, and the row's own
sample too: it hides the frozen ones from L1, whose denominator keeps the positives as in SupCon's loss, and those of
both models from L2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastcssl.errors import UserError
from fastcssl.learn.losses import contrast_among, unit, with_negative
from fastcssl.learn.memory import Bank
from fastcssl.learn.methods import Embeddings, Inputs, Method, Push, Rows
from fastcssl.learn.nets import side_by_side
from fastcssl.learn.strategies import CurrentTask, Distilling, Frozen, StrategyConfig

Form = Literal["code", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PnrConfig(StrategyConfig):
    form: Form = "code"  # as released, or as the paper prints it
    pn1: bool = True  # frozen negatives in the plasticity term; only for contrastive methods
    pn2: bool = True  # current negatives in the stability term; for methods without negatives: repel
    weight: float = 1.0  # of repel, for methods without negatives; lambda in the paper
    align_weight: float = 1.0  # of align, for methods without negatives
    temperature: float = 0.2  # of the stability term
    exclude_same_label: bool = False  # from the negatives; only for supervised methods
    frozen: Frozen = "eval"  # batch: normalise by batch statistics

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"strategy.temperature is {self.temperature}; give a number above 0.")


class Pnr(Distilling):
    name = "pnr"
    Config = PnrConfig
    config: PnrConfig
    num_views = 2  # each view's negatives include the frozen embedding of the other

    @classmethod
    def check(cls, config: StrategyConfig, method: type[Method]) -> None:
        assert isinstance(config, PnrConfig)
        if not method.contrastive and not config.pn1:
            raise UserError(
                f"strategy.pn1 is off, but {method.name} has no negatives that PN1 could add to. Leave it on; "
                "--strategy.pn2 off switches its pseudo-negatives off."
            )
        if config.exclude_same_label and not method.supervised:
            raise UserError(
                f"strategy.exclude_same_label is on, but {method.name} does not use labels. Leave it off, or "
                "train supcon."
            )

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        if task.index == 0:
            return
        self.freeze(method, self.config.frozen)
        self.add_predictor(method, method.config.dim)
        if method.banks and not self.banks:
            like = method.banks[0]
            self.banks = tuple(
                Bank(
                    *like.rows_KD.shape,
                    view=view,
                    initial=like.initial,
                    seed=like.seed + 2 + view,
                    dtype=like.rows_KD.dtype,
                )
                for view in range(len(method.banks))
            )
            for bank in self.banks:
                bank.to(like.rows_KD.device)
                self.copies[f"frozen_bank{bank.view}"] = bank

    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        e = method(inputs)
        if self.frozen is None:
            return {"loss": method.loss_then_remember(e)}
        p, f = self.predictions(e.z), self.frozen_embeddings(inputs)
        if method.contrastive:
            return self._contrastive(method, e, _units(p), _units(f))
        return self._other(method, e, p, f)

    # ---- Methods with negatives --------------------------------------------------------------------------------------

    def _contrastive(
        self, method: Method, e: Embeddings, p: tuple[Tensor, ...], f: tuple[Tensor, ...]
    ) -> dict[str, Tensor]:
        if not method.banks:
            pairs = [self._in_batch(method, e, torch.cat(p), torch.cat(f))]
            method.remember(e)
        elif self.config.form == "code":
            mine, frozen = self._pushes(method, e, f)
            pairs = [
                self._sweep(rows, mine[1 - view], frozen[1 - view], p[view], f[view])
                for view, rows in enumerate(method.rows(e))
            ]
        else:
            pairs = [self._paper_form(method, e, p, f)]
        plasticity, stability = zip(*pairs, strict=True)
        return {"plasticity": torch.cat(plasticity).mean(), "stability": torch.cat(stability).mean()}

    def _pushes(self, method: Method, e: Embeddings, f: tuple[Tensor, ...]) -> tuple[list[Push], list[Push]]:
        """Returns the keys that each bank's last sweep writes, for the current model's banks and the frozen ones."""
        frozen = [(bank, self.world.gather_keys(f[bank.view])) for bank in self.banks]
        return list(zip(method.banks, method.keys(e), strict=True)), frozen

    def _sweep(self, rows: Rows, mine: Push, frozen: Push, p_MD: Tensor, f_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns L1 and L2 of one view, both against the current and the frozen bank."""
        bank, _ = frozen
        return self._both(rows, (bank.rows_KD,), (bank.filled,), p_MD, f_MD, [mine], [frozen])

    def _in_batch(self, method: Method, e: Embeddings, p_MD: Tensor, f_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns L1 and L2 of stacked views against all other current and frozen embeddings of the batch."""
        (rows,) = method.rows(e)
        f_KD = self.world.gather(f_MD)
        if self.config.exclude_same_label and e.label is not None:
            return self._other_labels(rows, f_KD, p_MD, f_MD, torch.cat([e.label] * len(e.z)))
        return self._both(rows, (f_KD,), (None,), p_MD, f_MD)

    def _other_labels(
        self, rows: Rows, f_KD: Tensor, p_MD: Tensor, f_MD: Tensor, label_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns L1 and L2 as `_both` does, but entries with the row's label are not negatives."""
        assert rows.own_M is not None and not isinstance(rows.temperature, Tensor)
        (z_KD,), config = rows.keys, self.config
        same_MK = label_M[:, None] == self.world.gather(label_M)
        own_MK = rows.own_M[:, None] == torch.arange(len(z_KD), device=z_KD.device)
        among_z, among_f = (z_KD, own_MK), (f_KD, same_MK)
        l1_M = contrast_among(
            rows.query_MD, rows.positive_MD, [among_z, among_f] if config.pn1 else [among_z], rows.temperature
        )
        among_z = (z_KD, same_MK)
        l2_M = contrast_among(p_MD, f_MD, [among_z, among_f] if config.pn2 else [among_f], config.temperature)
        return l1_M, l2_M

    def _both(
        self,
        rows: Rows,
        frozen_keys: tuple[Tensor, ...],
        frozen_filled: tuple[Tensor | None, ...],
        p_MD: Tensor,
        f_MD: Tensor,
        mine: Sequence[Push] = (),
        frozen: Sequence[Push] = (),
    ) -> tuple[Tensor, Tensor]:
        """Returns L1 and L2, one value per row each, in one sweep when they share negatives.

        The last sweep of a bank also writes it. `mine` holds the pushes for the banks that `rows` sees, `frozen` those
        for the banks of the frozen keys.
        """
        keys, filled = rows.keys + frozen_keys, rows.filled + frozen_filled
        config, num_rows, pushes = self.config, len(rows.query_MD), (*mine, *frozen)
        if config.pn1 and config.pn2:
            loss_M = _against(rows, keys, filled).stacked(p_MD, f_MD, config.temperature).loss_M(pushes)
            return loss_M[:num_rows], loss_M[num_rows:]
        l1 = _against(rows, keys, filled) if config.pn1 else rows
        other = _against(rows, keys, filled) if config.pn2 else _against(rows, frozen_keys, frozen_filled)
        l2 = Rows(
            query_MD=p_MD,
            positive_MD=f_MD,
            keys=other.keys,
            filled=other.filled,
            temperature=config.temperature,
            own_M=rows.own_M,
            positive_in_denominator=rows.positive_in_denominator,
        )
        if config.pn1:
            l2_M = l2.loss_M()
            return l1.loss_M(pushes), l2_M
        if config.pn2:
            return l1.loss_M(), l2.loss_M(pushes)
        return l1.loss_M(mine), l2.loss_M(frozen)

    def _paper_form(
        self, method: Method, e: Embeddings, p: tuple[Tensor, ...], f: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns L1 and L2 of both views against the banks of both views, so that all rows share one sweep.

        L2's denominator does not contain its positive but the other view's frozen embedding. That embedding takes the
        positive's place in the sweep, and the numerator is corrected afterwards.
        """
        first, second = method.rows(e)
        rows = Rows(
            query_MD=torch.cat([first.query_MD, second.query_MD]),
            positive_MD=torch.cat([first.positive_MD, second.positive_MD]),
            keys=first.keys + second.keys,
            filled=first.filled + second.filled,
            temperature=first.temperature,
        )
        p_MD, f_MD, other_MD = torch.cat(p), torch.cat(f), torch.cat(f[::-1])
        frozen_keys, frozen_filled = zip(*((bank.rows_KD, bank.filled) for bank in self.banks), strict=True)
        mine, frozen = self._pushes(method, e, f)
        l1_M, swept_M = self._both(rows, frozen_keys, frozen_filled, p_MD, other_MD, mine[::-1], frozen)
        if self.config.pn1:
            pull_M = (rows.query_MD * rows.positive_MD).sum(1) / rows.temperature
            push_M = (rows.query_MD * other_MD).sum(1) / rows.temperature
            l1_M = with_negative(l1_M, pull_M, push_M)
        l2_M = swept_M + (p_MD * (other_MD - f_MD)).sum(1) / self.config.temperature
        return l1_M, l2_M

    # ---- Methods without ---------------------------------------------------------------------------------------------

    def _other(self, method: Method, e: Embeddings, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> dict[str, Tensor]:
        terms = {"loss": method.loss_then_remember(e), "align": self.config.align_weight * method.align(p, f)}
        if self.config.pn2:
            terms["repel"] = -self.config.weight * method.repel(p, f[::-1], self.config.form)
        return terms


def _units(z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the embeddings of all views with unit length, normalised together."""
    return unit(side_by_side(z)).chunk(len(z))


def _against(rows: Rows, keys: tuple[Tensor, ...], filled: tuple[Tensor | None, ...]) -> Rows:
    """Returns the same rows against other negatives."""
    return Rows(
        query_MD=rows.query_MD,
        positive_MD=rows.positive_MD,
        keys=keys,
        filled=filled,
        temperature=rows.temperature,
        own_M=rows.own_M,
        positive_in_denominator=rows.positive_in_denominator,
    )


STRATEGY = Pnr
