"""Does the photometric part of a view: uint8 crops become normalised channels-last images.

Each sample has its own columns, which hold its parameters. `photometric_torch` is plain torch and defines the result;
the compiled operator computes the same in one pass over memory. Before the final cast to `dtype`, which rounds to
nearest, the operator's result is within 0.02 grey levels (of 255) of the definition. Where a value is that close to the
solarize threshold, the two may fall on different sides of it. On an image constructed for the purpose, the blur's
fixed-point arithmetic could be off by 0.06.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from fastcssl import ops
from fastcssl.data.draws import Column as Column

Photometry = Literal["auto", "fused", "torch"]

# The value of each column that does not change the image.
NEUTRAL = (0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 256.0)
ORDERS = tuple(permutations(range(4)))  # of brightness, contrast, saturation, hue; lexicographic
MAX_RADIUS = 11
GREY = (0.2989, 0.587, 0.114)  # torchvision's


def photometric(
    crops_NHW3: Tensor,
    columns_NC: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
    impl: Photometry = "auto",
) -> Tensor:
    """Returns [N, 3, H, W], channels-last, on the crops' device. `auto` uses the fused operator where there is one."""
    if impl not in ("auto", "fused", "torch"):
        raise ValueError(f"impl is {impl!r}; use 'auto', 'fused' or 'torch'.")
    missing = None if impl == "torch" else ops.missing(crops_NHW3.device)
    if impl == "fused" and missing:
        raise RuntimeError(f"impl='fused' is not possible: {missing}.")
    if impl == "torch" or missing:
        return photometric_torch(crops_NHW3, columns_NC, mean, std, dtype)
    return ops.photometric(crops_NHW3, columns_NC, mean, std, dtype)


def photometric_torch(
    crops_NHW3: Tensor, columns_NC: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Defines `photometric`: float32 on the scale 0..255, clamped after every step, never rounded between steps."""
    _check(crops_NHW3, columns_NC, mean, std, dtype)
    images = crops_NHW3.permute(0, 3, 1, 2).float()
    order = torch.tensor(ORDERS, device=images.device)[columns_NC[:, Column.ORDER].long()]
    jitter = (
        (_brightness, Column.BRIGHTNESS),
        (_contrast, Column.CONTRAST),
        (_saturation, Column.SATURATION),
        (_hue, Column.HUE),
    )
    for position in range(4):
        for number, (operation, column) in enumerate(jitter):
            amount = columns_NC[:, column]
            # Neutral amounts are skipped, because applying them would round.
            rows = (order[:, position] == number) & (amount != NEUTRAL[column])
            images = _where(rows, operation, images, amount)
    gray, sigma, threshold = (columns_NC[:, c] for c in (Column.GRAY, Column.SIGMA, Column.SOLARIZE))
    images = _where(gray != 0, lambda x, _: _grey(x).expand_as(x), images, gray)
    images = _where(sigma > 0, _blur, images, sigma)
    images = _where(threshold <= 255, _solarize, images, threshold)
    flip = columns_NC[:, Column.FLIP]
    images = _where(flip != 0, lambda x, _: x.flip(-1), images, flip)
    shift_3, scale_3 = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (mean, std))
    images = (images / 255 - shift_3) / scale_3
    # contiguous() would not do: it leaves the strides of a 1x1 image as they are.
    return torch.empty_like(images, dtype=dtype, memory_format=torch.channels_last).copy_(images)


def _check(
    crops_NHW3: Tensor, columns_NC: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> None:
    if crops_NHW3.dim() != 4 or crops_NHW3.shape[3] != 3 or crops_NHW3.dtype != torch.uint8:
        raise RuntimeError(
            f"photometric: crops must be uint8 [N, H, W, 3], but is {crops_NHW3.dtype} {list(crops_NHW3.shape)}"
        )
    shape = (len(crops_NHW3), len(Column))
    if tuple(columns_NC.shape) != shape or columns_NC.dtype != torch.float32:
        raise RuntimeError(
            f"photometric: columns must be float32 {list(shape)}, but is {columns_NC.dtype} {list(columns_NC.shape)}"
        )
    if len(mean) != 3 or len(std) != 3:
        raise RuntimeError(f"photometric: mean and std must have 3 values, but have {len(mean)} and {len(std)}")
    if min(std) <= 0:
        raise RuntimeError(f"photometric: std must be positive, but is {list(std)}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(f"photometric: dtype must be float32, bfloat16 or float16, but is {dtype}")


def _where(rows_N: Tensor, operation: Callable[[Tensor, Tensor], Tensor], images: Tensor, amount_N: Tensor) -> Tensor:
    """Returns the images with the operation applied to the selected rows, each with its own amount."""
    index = rows_N.nonzero().squeeze(1)
    if not len(index) or not images.numel():
        return images
    changed = operation(images[index], amount_N[index].view(-1, 1, 1, 1)).clamp(0, 255)
    return images.index_copy(0, index, changed)


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.unsqueeze(1).unbind(2)
    return red * GREY[0] + green * GREY[1] + blue * GREY[2]


def _brightness(images: Tensor, factor: Tensor) -> Tensor:
    return images * factor


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return images * factor + mean * (1 - factor)


def _saturation(images: Tensor, factor: Tensor) -> Tensor:
    return images * factor + _grey(images) * (1 - factor)


def _hue(images: Tensor, turns: Tensor) -> Tensor:
    """Shifts the hue in HSV. Each channel is below the largest by the range times a trapezoid function of the hue."""
    red, green, blue = images.unsqueeze(1).unbind(2)
    top, bottom = images.amax(dim=1, keepdim=True), images.amin(dim=1, keepdim=True)
    span = top - bottom
    divisor = torch.where(span > 0, span, 1)
    hue = torch.where(top == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    hue = torch.where(top == red, (green - blue) / divisor, hue)
    hue = (hue + 6 * turns).remainder(6)
    below = torch.cat((2 - (hue - 3).abs(), (hue - 2).abs() - 1, (hue - 4).abs() - 1), dim=1)
    return top - span * below.clamp(0, 1)


def _blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blurs separably with radius ceil(5.5 sigma), at most MAX_RADIUS, mirroring without repeating the edge."""
    offset = torch.arange(-MAX_RADIUS, MAX_RADIUS + 1, device=images.device)
    weights = torch.exp(-0.5 * (offset / sigma) ** 2) * (offset.abs() <= torch.ceil(5.5 * sigma))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    for dim in (2, 3):
        size = images.shape[dim]
        where = _mirrored(torch.arange(-MAX_RADIUS, size + MAX_RADIUS, device=images.device), size)
        padded = images.index_select(dim, where)
        images = torch.zeros_like(images)
        for tap in range(2 * MAX_RADIUS + 1):
            images += weights[..., tap : tap + 1] * padded.narrow(dim, tap, size)
    return images


def _mirrored(at: Tensor, size: int) -> Tensor:
    """Mirrors indices into range, however far outside they are: an image may be smaller than the radius."""
    if size == 1:
        return torch.zeros_like(at)
    at = at.remainder(2 * (size - 1))
    return torch.minimum(at, 2 * (size - 1) - at)


def _solarize(images: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(images >= threshold, 255 - images, images)
