"""Features of a data set: every sample through one encoder or many, from one decode.

Everything after this is arithmetic on matrices and never sees the encoder again. N: rows, F: feature width, B: rows of
a batch, E: encoders.
"""

import math
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

_MAX_ELEMENTS = 1 << 24  # of a temporary
_SPILL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """One row a sample, in the order of ids, no id twice."""

    h_NF: Tensor  # float32
    label_N: Tensor  # int64
    id_N: Tensor  # int64

    def __len__(self) -> int:
        return len(self.h_NF)

    def __getitem__(self, rows_N: Tensor) -> "Features":
        """Returns some of the rows, by a mask or by ascending indices."""
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
    """Returns every sample of a finite stream of one view, embedded in eval mode: no BN statistic moves.

    Each rank takes its share and all of them get all rows. A sample that could not be decoded is left out: the
    stream's replacement for it comes by itself too, and counts once. `epoch` only matters to a random policy.
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
    """Returns `features` of several encoders, each image decoded once for all.

    `mine`: which encoders' rows this rank keeps; the others are None. `spill`: a folder for rows of more than a
    gigabyte, memory-mapped and without a name, so that they end with the process. `on_batch` gets the number of images.
    """
    device, world = torch.device(device), world or World()
    num_samples = _num_samples(stream)
    label_N, id_N = (torch.empty(num_samples, dtype=torch.int64, device=keep_on) for _ in range(2))
    kept: dict[int, Tensor] = {}
    filled = 0
    # no_grad, not inference_mode: a head may be trained on these.
    with torch.no_grad(), modes(encoders, training=False):
        for batch in stream.epoch(epoch):
            label_B, id_B = (world.gather_keys(x).to(keep_on) for x in (batch.label, batch.id))
            # Padding makes the ranks' parts equal, so it goes only after they are joined.
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
            f"The stream gave {filled} of its {num_samples} samples. Open its loader with last='pad' to get them all."
        )
    return [
        _in_order(Features(h_NF=kept[e], label_N=label_N, id_N=id_N)) if e in kept else None
        for e in range(len(encoders))
    ]


def _room(num_rows: int, num_features: int, device: torch.device | str, spill: Path | None) -> Tensor:
    num_elements = num_rows * num_features
    if spill is None or torch.device(device).type != "cpu" or 4 * num_elements < _SPILL_BYTES:
        return torch.empty(num_rows, num_features, device=device)
    with tempfile.NamedTemporaryFile(dir=spill) as file:  # its name goes now, its pages when nobody holds the tensor
        return torch.from_file(file.name, shared=True, size=num_elements).view(num_rows, num_features)


def embed(
    encoder: nn.Module, views: tuple[Tensor, ...], *, device: torch.device, amp_dtype: torch.dtype | None
) -> Tensor:
    """Returns the encoder's output for a batch of one view, in float32; mode and grad mode are the caller's."""
    if len(views) != 1:
        raise ValueError(f"Features are of one view, but the batch has {len(views)}. Use a probe-val policy.")
    view = views[0].to(device, non_blocking=True)
    if amp_dtype is None:
        view = view.float()  # the loader may serve a shorter type
    # Uncached: casts made without gradient must not be found by a training forward in an enclosing autocast.
    with nullcontext() if amp_dtype is None else torch.autocast(device.type, amp_dtype, cache_enabled=False):
        h_BF: Tensor = encoder(view)
    return h_BF.float()


def _num_samples(stream: Stream) -> int:
    if len(stream) == sys.maxsize:
        raise ValueError("An endless stream has no last sample. Open the selection with order='sequential'.")
    return stream.num_samples


def _in_order(found: Features) -> Features:
    if bool((found.id_N[1:] > found.id_N[:-1]).all()):
        return found  # as a sequential stream gives them; no second copy of what may be gigabytes
    id_N, order_N = torch.sort(found.id_N, stable=True)
    first_N = torch.ones_like(id_N, dtype=torch.bool)
    first_N[1:] = id_N[1:] != id_N[:-1]
    return found[order_N[first_N]]


@contextmanager
def full_float32() -> Iterator[None]:
    """Computes matrix products without TF32 or bfloat16 shortcuts, whatever the training chose."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check(name: str, found: Features, num_classes: int | None = None) -> None:
    if not len(found):
        raise ValueError(f"There are no {name} features to evaluate. Choose tasks that have {name} samples.")
    if not bool(_is_finite(found.h_NF).all()):
        raise ValueError(f"Some {name} features are not finite. Pass them through `finite` first.")
    low, high = int(found.label_N.min()), int(found.label_N.max())
    if num_classes is not None and (low < 0 or high >= num_classes):
        raise ValueError(f"The {name} labels span {low}..{high}, outside the {num_classes} classes.")


def finite(found: Features) -> tuple[Features, int]:
    """Rows with a NaN or an infinity become zeros, and how many those were: an overflow must not end a run."""
    bad_N = ~_is_finite(found.h_NF)
    num_bad = int(bad_N.sum())
    if num_bad == 0:
        return found, 0
    h_NF = found.h_NF.clone()
    h_NF[bad_N] = 0
    return Features(h_NF=h_NF, label_N=found.label_N, id_N=found.id_N), num_bad


def _is_finite(h_NF: Tensor) -> Tensor:
    """Returns a flag a row, in chunks: a flag for every element would be a quarter of the features."""
    return torch.cat([part.isfinite().all(dim=1) for part in torch.split(h_NF, max(1, _MAX_ELEMENTS // h_NF.shape[1]))])


def top1(predicted_M: Tensor, val: Features) -> float:
    """Returns the share of right predictions; NaN for no rows at all."""
    return int((predicted_M == val.label_N).sum()) / len(val) if len(val) else math.nan
