"""The number type that a step computes in, and where a shorter one cannot be trusted."""

from typing import Literal

import torch
from torch import Tensor, nn

from fastcssl.learn.nets import mode

Precision = Literal["auto", "bf16", "fp16", "fp32"]


def amp_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """What autocast computes in; None for float32 throughout."""
    if precision == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        can = torch.cpu.get_capabilities()
        return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16") else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


@torch.no_grad()
def strides_over_a_pixel(encoder: nn.Module, size_px: int) -> bool:
    """Whether a strided convolution sees maps of one pixel.

    Its weights' gradient is uninitialised memory in bfloat16 on CPUs, wherever the kernel only meets padding (seen in
    torch 2.14.1: 3x3, stride 2).
    """
    found = []

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append(max(layer.kernel_size) > 1 and max(layer.stride) > 1 and inputs[0].shape[2:].numel() == 1)

    hooks = [layer.register_forward_pre_hook(look) for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    with mode(encoder, training=False):
        encoder(torch.zeros(1, 3, size_px, size_px))
    for hook in hooks:
        hook.remove()
    return any(found)
