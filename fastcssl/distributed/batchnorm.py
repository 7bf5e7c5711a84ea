"""BatchNorm that normalises each view of a stacked batch by its own statistics, over the rows of all ranks.

The views of a batch pass through a network together, so that there is one convolution, and one exchange between ranks,
where separate passes have one per view. The results are those of separate passes, in the order of the views.

V views, W ranks, C channels.
"""

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fastcssl.distributed.norm_kernels import CudaNorm, Kernels, TorchNorm
from fastcssl.distributed.world import World
from fastcssl.errors import UserError

Module = TypeVar("Module", bound=nn.Module)
Running = tuple[Tensor | None, Tensor | None]

_KERNELS: dict[str, Kernels] = {"cuda": CudaNorm(), "cpu": TorchNorm()}
_TORCH_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class StackedViews:
    """The number of views in the batch that a network is given now. The BatchNorm layers of a network share one.

    0 means that no pass over views is under way; a layer then takes its input for one view and counts it itself.
    """

    def __init__(self) -> None:
        self.count = 0


class ViewBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A BatchNorm whose training statistics are those of one view and span the rows of all ranks.

    In training the result is that of BatchNorm1d or BatchNorm2d on one process that holds all rows of a view. Running
    statistics are updated once per view, in their order. In evaluation the layer is an ordinary BatchNorm. Every rank
    must bring the same number of rows.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm, world: World, views: StackedViews) -> None:
        """Takes over the given layer's own parameters and buffers, not copies of them."""
        super().__init__(layer.num_features, layer.eps, layer.momentum, False, layer.track_running_stats)
        self.affine, self.weight, self.bias = layer.affine, layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.training = layer.training
        self.world, self.views = world, views
        self.after = _follow_up(layer)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs [N, C] or [N, C, ...], but the input is {list(input.shape)}.")

    def forward(self, input: Tensor) -> Tensor:
        y = self._normalised(input) if self.training else super().forward(input)
        return y if self.after is None else self.after(y)

    def _normalised(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        num_views = max(1, self.views.count)
        running: Running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        momenta = self._momenta(num_views)
        if self.views.count == 0 and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.world.size > 1:
            kernels = _KERNELS[x.device.type]
            y = _AcrossRanks.apply(x, self.weight, self.bias, running, momenta, self.eps, self.world, kernels)
        elif num_views == 1 or torch.compiler.is_compiling():  # compiled, the parts below are fused anyway
            y = view_batch_norm(x, self.weight, self.bias, running, momenta, self.eps)
        else:
            y = _OnOneRank.apply(x, self.weight, self.bias, running, momenta, self.eps)
        return cast(Tensor, y)

    def _momenta(self, num_views: int) -> list[float]:
        """Returns the weight of each view's statistics. Without a momentum, the running statistics are plain means."""
        if self.momentum is not None or not self.track_running_stats or self.num_batches_tracked is None:
            return [self.momentum or 0.0] * num_views
        seen = int(self.num_batches_tracked)
        return [1 / (seen + view + 1) for view in range(num_views)]


def view_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, momenta: list[float], eps: float
) -> Tensor:
    """Returns torch's BatchNorm of each of the stacked views, on one rank. It defines what the faster forms compute."""
    parts = [
        functional.batch_norm(part, *running, weight, bias, True, momentum, eps)
        for part, momentum in zip(x.chunk(len(momenta)), momenta, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _OnOneRank(torch.autograd.Function):
    """Computes `view_batch_norm`, but writes each view directly to its place in the output, without a second copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running,
        momenta: list[float],
        eps: float,
    ) -> Tensor:
        y = torch.empty_like(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        saved_V2C = torch.empty(len(momenta), 2, x.shape[1], dtype=dtype, device=x.device)
        for part, out, saved_2C, momentum in zip(*_chunks(len(momenta), x, y), saved_V2C, momenta, strict=True):
            torch.ops.aten.native_batch_norm.out(
                part,
                weight,
                bias,
                *running,
                True,
                momentum,
                eps,
                out=out,
                save_mean=saved_2C[0],
                save_invstd=saved_2C[1],
            )
        ctx.save_for_backward(x, weight, saved_V2C)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, saved_V2C = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], weight is not None, weight is not None]
        of_x, of_weight, of_bias = zip(
            *(
                torch.ops.aten.native_batch_norm_backward(g, part, weight, None, None, *saved_2C, True, ctx.eps, mask)
                for g, part, saved_2C in zip(*_chunks(len(saved_V2C), _laid_out(grad, x), x), saved_V2C, strict=True)
            ),
            strict=True,
        )
        return torch.cat(of_x) if mask[0] else None, *_sums(weight, of_weight, of_bias), None, None, None


class _AcrossRanks(torch.autograd.Function):
    """BatchNorm of each view over the rows of all ranks: one gather forward, one sum backward, for all views."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running,
        momenta: list[float],
        eps: float,
        world: World,
        kernels: Kernels,
    ) -> Tensor:
        x = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
        y = torch.empty_like(x)
        num_views = len(momenta)
        parts, outs = _chunks(num_views, x, y)
        own = torch.cat([part for view in parts for part in kernels.statistics(view, eps)])
        all_WV2C = world.collect_rows(own[None]).view(world.size, num_views, 2, -1)
        saved = []
        for view, (part, out, momentum) in enumerate(zip(parts, outs, momenta, strict=True)):
            mean_C, invstd_C = kernels.combine(part, all_WV2C[:, view], running, momentum, eps)
            kernels.normalise(part, weight, bias, mean_C, invstd_C, out=out)
            saved += [mean_C, invstd_C]
        ctx.save_for_backward(x, weight, *saved)
        ctx.world, ctx.kernels, ctx.has_bias = world, kernels, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        kernels, world, num_views = ctx.kernels, ctx.world, len(saved) // 2
        means, invstds = saved[::2], saved[1::2]
        grads, parts = _chunks(num_views, _laid_out(grad, x), x)
        reduced = [kernels.reduce(*of) for of in zip(grads, parts, means, invstds, strict=True)]
        of_x = None
        if ctx.needs_input_grad[0]:
            own = torch.cat([sum_C for sums in reduced for sum_C in sums[:2]])
            sums_V2C = world.add_over_ranks_(own).view(num_views, 2, -1)
            of_x = torch.cat(
                [
                    kernels.backward(g, part, mean_C, invstd_C, weight, sums_2C, world.size)
                    for g, part, mean_C, invstd_C, sums_2C in zip(grads, parts, means, invstds, sums_V2C, strict=True)
                ]
            )
        _, _, of_weight, of_bias = zip(*reduced, strict=True)
        return of_x, *_sums(weight, of_weight, of_bias), None, None, None, None, None


def _chunks(num_views: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tensor.chunk(num_views) for tensor in tensors]


def _laid_out(grad: Tensor, x: Tensor) -> Tensor:
    """Returns the gradient in the memory format of the input, which the kernels expect."""
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return grad.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _sums(weight: Tensor | None, *of_views: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of weight and bias, which the views share. Both are there, or neither is."""
    if weight is None:
        return None, None
    total, *others = zip(*of_views, strict=True)  # one (weight, bias) per view
    for grads in others:
        total = tuple(torch._foreach_add(total, grads))
    return total


def synchronised(module: Module, world: World) -> Module:
    """Returns the module with a `ViewBatchNorm` for every BatchNorm of torch or timm.

    Its statistics span all ranks, whatever the scope, as in the released multi-GPU scripts. The module is changed in
    place: each layer is replaced by one that keeps its weights and statistics.
    """
    everyone, views = replace(world, scope="global"), StackedViews()
    return cast(Module, _replaced(module, everyone, views, {}))


def _replaced(module: nn.Module, world: World, views: StackedViews, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Converts the layers in place. `done` makes sure that a layer used twice stays one layer."""
    if module in done:
        return done[module]
    done[module] = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, ViewBatchNorm):
        if type(module) in _TORCH_LAYERS or _is_timms(module):
            done[module] = ViewBatchNorm(module, world, views)
        elif world.size > 1:
            raise UserError(
                f"The encoder has a BatchNorm of the class {type(module).__name__}, whose statistics cannot be shared "
                "among ranks. Train on one GPU, or use an encoder with torch's or timm's BatchNorm."
            )
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _replaced(child, world, views, done)
    return done[module]


def _is_timms(layer: nn.Module) -> bool:
    """Returns whether this is timm's BatchNorm with an activation."""
    return type(layer).__name__ == "BatchNormAct2d" and type(layer).__module__.startswith("timm.")


def _follow_up(layer: nn.Module) -> nn.Module | None:
    """Returns what the layer does after normalising: the dropout and activation of timm's BatchNorm."""
    return nn.Sequential(layer.drop, layer.act) if _is_timms(layer) else None  # type: ignore[arg-type]
