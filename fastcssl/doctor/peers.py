"""Other implementations of the contrastive loss and its gradient, to compare our operator with.

Each contender takes a Problem and returns (loss_N, d sum(loss) / d query). The denominator includes the positives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fastcssl import ops
from fastcssl.ops.infonce import info_nce_chunked

Answer = tuple[Tensor, Tensor]
CHUNKS = (512, 1024, 2048, 4096)


class Problem(NamedTuple):
    """The inputs of a contrastive loss."""

    query_ND: Tensor
    positive_ND: Tensor
    banks: tuple[Tensor, ...]
    temperature: float

    @property
    def num_keys(self) -> int:
        return sum(map(len, self.banks))

    @property
    def flop(self) -> int:
        """Returns the operations of the two matrix products that loss and gradient need at least."""
        return 4 * self.query_ND.shape[0] * self.num_keys * self.query_ND.shape[1]


Contender = Callable[[Problem], Answer]


def problem(
    num_rows: int,
    dim: int,
    bank_sizes: tuple[int, ...],
    *,
    temperature: float = 0.2,
    dtype: torch.dtype = torch.float32,  # of the banks
    device: str | torch.device = "cpu",
    num_clusters: int = 0,
    seed: int = 0,
) -> Problem:
    """Returns random unit vectors: in all directions, or in clusters like the embeddings of a trained network."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> Tensor:
        x_ND = torch.randn(count, dim, generator=generator)
        if num_clusters:
            centres = torch.randn(num_clusters, dim, generator=torch.Generator().manual_seed(seed + 1))
            x_ND = 0.5 * x_ND + centres[torch.randint(num_clusters, (count,), generator=generator)]
        return functional.normalize(x_ND, dim=1)

    query_ND = drawn(num_rows)
    positive_ND = functional.normalize(query_ND + 0.5 * drawn(num_rows), dim=1)
    banks = tuple(drawn(size).to(device, dtype) for size in bank_sizes)
    return Problem(query_ND.to(device), positive_ND.to(device), banks, temperature)


def _with_gradient(loss: Callable[[Tensor, Problem], Tensor]) -> Contender:
    def answer(given: Problem) -> Answer:
        query_ND = given.query_ND.detach().requires_grad_()
        loss_N = loss(query_ND, given)
        loss_N.sum().backward()  # type: ignore[no-untyped-call]
        assert query_ND.grad is not None
        return loss_N.detach(), query_ND.grad

    return answer


def _moco(query_ND: Tensor, given: Problem) -> Tensor:
    """Computes it as MoCo's code does: concatenates the positive's and the bank's logits, then cross-entropy."""
    keys_KD = torch.cat([bank.to(query_ND.dtype) for bank in given.banks])
    positive_N1 = (query_ND * given.positive_ND).sum(dim=1, keepdim=True)
    logits_NK = torch.cat([positive_N1, query_ND @ keys_KD.T], dim=1) / given.temperature
    target_N = torch.zeros(len(query_ND), dtype=torch.int64, device=query_ND.device)
    return functional.cross_entropy(logits_NK, target_N, reduction="none")


def _logsumexp(query_ND: Tensor, given: Problem) -> Tensor:
    """Computes it without copying the banks or the logits."""
    scaled_ND = query_ND / given.temperature
    positive_N = (scaled_ND * given.positive_ND).sum(dim=1)
    parts = [(scaled_ND @ bank.to(query_ND.dtype).T).logsumexp(dim=1) for bank in given.banks]
    return torch.stack([positive_N, *parts]).logsumexp(dim=0) - positive_N


def _flash(given: Problem) -> Answer:
    """Computes it by attention with the keys as values: the output is the mean that the gradient needs."""
    scaled_ND = given.query_ND / given.temperature
    means, lses = [], []
    for bank_KD in given.banks:
        keys = bank_KD[None, None]
        if scaled_ND.device.type == "cpu":
            # The CPU's flash attention takes a single dtype, and half precision would be slow and inexact.
            keys = keys.to(scaled_ND.dtype)
            found: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                scaled_ND[None, None], keys, keys, scale=1.0
            )
        else:
            half = keys.dtype if keys.dtype in (torch.float16, torch.bfloat16) else torch.float16
            keys = keys.to(half)
            found = torch.ops.aten._scaled_dot_product_flash_attention(
                scaled_ND.to(half)[None, None], keys, keys, scale=1.0
            )
        means.append(found[0][0, 0].float())
        lses.append(found[1][0, 0].float())
    lse_NB = torch.stack(lses, dim=1)
    lse_N = lse_NB.logsumexp(dim=1)
    mean_ND = torch.zeros_like(scaled_ND)
    for mean, share_N in zip(means, (lse_NB - lse_N[:, None]).exp().unbind(dim=1), strict=True):
        mean_ND.addcmul_(mean, share_N[:, None])
    margin_N = lse_N - (scaled_ND * given.positive_ND).sum(dim=1)
    by_query_ND = (mean_ND - given.positive_ND) * (margin_N.sigmoid() / given.temperature)[:, None]
    return functional.softplus(margin_N), by_query_ND


eager_moco: Contender = _with_gradient(_moco)
eager_logsumexp: Contender = _with_gradient(_logsumexp)
flash: Contender = torch.no_grad()(_flash)


def compiled() -> Contender:
    """Returns MoCo's code under torch.compile. The first call compiles it for that call's shapes."""
    return _with_gradient(torch.compile(_moco, dynamic=False))


def chunked(chunk: int) -> Contender:
    """Returns our algorithm in plain torch, with `chunk` keys at a time."""

    def loss(query_ND: Tensor, given: Problem) -> Tensor:
        return info_nce_chunked(query_ND, given.positive_ND, given.banks, given.temperature, chunk=chunk)

    return _with_gradient(loss)


def ours(impl: str = "auto") -> Contender:
    """Returns our operator."""

    def loss(query_ND: Tensor, given: Problem) -> Tensor:
        return ops.info_nce(query_ND, given.positive_ND, given.banks, given.temperature, impl=impl)  # type: ignore[arg-type]

    return _with_gradient(loss)


class TwoGemms:
    """The two matrix products alone, into memory that is already allocated: no exp, no sum, no gradient.

    This is an upper limit for the speed, not a real implementation. chunk: the number of keys at a time, so that the
    second product finds its input in the cache; 0 takes all keys together.
    """

    def __init__(self, chunk: int = 0) -> None:
        self.chunk = chunk
        self._logits_NK: Tensor | None = None

    def __call__(self, given: Problem) -> Answer:
        query_ND, longest = given.query_ND, max(map(len, given.banks))
        width = min(self.chunk or longest, longest)
        if self._logits_NK is None or self._logits_NK.shape != (len(query_ND), width):
            self._logits_NK = query_ND.new_empty(len(query_ND), width)
        mean_ND = torch.zeros_like(query_ND)
        for bank_KD in given.banks:
            for first in range(0, len(bank_KD), width):
                keys_KD = bank_KD[first : first + width].to(query_ND.dtype)
                logits_NK = self._logits_NK[:, : len(keys_KD)] if len(keys_KD) < width else self._logits_NK
                torch.mm(query_ND, keys_KD.T, out=logits_NK)
                mean_ND.addmm_(logits_NK, keys_KD)
        return mean_ND[:, 0], mean_ND


def oracle(given: Problem, rows: int | None = None) -> Answer:
    """Returns the answer in float64 for the banks' exact numbers, `rows` at a time (by default 32 MB of logits)."""
    rows = rows or max(1, (4 << 20) // max(1, given.num_keys))
    keys_KD = torch.cat([bank.double() for bank in given.banks])
    losses, gradients = [], []
    for first in range(0, len(given.query_ND), rows):
        scaled_ND = given.query_ND[first : first + rows].double() / given.temperature
        positive_ND = given.positive_ND[first : first + rows].double()
        positive_N1 = (scaled_ND * positive_ND).sum(dim=1, keepdim=True)
        logits_NK = torch.cat([positive_N1, scaled_ND @ keys_KD.T], dim=1)
        share_NK = logits_NK.softmax(dim=1)
        losses.append(logits_NK.logsumexp(dim=1) - positive_N1[:, 0])
        mean_ND = share_NK[:, 1:] @ keys_KD + (share_NK[:, :1] - 1) * positive_ND
        gradients.append(mean_ND / given.temperature)
    return torch.cat(losses), torch.cat(gradients)


class Errors(NamedTuple):
    """The largest error of a loss, and of an entry of a gradient."""

    loss: float
    gradient: float

    @classmethod
    def of(cls, answer: Answer, expected: Answer) -> "Errors":
        return cls(*(_largest(mine, theirs) for mine, theirs in zip(answer, expected, strict=True)))

    def budget(self) -> "Errors":
        """Returns the errors that our operator may have if plain torch has these: twice as much plus 1e-5."""
        return Errors(2 * self.loss + 1e-5, 2 * self.gradient + 1e-5)

    def over(self, budget: "Errors") -> float:
        """Returns the used share of the budget, at most 1 if within it. NaN and infinity count as infinite."""
        shares = [mine / allowed for mine, allowed in zip(self, budget, strict=True)]
        return max(shares) if all(map(math.isfinite, shares)) else math.inf


def _largest(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).abs().max()) if mine.numel() else 0.0


def plain(given: Problem) -> Answer:
    """Returns plain torch's answer for the same numbers, with the banks converted to float32."""
    return eager_moco(given._replace(banks=tuple(bank.float() for bank in given.banks)))
