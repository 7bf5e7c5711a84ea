"""Computes InfoNCE against banks of keys in plain torch.

Here are the definition, a sweep that never holds all logits in memory, and writing to a bank as a ring.

Row i has logits q_i.k_j / t_i over the bank rows that it may see, and s_i = q_i.positive_i / t_i. Its loss is the
log-sum-exp of its denominator minus s_i. Let l_i be the log-sum-exp over the banks alone, and mean_i the mean of the
keys weighted by their softmax. Then

                      positive in the denominator    not in it
    loss_i            log(1 + exp(l_i - s_i))        l_i - s_i
    d loss_i / d q_i  w_i (mean_i - positive_i) / t_i
    w_i               sigmoid(l_i - s_i)             1

So one sweep over the banks, chunk by chunk with a running maximum, gives both the loss and its gradient, and backward
only multiplies by a factor. `ops.info_nce` chooses between these and the compiled sweep, and explains the arguments.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Bank rows per chunk. On a CPU, a chunk of logits should fit in the cache; on a GPU, few launches are faster.
CHUNK_CPU, CHUNK_GPU = 1024, 8192

Parts = tuple[Tensor, Tensor, Tensor]  # loss_M, and its derivatives by scaled_MD and positive_MD where wanted


def info_nce_torch(
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    *,
    filled: Sequence[Tensor | None] | None = None,
    own_M: Tensor | None = None,
    positive_in_denominator: bool = True,
) -> Tensor:
    """Defines `info_nce`, with autograd. Banks without a gradient are copied, as they may change before backward."""
    check(query_MD, positive_MD, banks, temperature, filled, own_M)
    dtype = compute_dtype(query_MD, positive_MD)
    with torch.autocast(query_MD.device.type, enabled=False):
        positive_MD = positive_MD.to(dtype)
        scaled_MD = _over(query_MD.to(dtype), temperature)
        positive_M = (scaled_MD * positive_MD).sum(dim=1)
        columns = []
        for bank_KD, count in zip(banks, filled or [None] * len(banks), strict=True):
            keys_KD = bank_KD.to(dtype, copy=not bank_KD.requires_grad)
            columns.append(_logits(scaled_MD, *_visible(keys_KD, 0, count, own_M)))
        if positive_in_denominator:
            columns.append(positive_M[:, None])
        lse_M = torch.cat(columns, dim=1).logsumexp(dim=1)
        return (lse_M - positive_M).masked_fill(lse_M == -math.inf, 0)


def info_nce_chunked(
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    *,
    filled: Sequence[Tensor | None] | None = None,
    own_M: Tensor | None = None,
    positive_in_denominator: bool = True,
    chunk: int | None = None,
) -> Tensor:
    """Returns the same in O(M D + M chunk) memory. Banks get no gradient and may change as soon as this returns."""
    check(query_MD, positive_MD, banks, temperature, filled, own_M)
    size = chunk
    if size is None:
        size = CHUNK_CPU if query_MD.device.type == "cpu" else CHUNK_GPU
    if size < 1:
        raise ValueError(f"info_nce: chunk must be at least 1, but is {size}.")
    counts = filled or [None] * len(banks)

    def chunked(scaled_MD: Tensor, positive_MD: Tensor, wanted: list[bool]) -> Parts:
        parts: Parts = _operator(scaled_MD, positive_MD, banks, counts, own_M, positive_in_denominator, size, wanted)
        return parts

    return info_nce_by(chunked, query_MD, positive_MD, banks, temperature)


def info_nce_by(
    operator: Callable[[Tensor, Tensor, list[bool]], Parts],
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
) -> Tensor:
    """Returns the losses that an operator computes in one sweep, with its gradients. Arguments must be checked."""
    if torch.is_grad_enabled() and any(bank.requires_grad for bank in banks):
        raise ValueError("info_nce: a bank requires a gradient, which a sweep does not compute; use impl='torch'.")
    dtype = compute_dtype(query_MD, positive_MD)
    scaled_MD = _over(query_MD.to(dtype), temperature)
    positive_MD = positive_MD.to(dtype)
    parts = operator(scaled_MD.detach(), positive_MD.detach(), [scaled_MD.requires_grad, positive_MD.requires_grad])
    loss_M: Tensor = _WithGradient.apply(scaled_MD, positive_MD, *parts)
    return loss_M


class _WithGradient(torch.autograd.Function):
    """Takes (scaled, positive, the three results of `sweep`) and returns the losses, with their gradients."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        _, _, loss_M, by_scaled_MD, by_positive_MD = tensors
        ctx.save_for_backward(by_scaled_MD, by_positive_MD)
        return loss_M.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(unit_MD * grad_M[:, None] if wants else None for unit_MD, wants in wanted), None, None, None)


def sweep(
    scaled_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    filled: Sequence[Tensor | None],
    own_M: Tensor | None,
    positive_in_denominator: bool,
    chunk: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses, and their derivatives by scaled queries and by positives. Unwanted derivatives are empty."""
    # The lowest finite number instead of -inf: a difference from it underflows to 0 in exp and never becomes NaN.
    peak_M = scaled_MD.new_full(scaled_MD.shape[:1], torch.finfo(scaled_MD.dtype).min)
    total_M = torch.zeros_like(peak_M)
    mean_MD = torch.zeros_like(scaled_MD)  # multiplied by the total until the end
    with torch.autocast(scaled_MD.device.type, enabled=False):
        for bank_KD, count in zip(banks, filled, strict=True):
            for first in range(0, len(bank_KD), chunk):
                keys_KD = bank_KD[first : first + chunk].to(scaled_MD.dtype)
                keys_KD, hidden = _visible(keys_KD, first, count, own_M)
                logits_MK = _logits(scaled_MD, keys_KD, hidden)
                before_M, peak_M = peak_M, torch.maximum(peak_M, logits_MK.amax(dim=1))
                shrink_M = (before_M - peak_M).exp_()
                share_MK = logits_MK.sub_(peak_M[:, None]).exp_()
                total_M.mul_(shrink_M).add_(share_MK.sum(dim=1))
                if wanted[0]:
                    mean_MD.mul_(shrink_M[:, None]).addmm_(share_MK, keys_KD)
    mean_MD.div_(total_M.clamp_min(1)[:, None])  # a row that saw a key has a total of at least 1
    margin_M = peak_M + total_M.log() - (scaled_MD * positive_MD).sum(dim=1)
    if positive_in_denominator:
        loss_M, weight_M = torch.logaddexp(margin_M, torch.zeros_like(margin_M)), margin_M.sigmoid()
    else:
        loss_M, weight_M = margin_M.masked_fill(total_M == 0, 0), (total_M != 0).to(margin_M.dtype)
    nothing = loss_M.new_empty(0)
    return (
        loss_M,
        mean_MD.sub_(positive_MD).mul_(weight_M[:, None]) if wanted[0] else nothing,
        scaled_MD * -weight_M[:, None] if wanted[1] else nothing.clone(),
    )


# A custom operator, so that torch.compile does not trace the loop.
_operator = torch.library.custom_op("fastcssl::info_nce_chunked", sweep, mutates_args=())


@_operator.register_fake
def _sweep_shape(scaled_MD: Tensor, positive_MD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    nothing = scaled_MD.new_empty(0)
    by_scaled_MD, by_positive_MD = (
        torch.empty_like(x_MD) if wants else nothing.clone()
        for x_MD, wants in zip((scaled_MD, positive_MD), arguments[-1], strict=True)
    )
    return scaled_MD.new_empty(len(scaled_MD)), by_scaled_MD, by_positive_MD


@torch.no_grad()
def enqueue_torch(bank_KD: Tensor, keys_GD: Tensor, pointer: Tensor, filled: Tensor, *, normalise: bool = True) -> None:
    """Defines `ops.enqueue`."""
    size, count = len(bank_KD), len(keys_GD)
    skipped = max(0, count - size)  # these would be overwritten immediately
    keys_GD = keys_GD[skipped:].to(torch.promote_types(keys_GD.dtype, torch.float32))
    if normalise:
        keys_GD = functional.normalize(keys_GD, dim=1)
    place = (pointer + torch.arange(skipped, count, device=bank_KD.device)) % size
    bank_KD.index_copy_(0, place, keys_GD.to(bank_KD.dtype))
    pointer.add_(count).remainder_(size)
    filled.add_(count).clamp_(max=size)


def _visible(keys_KD: Tensor, first: int, count: Tensor | None, own_M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the keys, with unfilled rows set to zero (they may hold anything), and a mask of the hidden logits."""
    if count is None and own_M is None:
        return keys_KD, None
    column_K = torch.arange(first, first + len(keys_KD), device=keys_KD.device)
    hidden = None if own_M is None else column_K == own_M[:, None]
    if count is not None:
        unfilled_K = column_K >= count
        keys_KD = keys_KD.masked_fill(unfilled_K[:, None], 0)
        hidden = unfilled_K if hidden is None else hidden | unfilled_K
    return keys_KD, hidden


def _logits(scaled_MD: Tensor, keys_KD: Tensor, hidden: Tensor | None) -> Tensor:
    logits_MK = scaled_MD @ keys_KD.T
    return logits_MK if hidden is None else logits_MK.masked_fill_(hidden, -math.inf)


def compute_dtype(query_MD: Tensor, positive_MD: Tensor) -> torch.dtype:
    """Returns the type in which the loss is computed."""
    return torch.float64 if torch.float64 in (query_MD.dtype, positive_MD.dtype) else torch.float32


def _over(x_MD: Tensor, temperature: float | Tensor) -> Tensor:
    return x_MD / (temperature.to(x_MD.dtype)[:, None] if isinstance(temperature, Tensor) else temperature)


def check(
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    filled: Sequence[Tensor | None] | None,
    own_M: Tensor | None,
) -> None:
    """Checks shapes, types and devices, but not values of tensors: reading them would wait for the GPU."""
    if query_MD.dim() != 2 or query_MD.dtype not in FLOATS:
        raise ValueError(f"info_nce: query must be [M, D] of floats, but is {kind(query_MD)}.")
    num_rows, dim = query_MD.shape
    if positive_MD.shape != query_MD.shape or positive_MD.dtype not in FLOATS:
        raise ValueError(f"info_nce: positive must be floats {[num_rows, dim]} as query, but is {kind(positive_MD)}.")
    if isinstance(banks, Tensor) or not banks:
        raise ValueError("info_nce: banks must be a sequence of at least one [K, D] tensor.")
    for number, bank in enumerate(banks):
        if bank.dim() != 2 or bank.shape[1] != dim or bank.dtype not in FLOATS:
            raise ValueError(f"info_nce: bank {number} must be floats [K, {dim}], but is {kind(bank)}.")
    if filled is not None and len(filled) != len(banks):
        raise ValueError(f"info_nce: filled must have one entry for each of {len(banks)} banks, but has {len(filled)}.")
    for number, count in enumerate(filled or ()):
        if count is not None and (count.dim() != 0 or count.dtype != torch.int64):
            raise ValueError(f"info_nce: filled[{number}] must be None or a 0-d int64 tensor, but is {kind(count)}.")
    if own_M is not None and (own_M.shape != (num_rows,) or own_M.dtype != torch.int64):
        raise ValueError(f"info_nce: own must be int64 [{num_rows}], one column per row, but is {kind(own_M)}.")
    for name, tensor in (("positive", positive_MD), ("own", own_M), *((f"bank {i}", b) for i, b in enumerate(banks))):
        if tensor is not None and tensor.device != query_MD.device:
            raise ValueError(f"info_nce: {name} is on {tensor.device}, but query is on {query_MD.device}.")
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_rows,) or temperature.dtype not in FLOATS:
            raise ValueError(
                f"info_nce: temperature must be a number or floats [{num_rows}], but is {kind(temperature)}."
            )
    elif not 0 < temperature < math.inf:
        raise ValueError(f"info_nce: temperature must be positive, but is {temperature}.")


def kind(tensor: Tensor) -> str:
    """Returns the type and shape of a tensor, for error messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
