"""Loads the compiled operators of csrc, registers their shapes for torch.compile, and chooses among implementations.

FASTCSSL_OPS_LIBRARY  a library to load instead of the installed one, for tests of another build
"""

import importlib.machinery
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fastcssl.ops import cards
from fastcssl.ops.infonce import (
    FLOATS,
    Parts,
    check,
    compute_dtype,
    enqueue_torch,
    info_nce_by,
    info_nce_chunked,
    info_nce_torch,
    kind,
)

Impl = Literal["auto", "cuda", "cpu", "chunked", "torch"]
STORED = (torch.float32, torch.float16, torch.bfloat16)  # the types that the compiled sweeps read and write
CUDA_WIDEST = 256  # the largest D of the CUDA kernels; it must also be a multiple of 8


def _library() -> Path | None:
    chosen = os.environ.get("FASTCSSL_OPS_LIBRARY")
    if chosen:
        if not Path(chosen).is_file():
            raise FileNotFoundError(f"FASTCSSL_OPS_LIBRARY is {chosen!r}, which is not a file; unset it or correct it.")
        return Path(chosen)
    paths = (Path(__file__).with_name("_ops" + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


_PATH = _library()
_DEVICES: dict[str, frozenset[str]] = {}
_ARCHITECTURES: tuple[str, ...] = ()  # such as sm_80 and compute_120; empty without CUDA
if _PATH is not None:
    torch.ops.load_library(_PATH)  # type: ignore[no-untyped-call]
    # Done once here and not in missing(), because torch.compile cannot trace it.
    _DEVICES = {
        name: frozenset(
            device
            for device in ("cpu", "cuda")
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"fastcssl::{name}", device.upper())
        )
        for name in ("photometric", "info_nce_sweep")
    }

    _ARCHITECTURES = tuple(filter(None, torch.ops.fastcssl.cuda_architectures().split(";")))

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

    @torch.library.register_fake("fastcssl::info_nce_sweep")  # type: ignore[untyped-decorator]
    @torch.library.register_fake("fastcssl::info_nce_sweep_enqueue")  # type: ignore[untyped-decorator]
    def _sweep_shape(scaled: Tensor, positive: Tensor, *arguments: Any) -> Parts:
        by_scaled, by_positive = (
            x.new_empty(x.shape if wants else 0) for x, wants in zip((scaled, positive), arguments[-2], strict=True)
        )
        return scaled.new_empty(len(scaled)), by_scaled, by_positive

    @torch.library.register_fake("fastcssl::enqueue")  # type: ignore[untyped-decorator]
    def _enqueue_shape(*arguments: Any) -> None:
        pass


def missing(device: str | torch.device, operator: str = "photometric") -> str | None:
    """Returns why an operator is not compiled for a device, or None if it is. Every choice of an operator asks this.

    "cuda" without an index is the current card. Without any card, the answer is about what was compiled.
    """
    device = torch.device(device)
    if _PATH is None:
        return "fastcssl was installed without its compiled operators; reinstall it with a C++ compiler"
    if device.type not in _DEVICES[operator]:
        return (
            f"this build of fastcssl has no operators for {device.type}; reinstall it with FASTCSSL_CUDA=1, nvcc on "
            "PATH"
        )
    return _unfit(-1 if device.index is None else device.index) if device.type == "cuda" else None


def architectures() -> tuple[str, ...]:
    """Returns what the library holds for cards: sm_80 is machine code, compute_120 is PTX."""
    return _ARCHITECTURES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unfit(index: int) -> str | None:
    if not torch.cuda.is_available():
        return None
    return _unfit_card(torch.cuda.current_device() if index < 0 else index)


@cache
def _unfit_card(index: int) -> str | None:
    return cards.unfit(_ARCHITECTURES, torch.cuda.get_device_capability(index))


def photometric(
    crops_NHW3: Tensor, columns_NC: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Calls the fused operator. data/augment.py defines the result and chooses between this and plain torch."""
    out: Tensor = torch.ops.fastcssl.photometric(crops_NHW3, columns_NC, mean, std, dtype)
    return out


def photometric_isa(choose: str = "") -> str:
    """Returns the instruction set in use: avx512, avx2 or portable. `choose` forces one for tests; "auto" undoes it."""
    name: str = torch.ops.fastcssl.photometric_isa(choose)
    return name


def info_nce_isa(choose: str = "") -> str:
    """Does the same as photometric_isa, for the sweep."""
    name: str = torch.ops.fastcssl.info_nce_isa(choose)
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
    impl: Impl = "auto",
) -> Tensor:
    """Returns loss_M, the log-sum-exp over the banks' logits minus the positive's logit.

    With `positive_in_denominator`, the log-sum-exp includes the positive's logit. Nothing is normalised here. Rows of
    bank b from filled[b] on are hidden from all queries. Row own_M[i] of every bank is hidden from query i (a number
    beyond the end of a bank hides nothing). A query that sees no key has loss 0 and no gradient.
    Gradients go to query and positive; only `torch` also gives gradients to banks. The computation is in float32, or in
    float64 if query or positive is float64.

    `impl`: `cpu` and `cuda` are the compiled sweeps for float32, float16 and bfloat16 banks, `chunked` is the same in
    torch, and `torch` is the definition. `auto` is `torch` when a bank requires a gradient, else a compiled sweep if
    there is one for these tensors, else `chunked`.
    """
    check(query_MD, positive_MD, banks, temperature, filled, own_M)
    impl = _chosen(impl, query_MD, positive_MD, banks)
    options: dict[str, Any] = {"filled": filled, "own_M": own_M, "positive_in_denominator": positive_in_denominator}
    if impl == "torch":
        return info_nce_torch(query_MD, positive_MD, banks, temperature, **options)
    if impl == "chunked":
        return info_nce_chunked(query_MD, positive_MD, banks, temperature, **options)

    def compiled(scaled_MD: Tensor, positive_MD: Tensor, wanted: list[bool]) -> Parts:
        parts: Parts = torch.ops.fastcssl.info_nce_sweep(
            scaled_MD,
            positive_MD,
            banks,
            filled or [None] * len(banks),
            own_M,
            positive_in_denominator,
            wanted,
            _exact(impl),
        )
        return parts

    return info_nce_by(compiled, query_MD, positive_MD, banks, temperature)


def info_nce_enqueue(
    query_MD: Tensor,
    positive_MD: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    keys: Sequence[Tensor | None],
    pointers: Sequence[Tensor | None],
    *,
    filled: Sequence[Tensor | None],
    own_M: Tensor | None = None,
    positive_in_denominator: bool = True,
    normalise: bool = True,
    impl: Impl = "auto",
) -> Tensor:
    """Does `info_nce`, then `enqueue` of keys[b] into bank b, in one operator. Banks with keys None are only read."""
    check(query_MD, positive_MD, banks, temperature, filled, own_M)
    if len(keys) != len(banks) or len(pointers) != len(banks):
        seen = f"but has {len(keys)} and {len(pointers)}"
        raise ValueError(
            f"info_nce_enqueue: keys and pointers must have one entry for each of {len(banks)} banks, {seen}."
        )
    written = [b for b, new in enumerate(keys) if new is not None]
    for b in written:
        _check_ring("info_nce_enqueue", banks[b], keys[b], pointers[b], filled[b])
    impl = _chosen(impl, query_MD, positive_MD, banks)
    if impl in ("torch", "chunked") or not written:
        options: dict[str, Any] = {"own_M": own_M, "positive_in_denominator": positive_in_denominator}
        loss_M = info_nce(query_MD, positive_MD, banks, temperature, filled=filled, impl=impl, **options)
        for b in written:
            new, pointer, count = keys[b], pointers[b], filled[b]
            assert new is not None and pointer is not None and count is not None
            enqueue_torch(banks[b], new, pointer, count, normalise=normalise)
        return loss_M
    others = [b for b, new in enumerate(keys) if new is None]

    def compiled(scaled_MD: Tensor, positive_MD: Tensor, wanted: list[bool]) -> Parts:
        parts: Parts = torch.ops.fastcssl.info_nce_sweep_enqueue(
            scaled_MD,
            positive_MD,
            [banks[b] for b in written],
            [pointers[b] for b in written],
            [filled[b] for b in written],
            [keys[b].detach().to(torch.float32) for b in written],  # type: ignore[union-attr]
            normalise,
            [banks[b] for b in others],
            [filled[b] for b in others],
            own_M,
            positive_in_denominator,
            wanted,
            _exact(impl),
        )
        return parts

    return info_nce_by(compiled, query_MD, positive_MD, banks, temperature)


@torch.no_grad()
def enqueue(
    bank_KD: Tensor,
    keys_GD: Tensor,
    pointer: Tensor,
    filled: Tensor,
    *,
    normalise: bool = True,
    impl: Literal["auto", "cuda", "cpu", "torch"] = "auto",
) -> None:
    """Writes keys to rows pointer, pointer + 1, ..., wrapping at the end. Of more keys than rows, the last ones stay.

    With `normalise`, keys are scaled to unit length. They are rounded to the bank's type. The pointer and the number of
    filled rows are updated on the device, so the host does not wait.
    """
    _check_ring("enqueue", bank_KD, keys_GD, pointer, filled)
    if impl not in ("auto", "cuda", "cpu", "torch"):
        raise ValueError(f"impl is {impl!r}; use 'auto', 'cuda', 'cpu' or 'torch'.")
    device = bank_KD.device.type
    reason = missing(bank_KD.device, "info_nce_sweep")
    if reason is None and (bank_KD.dtype not in STORED or keys_GD.dtype == torch.float64):
        reason = f"it does not take a {kind(bank_KD)} bank with {kind(keys_GD)} keys"
    if impl == "torch" or (impl == "auto" and reason is not None):
        enqueue_torch(bank_KD, keys_GD, pointer, filled, normalise=normalise)
        return
    if impl not in ("auto", device):
        reason = f"the bank is on {device}"
    if reason is not None:
        raise ValueError(f"enqueue: impl is {impl!r}, but {reason}. Use impl='torch'.")
    torch.ops.fastcssl.enqueue([bank_KD], [pointer], [filled], [keys_GD.to(torch.float32)], normalise)


def _chosen(impl: Impl, query_MD: Tensor, positive_MD: Tensor, banks: Sequence[Tensor]) -> Impl:
    """Returns the implementation to use for these tensors, which were checked before."""
    if impl not in ("auto", "cuda", "cpu", "chunked", "torch"):
        raise ValueError(f"impl is {impl!r}; use 'auto', 'cuda', 'cpu', 'chunked' or 'torch'.")
    if impl in ("chunked", "torch"):
        return impl
    if impl == "auto" and torch.is_grad_enabled() and any(bank.requires_grad for bank in banks):
        return "torch"
    reason = _not_compiled(query_MD, positive_MD, banks)
    device: Any = query_MD.device.type
    if impl == "auto":
        return device if reason is None else "chunked"
    if impl != device:
        reason = f"query is on {device}"
    if reason is not None:
        raise ValueError(f"info_nce: impl is {impl!r}, but {reason}. Use impl='chunked'.")
    return impl


def _not_compiled(query_MD: Tensor, positive_MD: Tensor, banks: Sequence[Tensor]) -> str | None:
    """Returns why there is no compiled sweep for these tensors, or None if there is one."""
    device, dim = query_MD.device.type, query_MD.shape[1]
    if (reason := missing(query_MD.device, "info_nce_sweep")) is not None:
        return reason
    if compute_dtype(query_MD, positive_MD) == torch.float64:
        return "it does not compute in float64"
    if (other := next((bank for bank in banks if bank.dtype not in STORED), None)) is not None:
        return f"it reads float32, float16 and bfloat16 banks, not {kind(other)}"
    if device == "cuda" and (dim % 8 or dim > CUDA_WIDEST):
        return f"its D must be a multiple of 8 up to {CUDA_WIDEST}, not {dim}"
    return None


def _exact(impl: Impl) -> bool:
    """Returns whether float32 products on tensor cores keep full precision. It follows torch's own setting."""
    return impl == "cuda" and _is_highest()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_highest() -> bool:
    """Returns torch's setting. torch.compile cannot trace the call, and compiles again when the setting changes."""
    return torch.get_float32_matmul_precision() == "highest"


def _check_ring(
    name: str, bank_KD: Tensor, keys_GD: Tensor | None, pointer: Tensor | None, filled: Tensor | None
) -> None:
    if bank_KD.dim() != 2 or not len(bank_KD) or bank_KD.dtype not in FLOATS or not bank_KD.is_contiguous():
        raise ValueError(f"{name}: a bank that is written must be contiguous floats [K, D], but is {kind(bank_KD)}.")
    if bank_KD.requires_grad:
        raise ValueError(f"{name}: a bank that is written must not require a gradient.")
    assert keys_GD is not None
    if keys_GD.dim() != 2 or keys_GD.shape[1] != bank_KD.shape[1] or keys_GD.dtype not in FLOATS:
        raise ValueError(f"{name}: keys must be floats [G, {bank_KD.shape[1]}], but are {kind(keys_GD)}.")
    for what, number in (("pointer", pointer), ("filled", filled)):
        if number is None or number.dim() != 0 or number.dtype != torch.int64:
            seen = "None" if number is None else kind(number)
            raise ValueError(f"{name}: {what} must be a 0-d int64 tensor, but is {seen}.")
    for what, tensor in (("keys", keys_GD), ("pointer", pointer), ("filled", filled)):
        if tensor is not None and tensor.device != bank_KD.device:
            raise ValueError(f"{name}: {what} is on {tensor.device}, but the bank is on {bank_KD.device}.")
