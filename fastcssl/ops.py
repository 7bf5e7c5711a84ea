"""The operators: loads those that csrc compiles and tells torch.compile their shapes; chooses among several versions.

FASTCSSL_OPS_LIBRARY  a library to load in place of the installed one, for tests of another build
"""

import importlib.machinery
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fastcssl.infonce import info_nce_chunked, info_nce_torch


def _library() -> Path | None:
    chosen = os.environ.get("FASTCSSL_OPS_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise FileNotFoundError(f"FASTCSSL_OPS_LIBRARY is {chosen!r}, which is no file; unset it or correct it.")
        return Path(chosen)
    paths = (Path(__file__).with_name("_ops" + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


_PATH = _library()
_DEVICES: frozenset[str] = frozenset()
if _PATH is not None:
    torch.ops.load_library(_PATH)  # type: ignore[no-untyped-call]
    # Asked once, not in missing(): torch.compile cannot trace the question.
    _DEVICES = frozenset(
        device
        for device in ("cpu", "cuda")
        if torch._C._dispatch_has_kernel_for_dispatch_key("fastcssl::photometric", device.upper())
    )

    @torch.library.register_fake("fastcssl::photometric")  # type: ignore[untyped-decorator]
    def _photometric_shape(
        crops: Tensor, columns: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
    ) -> Tensor:
        torch._check(crops.dim() == 4 and crops.shape[3] == 3, lambda: f"crops must be [N, H, W, 3]: {crops.shape}")
        torch._check(crops.device == columns.device, lambda: "crops and columns must be on the same device")
        torch._check(len(mean) == 3 and len(std) == 3, lambda: "mean and std must have 3 values each")
        num_images, height, width, _ = crops.shape
        shape = (num_images, 3, height, width)
        return torch.empty(shape, dtype=dtype, device=crops.device, memory_format=torch.channels_last)


def missing(device: str) -> str | None:
    """Why there are no compiled operators for this kind of device ("cpu", "cuda"), or None when there are."""
    if _PATH is None:
        return "fastcssl was installed without its compiled operators; reinstall it with a C++ compiler"
    if device not in _DEVICES:
        return f"this build of fastcssl has no operators for {device}; reinstall it with FASTCSSL_CUDA=1, nvcc on PATH"
    return None


def photometric(
    crops_NHW3: Tensor, columns_NC: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The fused operator. augment.py says what it computes and chooses between it and plain torch."""
    out: Tensor = torch.ops.fastcssl.photometric(crops_NHW3, columns_NC, mean, std, dtype)
    return out


def photometric_isa(choose: str = "") -> str:
    """The CPU's instruction set in use: avx512, avx2 or portable. `choose` forces one for tests, "auto" undoes that."""
    name: str = torch.ops.fastcssl.photometric_isa(choose)
    return name


def info_nce(
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    *,
    filled: Sequence[Tensor | None] | None = None,
    own_M: Tensor | None = None,
    positive_in_denominator: bool = True,
    impl: Literal["auto", "chunked", "torch"] = "auto",
) -> Tensor:
    """loss_M = log-sum-exp over the banks' logits (and the positive's, if so asked) minus the positive's logit.

    Nothing is normalised here. Rows of bank b from filled[b] on are hidden, and from query i also row own_M[i] of every
    bank (a number beyond a bank hides nothing). A query that sees no key has loss 0 and no gradient.
    Gradients go to query, positive and, by `torch` alone, to banks. It computes in float32, or float64 if query or
    positive is that. `auto` is `torch` in the batch (own_M is given, or a bank requires a gradient), else `chunked`.
    """
    if impl not in ("auto", "chunked", "torch"):
        raise ValueError(f"impl is {impl!r}; use 'auto', 'chunked' or 'torch'.")
    if impl == "auto":
        impl = "torch" if own_M is not None or any(bank.requires_grad for bank in banks) else "chunked"
    function = info_nce_torch if impl == "torch" else info_nce_chunked
    loss_M: Tensor = function(
        query_MD,
        positive_MD,
        banks,
        temperature,
        filled=filled,
        own_M=own_M,
        positive_in_denominator=positive_in_denominator,
    )
    return loss_M
