"""Defines the contract of the back ends, which decode and crop. Each back end is one file, imported on demand.

A back end does the geometry: it decodes each sample once and resizes each view's box to uint8 crops. `fastcssl.data`
does everything that must not differ between back ends: the order of samples, ranks and padding (`order.py`), the random
draws (`draws.py`), resuming and the replacement of corrupt samples (`loader.py`), and the photometry (`augment.py`).
"""

import importlib
import os
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dataprep.cores import usable_cores
from dataprep.errors import file_limit, unreadable
from dataprep.manifest import ManifestError
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import Policy
from fastcssl.errors import UserError


class LoaderError(UserError):
    """Raised when data cannot be loaded, or a loader cannot be set up."""

    everywhere = True


class ShardError(LoaderError):
    """Raised when a shard cannot be read, or is not what was prepared. Its samples are not replaced by others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """The samples that this rank loads for one batch, and their random draws. N rows, V views."""

    number: int  # of the batch in its epoch
    row_N: npt.NDArray[np.int64]  # of the sample table; padded rows repeat a real one
    valid_N: npt.NDArray[np.bool_]  # false for padded rows
    visit_N: npt.NDArray[np.int64]  # how often the sample was met before in this epoch
    box_VN4: npt.NDArray[np.float32]  # left, top, right, bottom in pixels of the stored image
    columns_VNC: npt.NDArray[np.float32]  # photometric parameters, csrc/views/photometric.h


@dataclass(slots=True, kw_only=True, eq=False)
class Crops:
    """The finished crops of a local batch.

    The back end may overwrite their buffers once its iterator has advanced `BackendConfig.held` times, when the next
    iterator starts, or when the caller drops this object. Tensors on a GPU are written on the stream that is current
    while the iterator advances.
    """

    # One per view: uint8 [N, size, size, 3], in host memory or on the training device; empty when views_V is set.
    crops_V: list[torch.Tensor]
    # The rows whose image could not be decoded, with the reason. Their pixels are undefined.
    faults: dict[int, str] = field(default_factory=dict)
    # Set by a back end that also does the photometry: one per view, [N, 3, size, size], normalised, of any float type.
    views_V: list[torch.Tensor] | None = None


class LocalPlan(Protocol):
    """The batches of one epoch for this rank. Access is cheap, in any order, and may be repeated."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> LocalBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The settings that a back end gets from its loader."""

    policy: Policy
    local_batch_size: int
    num_threads: int
    device: torch.device
    dtype: torch.dtype  # of the finished views
    augment: Literal["fused", "torch", "dali"]  # which code does the photometry; "dali": the back end (views_V)
    prefetch: int = 3  # batches in progress

    @property
    def held(self) -> int:
        """How many batches the caller holds buffers of: on a GPU two, because the copies run behind the host."""
        return 2 if self.device.type == "cuda" else 1


class Backend(Protocol):
    """Lives as long as its loader and reuses threads, buffers, compiled code and open shards from task to task."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]  # the formats that it reads, best first

    def __init__(self, data: Prepared, config: BackendConfig) -> None: ...

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        """Yields batches `first`, `first` + 1, ... of the plan, prefetching. Closing drops the batches in progress."""
        ...

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        """Returns one sample's crops, one [size, size, 3] per view.

        Raises LoaderError when it cannot be decoded, and ShardError when its shard cannot be read.
        """
        ...

    def stage_seconds(self) -> dict[str, float]:
        """Returns the threads' total seconds per stage (`runs.timing.LOADER`) so far; empty if it does not time."""
        ...

    def close(self) -> None:
        """Ends threads and processes. May be called more than once."""
        ...


def format_of(kind: type[Backend], data: Prepared) -> str:
    """Returns the format that a back end reads of this data."""
    return next(format for format in kind.formats if format in data.manifest.formats)


def shard_error(data: Prepared, shard: int, error: Exception) -> ShardError:
    """Returns the error to show when a shard cannot be read: that its size has changed, or else the given reason."""
    path = data.shard_path(shard)
    if isinstance(error, OSError) and file_limit(error):
        return ShardError(unreadable(path, error, ""))
    try:
        data.check_shards([shard])
    except ManifestError as changed:
        return ShardError(str(changed))
    if isinstance(error, OSError | ValueError | EOFError):
        return ShardError(unreadable(path, error, remedy(data)))
    return ShardError(f"{str(error).rstrip('.')}. {remedy(data)}")


def sample_error(data: Prepared, row: int, format: str, reason: object) -> LoaderError:
    """Returns the error for a sample that cannot be decoded, or a ShardError if its shard has changed."""
    sample = data.table[row]
    shard = int(sample[f"{format}_shard"])
    try:
        data.check_shards([shard])
    except ManifestError as changed:
        return ShardError(str(changed))
    return LoaderError(f"sample {sample['id']} in {data.shard_path(shard)}: {reason}")


def remedy(data: Prepared) -> str:
    """Returns what to do about a shard that is not what was prepared."""
    return f"Restore it from a copy, or build the data set again; fastcssl-prep verify {data.folder} lists all damage."


# How to install the package that a back end needs.
INSTALL = {
    "dali": 'pip install "fastcssl[dali]"',
    "ffcv": 'apt install libopencv-dev libturbojpeg0-dev pkg-config; pip install "fastcssl[ffcv]"',
}


def usual_threads() -> int:
    """Returns the default number of threads: one per usable core. The ranks on one machine share the cores."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@cache
def backends() -> tuple[str, ...]:
    """Returns the names of all back ends: the modules here that define BACKEND. None of them is imported."""
    folder = Path(__path__[0])
    return tuple(
        info.name
        for info in sorted(pkgutil.iter_modules(__path__))
        if re.search(r"^BACKEND\b", (folder / f"{info.name}.py").read_text(), re.MULTILINE)
    )


def backend(name: str) -> type[Backend]:
    """Returns the class `BACKEND` of a back end's module."""
    if name not in backends():
        raise LoaderError(f"'{name}' is not a loader. Choose from {', '.join(backends())}.")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        remedy = INSTALL.get(name, "install it")
        raise LoaderError(f"The loader '{name}' needs a package that is missing ({error}). Run: {remedy}") from error
    found: type[Backend] = module.BACKEND
    return found


def choose(data: Prepared, name: str = "auto") -> type[Backend]:
    """Returns the back end of a name. `auto` is resident for array, else native for tar, else ffcv for .beton."""
    formats = data.manifest.formats
    if name == "auto":
        name = "resident" if "array" in formats else "native" if "tar" in formats else "ffcv"
    chosen = backend(name)
    if not set(chosen.formats) & set(formats):
        raise LoaderError(
            f"The loader '{name}' reads {' or '.join(chosen.formats)}, but this data was prepared as "
            f"{', '.join(formats)}. Prepare it with --formats {chosen.formats[0]}, or use --loader auto."
        )
    return chosen
