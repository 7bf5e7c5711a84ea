"""Shapes and types of torch's CUDA operators for a BatchNorm over ranks, which torch does not know for fake tensors."""

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")


def _channels(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))


def register() -> None:
    """Makes the operators known to `FakeTensorMode`. Call it once per process."""

    def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        return _channels(x), _channels(x)

    def gather_stats(x: Tensor, mean: Tensor, invstd: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        assert mean.dim() == 2 and mean.shape == invstd.shape and mean.shape[1] == x.shape[1]
        return _channels(x), _channels(x)

    def elemt_out(x: Tensor, *rest: object, out: Tensor) -> Tensor:
        assert out.shape == x.shape and len(rest) == 5
        return out

    def reduce(grad: Tensor, x: Tensor, *_: object) -> tuple[Tensor, ...]:
        assert grad.shape == x.shape and grad.dtype == x.dtype
        return tuple(_channels(x) for _ in range(4))

    def backward(grad: Tensor, x: Tensor, *rest: object) -> Tensor:
        assert grad.shape == x.shape and isinstance(rest[-1], Tensor) and rest[-1].dtype == torch.int32
        return torch.empty_like(x)

    _LIBRARY.impl("batch_norm_stats", stats, "Meta")
    _LIBRARY.impl("batch_norm_gather_stats_with_counts", gather_stats, "Meta")
    _LIBRARY.impl("batch_norm_elemt.out", elemt_out, "Meta")
    _LIBRARY.impl("batch_norm_elemt", lambda x, *_: torch.empty_like(x), "Meta")
    _LIBRARY.impl("batch_norm_backward_reduce", reduce, "Meta")
    _LIBRARY.impl("batch_norm_backward_elemt", backward, "Meta")
