"""Prepared data -> batches of augmented views. One file a back end, one contract, imported on demand.

A back end does the geometry: it decodes each sample once and resizes each view's box to uint8 crops. Everything that
must not differ between back ends is done here for all of them: the order of samples, the random draws, ranks, padding,
resuming, the replacement of corrupt samples (`stream.py`, `plan.py`), and the photometry (`fastcssl.data.augment`).
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

from fastcssl.data.prepared import Prepared
from fastcssl.data.views import Policy
from fastcssl.errors import UserError


class LoaderError(UserError):
    """Something could not be loaded."""

    everywhere = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """What this rank loads for one batch. N rows; V views."""

    number: int  # of the batch in its epoch
    row_N: npt.NDArray[np.int64]  # of the sample table; padded rows repeat a real one
    valid_N: npt.NDArray[np.bool_]  # false for padded rows
    visit_N: npt.NDArray[np.int64]  # how often the sample was met before in this epoch
    box_VN4: npt.NDArray[np.float32]  # left, top, right, bottom in pixels of the stored image
    columns_VNC: npt.NDArray[np.float32]  # photometric parameters, csrc/views/photometric.h


@dataclass(slots=True, kw_only=True, eq=False)
class Crops:
    """A local batch's geometry, done. Its buffers live until the back end's iterator is advanced or closed."""

    # One a view: uint8 [N, size, size, 3], in host memory or on the training device; empty when views_V is set.
    crops_V: list[torch.Tensor]
    # Rows whose image could not be decoded -> why. Their pixels are undefined.
    faults: dict[int, str] = field(default_factory=dict)
    # Set by a back end that has also done the photometry: one a view, [N, 3, size, size], normalised.
    views_V: list[torch.Tensor] | None = None


class LocalPlan(Protocol):
    """The batches of one epoch for this rank. Cheap to ask for, in any order, more than once."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> LocalBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    policy: Policy
    local_batch_size: int
    num_threads: int
    device: torch.device
    dtype: torch.dtype  # of the finished views
    augment: Literal["fused", "torch", "dali"]  # who does the photometry; "dali" must be done inside (views_V)
    prefetch: int = 3  # batches under way


class Backend(Protocol):
    """Lives as long as the loader: threads, buffers, compiled code and open shards serve task after task."""

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]  # that it reads, best first

    def __init__(self, data: Prepared, config: BackendConfig) -> None: ...

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        """Batches `first`, `first` + 1, ... of the plan, prefetching. Closing the iterator drops what is under way."""
        ...

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        """One sample's crops at once, [size, size, 3] a view; raises LoaderError when it cannot be decoded."""
        ...

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of its threads so far by stage (`runs.timing.LOADER`), added up; empty: it keeps no clocks."""
        ...

    def close(self) -> None:
        """Ends threads and processes. Idempotent."""
        ...


# What to install for a back end whose package is missing.
INSTALL = {
    "dali": 'pip install "fastcssl[dali]"',
    "ffcv": 'apt install libopencv-dev libturbojpeg0-dev pkg-config; pip install "fastcssl[ffcv]"',
}


def usual_threads() -> int:
    """One a core that this process may use; torchrun's processes on one machine share them."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


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
    """The class `BACKEND` of a back end's module."""
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
    """`auto`: native for tar, resident for array, ffcv for .beton alone."""
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
