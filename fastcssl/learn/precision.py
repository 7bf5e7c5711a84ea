"""Chooses the number type in which a step computes, and detects networks for which bfloat16 is unsafe on CPUs."""

from typing import Literal

import torch
from torch import Tensor, nn

from fastcssl.learn.nets import mode

Precision = Literal["auto", "bf16", "fp16", "fp32"]
BF16_SINCE = (8, 0)  # the compute capability from which cards compute in bfloat16


def amp_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """Returns the type in which autocast computes, or None for float32 throughout."""
    if precision == "auto":
        if device.type == "cuda":
            # torch.cuda.is_bf16_supported() counts emulation, which is slower than float32.
            return torch.bfloat16 if torch.cuda.get_device_capability(device) >= BF16_SINCE else torch.float16
        can = torch.cpu.get_capabilities()
        return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") or can.get("bf16") else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[precision]


@torch.no_grad()
def strides_over_a_pixel(encoder: nn.Module, size_px: int) -> bool:
    """Returns whether a strided convolution gets maps of one pixel.

    For such a convolution in bfloat16 on CPUs, the weights' gradient is uninitialised memory wherever the kernel covers
    only padding (seen in torch 2.14.1: 3x3, stride 2).
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
