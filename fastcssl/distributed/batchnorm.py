"""BatchNorm over the rows of all ranks on the CPU, where torch's SyncBatchNorm does not run."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fastcssl.distributed.world import World


class BatchNormAcrossRanks(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm whose training statistics span the rows of all ranks.

    In training the result is that of BatchNorm1d or BatchNorm2d on one process that holds all rows. In evaluation the
    layer is an ordinary BatchNorm. Ranks exchange the mean, variance and count of each channel, never sums of squares,
    because those lose precision to cancellation in float32.
    """

    def __init__(
        self,
        num_features: int,
        world: "World",
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.world = world

    @classmethod
    def like(cls, layer: nn.modules.batchnorm._BatchNorm, world: "World") -> "BatchNormAcrossRanks":
        """Returns a layer that takes over the given layer's own parameters and buffers, not copies of them."""
        new = cls(
            layer.num_features,
            world,
            eps=layer.eps,
            momentum=layer.momentum,
            affine=False,
            track_running_stats=layer.track_running_stats,
        )
        new.affine, new.weight, new.bias = layer.affine, layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        new.training = layer.training
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs [N, C] or [N, C, ...], but the input is {list(input.shape)}.")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.world.size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var_C, mean_C = torch.var_mean(x, dims, correction=0)
        own_3C = torch.stack((mean_C, var_C, torch.full_like(mean_C, x.numel() // x.shape[1]))).double()
        mean_WC, var_WC, count_WC = self.world.gather(own_3C[None]).unbind(1)  # W ranks
        count_C = count_WC.sum(0)
        mean_C = (count_WC * mean_WC).sum(0) / count_C
        var_C = (count_WC * (var_WC + (mean_WC - mean_C) ** 2)).sum(0) / count_C
        self._track(mean_C.detach(), (var_C * count_C / (count_C - 1)).detach())

        shape = (1, -1, *[1] * (x.dim() - 2))
        scale_C = torch.rsqrt(var_C + self.eps).to(x.dtype)
        if self.weight is not None:
            scale_C = scale_C * self.weight
        y = (x - mean_C.to(x.dtype).view(shape)) * scale_C.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean_C: Tensor, unbiased_var_C: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased_var_C.to(self.running_var.dtype), weight)
