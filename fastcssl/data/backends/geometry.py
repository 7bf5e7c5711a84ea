"""Crops a batch of images in plain torch, on any device. Two small matrices resample the box of each image."""

import torch

from fastcssl.data.views import ViewSpec


def crop_batch(images_NHW3: torch.Tensor, box_N4: torch.Tensor, spec: ViewSpec) -> torch.Tensor:
    """Returns uint8 [N, size, size, 3]. Each row of a weight matrix sums to one. Only the final values are rounded."""
    height, width = images_NHW3.shape[1:3]
    left_N, top_N, right_N, bottom_N = box_N4.double().unbind(1)
    down_NOH = _weights(top_N, bottom_N, height, spec)
    across_NOW = _weights(left_N, right_N, width, spec)
    pixels_NHW3 = images_NHW3.to(down_NOH.dtype)
    rows_NOW3 = torch.einsum("noh,nhwc->nowc", down_NOH, pixels_NHW3)
    crops_NOP3 = torch.einsum("npw,nowc->nopc", across_NOW, rows_NOW3)
    return crops_NOP3.round_().clamp_(0, 255).to(torch.uint8)


def _weights(begin_N: torch.Tensor, end_N: torch.Tensor, source: int, spec: ViewSpec) -> torch.Tensor:
    """Returns [N, out, source]: the weight of each source pixel in each output pixel (csrc/codec/resize.cpp)."""
    out = spec.size_px
    device = begin_N.device
    scale_N11 = ((end_N - begin_N) / out)[:, None, None]
    stretch_N11 = scale_N11.clamp(min=1.0) if spec.antialias else torch.ones_like(scale_N11)
    center_NO1 = (
        begin_N[:, None, None] + (torch.arange(out, device=device, dtype=torch.float64)[:, None] + 0.5) * scale_N11
    )
    pixel_S = torch.arange(source, device=device, dtype=torch.float64)
    weight_NOS = _kernel(((pixel_S + 0.5 - center_NO1) / stretch_N11).abs(), spec)
    low_N11, high_N11 = begin_N.floor()[:, None, None], end_N.ceil()[:, None, None]
    if spec.antialias:
        if spec.crop != "center":  # cropped first, then resized: pixels outside the box do not count
            weight_NOS = weight_NOS.masked_fill((pixel_S < low_N11) | (pixel_S >= high_N11), 0.0)
        weight_NOS = weight_NOS / weight_NOS.sum(2, keepdim=True)
    else:
        weight_NOS = _with_repeated_edge(weight_NOS, center_NO1, low_N11, high_N11, spec)
    return weight_NOS.float()


def _with_repeated_edge(
    weight_NOS: torch.Tensor,
    center_NO1: torch.Tensor,
    low_N11: torch.Tensor,
    high_N11: torch.Tensor,
    spec: ViewSpec,
) -> torch.Tensor:
    """Returns weights that repeat the edge pixel of the box (or of the image) outside it, as torch does."""
    source = weight_NOS.shape[2]
    if spec.crop == "center":
        low_N11, high_N11 = torch.zeros_like(low_N11), torch.full_like(high_N11, float(source))
    first_NO1 = (center_NO1 - 2.5).floor()
    tap_NOT = first_NO1 + torch.arange(6, device=weight_NOS.device, dtype=torch.float64)
    value_NOT = _kernel((tap_NOT + 0.5 - center_NO1).abs(), spec)
    index_NOT = tap_NOT.maximum(low_N11).minimum(high_N11 - 1).long()
    return torch.zeros_like(weight_NOS).scatter_add_(2, index_NOT, value_NOT)


def _kernel(x: torch.Tensor, spec: ViewSpec) -> torch.Tensor:
    if spec.interpolation == "bilinear":
        return (1.0 - x).clamp(min=0.0)
    a = -0.5 if spec.antialias else -0.75
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, torch.zeros_like(x)))
