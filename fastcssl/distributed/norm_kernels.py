"""The five computations of a BatchNorm over ranks: `TorchNorm` in plain torch, `CudaNorm` by torch's CUDA operators.

x is one view on this rank, [N, C] or [N, C, ...]. W ranks, C channels. Every rank has the same number of values per
channel. Statistics are float32 at least. Besides means, ranks exchange variances (`TorchNorm`) or inverse standard
deviations (`CudaNorm`).
"""

from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """The computations that make up a BatchNorm over ranks."""

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns the mean of each channel on this rank, and its spread."""

    def combine(
        self,
        x: Tensor,
        all_W2C: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and inverse standard deviation over all ranks, and moves the running statistics.

        `all_W2C` holds the `statistics` of every rank.
        """

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean_C: Tensor, invstd_C: Tensor, *, out: Tensor
    ) -> None:
        """Writes the normalised x to `out`."""

    def reduce(
        self, grad: Tensor, x: Tensor, mean_C: Tensor, invstd_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns this rank's sums of grad and of grad (x - mean), and the gradients of weight and bias."""

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        mean_C: Tensor,
        invstd_C: Tensor,
        weight: Tensor | None,
        sums_2C: Tensor,
        num_ranks: int,
    ) -> Tensor:
        """Returns the gradient of x, given the two sums of all ranks."""


def per_channel(x: Tensor) -> int:
    """Returns the number of values per channel."""
    return x.numel() // x.shape[1]


def _columns(v_C: Tensor, x: Tensor) -> Tensor:
    return v_C.view(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class TorchNorm:
    """Runs on any device and defines the result. Ranks exchange variances in float64, never sums of squares."""

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var_C, mean_C = torch.var_mean(_wide(x), dims, correction=0)
        return mean_C.double(), var_C.double()

    def combine(
        self,
        x: Tensor,
        all_W2C: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        mean_WC, var_WC = all_W2C.unbind(1)
        mean_C = mean_WC.mean(0)
        var_C = (var_WC + (mean_WC - mean_C).square()).mean(0)
        count = per_channel(x) * len(mean_WC)
        for held_C, value_C in zip(running, (mean_C, var_C * (count / max(1, count - 1))), strict=True):
            if held_C is not None:
                held_C.lerp_(value_C.to(held_C.dtype), momentum)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return mean_C.to(dtype), torch.rsqrt(var_C + eps).to(dtype)

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean_C: Tensor, invstd_C: Tensor, *, out: Tensor
    ) -> None:
        scale_C = invstd_C if weight is None else invstd_C * weight
        y = (_wide(x) - _columns(mean_C, x)) * _columns(scale_C, x)
        out.copy_(y if bias is None else y + _columns(bias, x))

    def reduce(
        self, grad: Tensor, x: Tensor, mean_C: Tensor, invstd_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        sum_C = _wide(grad).sum(dims)
        weighted_C = (_wide(grad) * (_wide(x) - _columns(mean_C, x))).sum(dims)
        return sum_C, weighted_C, weighted_C * invstd_C, sum_C

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        mean_C: Tensor,
        invstd_C: Tensor,
        weight: Tensor | None,
        sums_2C: Tensor,
        num_ranks: int,
    ) -> Tensor:
        mean_grad_C, slope_C = (sums_2C / (per_channel(x) * num_ranks)).unbind()
        along = (_wide(x) - _columns(mean_C, x)) * _columns(slope_C * invstd_C.square(), x)
        scale_C = invstd_C if weight is None else invstd_C * weight
        return ((_wide(grad) - _columns(mean_grad_C, x) - along) * _columns(scale_C, x)).to(x.dtype)


class CudaNorm:
    """Uses the operators that torch's SyncBatchNorm is made of, without its masks, which wait for the device."""

    def __init__(self) -> None:
        self._counts: dict[tuple[torch.device, int, int, torch.dtype], Tensor] = {}

    def _count_W(self, x: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
        key = (x.device, num_ranks, per_channel(x), dtype)
        if key not in self._counts:  # made once: a tensor from a Python number per step would be a launch each
            self._counts[key] = torch.full((num_ranks,), per_channel(x), dtype=dtype, device=x.device)
        return self._counts[key]

    def statistics(self, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.batch_norm_stats(x, eps)

    def combine(
        self,
        x: Tensor,
        all_W2C: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        mean_WC, invstd_WC = all_W2C.unbind(1)
        count_W = self._count_W(x, len(all_W2C), all_W2C.dtype)
        return torch.batch_norm_gather_stats_with_counts(x, mean_WC, invstd_WC, *running, momentum, eps, count_W)

    def normalise(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean_C: Tensor, invstd_C: Tensor, *, out: Tensor
    ) -> None:
        torch.batch_norm_elemt(x, weight, bias, mean_C, invstd_C, 0.0, out=out)

    def reduce(
        self, grad: Tensor, x: Tensor, mean_C: Tensor, invstd_C: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.batch_norm_backward_reduce(grad, x, mean_C, invstd_C, None, True, True, True)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        mean_C: Tensor,
        invstd_C: Tensor,
        weight: Tensor | None,
        sums_2C: Tensor,
        num_ranks: int,
    ) -> Tensor:
        count_W = self._count_W(x, num_ranks, torch.int32)
        sum_C, weighted_C = sums_2C.unbind()
        return torch.batch_norm_backward_elemt(grad, x, mean_C, invstd_C, weight, sum_C, weighted_C, count_W)
