"""Computes the features of a data set with one or more encoders, decoding each image once.

Later steps only work on these matrices and do not need the encoder again. N: rows, F: feature width, B: rows of a
batch, E: encoders.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fastcssl.data.loader import Stream
from fastcssl.distributed.world import World
from fastcssl.learn.nets import modes
from fastcssl.runs.ownership import UNLOCKED

_MAX_ELEMENTS = 1 << 24  # largest size of a temporary tensor
_SPILL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """Features with one row per sample, sorted by id. Each id occurs once."""

    h_NF: Tensor  # float32
    label_N: Tensor  # int64
    id_N: Tensor  # int64

    def __len__(self) -> int:
        return len(self.h_NF)

    def __getitem__(self, rows_N: Tensor) -> "Features":
        """Returns the rows that a mask or ascending indices select."""
        return Features(h_NF=self.h_NF[rows_N], label_N=self.label_N[rows_N], id_N=self.id_N[rows_N])


def features(
    encoder: nn.Module,
    stream: Stream,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    epoch: int = 0,
    world: World | None = None,
    keep_on: torch.device | str = "cpu",
) -> Features:
    """Returns the features of every sample of a finite stream of one view. Eval mode leaves BN statistics unchanged.

    Each rank embeds its share, and every rank gets all rows. A sample that could not be decoded is omitted: the sample
    that replaces it in the stream also has its own place there, and counts once. `epoch` only matters to a random
    policy.
    """
    found = features_of(
        [encoder], stream, device=device, amp_dtype=amp_dtype, epoch=epoch, world=world, keep_on=keep_on
    )[0]
    assert found is not None
    return found


def features_of(
    encoders: Sequence[nn.Module],
    stream: Stream,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    epoch: int = 0,
    world: World | None = None,
    keep_on: torch.device | str = "cpu",
    mine: Callable[[int], bool] = lambda _: True,
    spill: Path | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
) -> list[Features | None]:
    """Returns the `features` of several encoders, decoding each image once for all of them.

    `mine`: whether this rank keeps the rows of an encoder; the features of the others are None. `spill`: a folder for
    matrices of a gigabyte or more, which are memory-mapped from files without a name and disappear with the process.
    `on_batch` is called with the number of images of each batch.
    """
    device, world = torch.device(device), world or World()
    num_samples = _num_samples(stream)
    label_N, id_N = (torch.empty(num_samples, dtype=torch.int64, device=keep_on) for _ in range(2))
    kept: dict[int, Tensor] = {}
    filled = 0
    # no_grad, not inference_mode: a head may be trained on these features.
    with torch.no_grad(), modes(encoders, training=False):
        for batch in stream.epoch(epoch):
            label_B, id_B = (world.gather_keys(x).to(keep_on) for x in (batch.label, batch.id))
            # Padding makes the ranks' parts equally long, so it is removed only after they are joined.
            valid_B = id_B >= 0
            rows = slice(filled, filled := filled + int(valid_B.sum()))
            label_N[rows], id_N[rows] = label_B[valid_B], id_B[valid_B]
            for e, encoder in enumerate(encoders):
                h_BF = world.gather_keys(embed(encoder, batch.views, device=device, amp_dtype=amp_dtype))
                if mine(e):
                    if e not in kept:
                        kept[e] = _room(num_samples, h_BF.shape[1], keep_on, spill)
                    kept[e][rows] = h_BF.to(keep_on)[valid_B]
            on_batch(rows.stop - rows.start)
    if filled != num_samples:
        raise ValueError(
            f"The stream gave {filled} of its {num_samples} samples. Open its loader with last='pad' to get all."
        )
    return [
        _in_order(Features(h_NF=kept[e], label_N=label_N, id_N=id_N)) if e in kept else None
        for e in range(len(encoders))
    ]


def _room(num_rows: int, num_features: int, device: torch.device | str, spill: Path | None) -> Tensor:
    num_elements = num_rows * num_features
    if spill is None or torch.device(device).type != "cpu" or 4 * num_elements < _SPILL_BYTES:
        return torch.empty(num_rows, num_features, device=device)
    # The name is removed now, the pages with the tensor. The blocks are reserved first: a mapped page that does not fit
    # on the disk would end the process by a signal.
    with UNLOCKED.writing(spill), tempfile.NamedTemporaryFile(dir=spill) as file:
        os.posix_fallocate(file.fileno(), 0, 4 * num_elements)
        return torch.from_file(file.name, shared=True, size=num_elements).view(num_rows, num_features)


def embed(
    encoder: nn.Module, views: tuple[Tensor, ...], *, device: torch.device, amp_dtype: torch.dtype | None
) -> Tensor:
    """Returns the encoder's output for a batch of one view, in float32. The caller sets train or eval and grad mode."""
    if len(views) != 1:
        raise ValueError(f"Features need one view per image, but the batch has {len(views)}. Use a probe-val policy.")
    view = views[0].to(device, non_blocking=True)
    if amp_dtype is None:
        view = view.float()  # the loader may return a shorter type
    # Uncached, so that a training forward in an enclosing autocast does not reuse casts made without gradient.
    with nullcontext() if amp_dtype is None else torch.autocast(device.type, amp_dtype, cache_enabled=False):
        h_BF: Tensor = encoder(view)
    return h_BF.float()


def _num_samples(stream: Stream) -> int:
    if len(stream) == sys.maxsize:
        raise ValueError("An endless stream has no last sample. Open the selection with order='sequential'.")
    return stream.num_samples


def _in_order(found: Features) -> Features:
    if bool((found.id_N[1:] > found.id_N[:-1]).all()):
        return found  # a sequential stream is already sorted; this avoids a copy of what may be gigabytes
    id_N, order_N = torch.sort(found.id_N, stable=True)
    first_N = torch.ones_like(id_N, dtype=torch.bool)
    first_N[1:] = id_N[1:] != id_N[:-1]
    return found[order_N[first_N]]


@contextmanager
def full_float32() -> Iterator[None]:
    """Computes matrix products without TF32 or bfloat16 shortcuts, regardless of the training's setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check(name: str, found: Features, num_classes: int | None = None) -> None:
    """Raises ValueError if there are no features, if some are not finite, or if a label is out of range."""
    if not len(found):
        raise ValueError(f"There are no {name} features to evaluate. Choose tasks that have {name} samples.")
    if not bool(_is_finite(found.h_NF).all()):
        raise ValueError(f"Some {name} features are not finite. Pass them through `finite` first.")
    low, high = int(found.label_N.min()), int(found.label_N.max())
    if num_classes is not None and (low < 0 or high >= num_classes):
        raise ValueError(f"The {name} labels span {low}..{high}, outside the {num_classes} classes.")


def finite(found: Features) -> tuple[Features, int]:
    """Returns the features with zeros in place of rows that are not finite, and the number of those rows.

    An overflow must not end a run.
    """
    bad_N = ~_is_finite(found.h_NF)
    num_bad = int(bad_N.sum())
    if num_bad == 0:
        return found, 0
    h_NF = found.h_NF.clone()
    h_NF[bad_N] = 0
    return Features(h_NF=h_NF, label_N=found.label_N, id_N=found.id_N), num_bad


def _is_finite(h_NF: Tensor) -> Tensor:
    """Returns one flag per row. Works in chunks: a flag per element would take a quarter of the features' memory."""
    return torch.cat([part.isfinite().all(dim=1) for part in torch.split(h_NF, max(1, _MAX_ELEMENTS // h_NF.shape[1]))])


def top1(predicted_M: Tensor, val: Features) -> float:
    """Returns the share of correct predictions, or NaN if there are no rows."""
    return int((predicted_M == val.label_N).sum()) / len(val) if len(val) else math.nan
