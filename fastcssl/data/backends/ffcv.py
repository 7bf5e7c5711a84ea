"""Loads .beton files with FFCV: its reader, caches and compiled pipeline, with our order, boxes, pixels and errors.

FFCV reads one file in an order fixed beforehand. A plan may span files (one per task and split) and may be endless. So
each file gets a `BetonReader`, which lives as long as the loader, and each reader gets its part of a batch. Each row is
decoded once, and all its views are written to their places in the batch's buffers, so merging needs no copy.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dataprep import _codec
from dataprep.writers.beton import BetonError
from dataprep.writers.ffcv import FfcvReader
from fastcssl.data._native import ShardFault
from fastcssl.data.backends import (
    BackendConfig,
    Crops,
    LoaderError,
    LocalBatch,
    LocalPlan,
    ShardError,
    sample_error,
    shard_error,
)
from fastcssl.data.backends.ffcv_decoder import LOST, NO_MEMORY, BatchPart, BetonReader, Threads, crop_jpeg, open_reader
from fastcssl.data.prepared import Prepared

_PATIENCE_SECONDS = 1.0  # between two checks that a thread is still alive


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beton:
    path: Path
    file: FfcvReader
    reader: BetonReader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _UnderWay:
    batch: LocalBatch
    parts: list[tuple[_Beton, BatchPart]]
    crops_V: list[torch.Tensor]


class FfcvBackend:
    name: ClassVar[str] = "ffcv"
    formats: ClassVar[tuple[str, ...]] = ("ffcv",)

    def __init__(self, data: Prepared, config: BackendConfig) -> None:
        self._data, self._config = data, config
        self._prefetch = max(1, config.prefetch)
        # The bits that csrc/views/cropper.cpp expects. A center crop's filter reads past its box.
        self._filter_V = [
            (spec.interpolation == "bicubic") | spec.antialias << 1 | (spec.crop != "center") << 2
            for spec in config.policy
        ]
        self._threads = Threads(config.num_threads)
        self._betons: dict[int, _Beton] = {}  # by number in the manifest
        self._rings: list[list[list[torch.Tensor]]] = []  # free rings of buffers; runs in parallel use one each

    # ---- Batches ----

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        # The caller holds some beside the batches in progress.
        count = self._prefetch + self._config.held
        ring = self._rings.pop() if self._rings else [self._buffers() for _ in range(count)]
        under_way: deque[_UnderWay] = deque()
        started = (self._start(plan[number], ring[number % len(ring)]) for number in range(first, len(plan)))
        try:
            while True:
                under_way.extend(islice(started, self._prefetch + 1 - len(under_way)))
                if not under_way:
                    return
                faults = self._faults(under_way[0])
                yield Crops(crops_V=under_way.popleft().crops_V, faults=faults)
        finally:
            parts = [pair for each in under_way for pair in each.parts]
            running = [(beton, part) for beton, part in parts if not part.status_N.cancel()]
            for beton, part in running:  # until no thread writes to the buffers
                _settled(beton, part)
            self._rings.append(ring)

    def _buffers(self) -> list[torch.Tensor]:
        return self._empty(self._config.local_batch_size, pinned=self._config.device.type == "cuda")

    def _empty(self, count: int, *, pinned: bool = False) -> list[torch.Tensor]:
        shapes = [(count, spec.size_px, spec.size_px, 3) for spec in self._config.policy]
        return [torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for shape in shapes]

    def _start(self, batch: LocalBatch, buffers_V: list[torch.Tensor]) -> _UnderWay:
        count = len(batch.row_N)
        if count > self._config.local_batch_size:
            raise LoaderError(f"A batch of {count} rows does not fit a loader for {self._config.local_batch_size}.")
        crops_V = [buffer[:count] for buffer in buffers_V]
        target_NV3 = self._targets(crops_V, count)
        box_NV4 = batch.box_VN4.transpose(1, 0, 2)
        samples_N = self._data.table[batch.row_N]
        parts = []
        for shard in np.unique(samples_N["ffcv_shard"]).tolist():
            place_N = np.flatnonzero(samples_N["ffcv_shard"] == shard)
            part = BatchPart(
                place_N=place_N,
                row_N=samples_N["ffcv_place"][place_N],
                box_NV4=box_NV4[place_N],
                target_NV3=target_NV3[place_N],
                share=len(place_N) / count,
            )
            parts.append((self._beton(shard), part))
        for beton, part in parts:
            beton.reader.submit(part)
        return _UnderWay(batch=batch, parts=parts, crops_V=crops_V)

    def _targets(self, crops_V: list[torch.Tensor], count: int) -> npt.NDArray[np.int64]:
        """Returns the size, address and filter of every row of every view."""
        target_NV3 = np.empty((count, len(crops_V), 3), np.int64)
        for view, crops_NHW3 in enumerate(crops_V):
            target_NV3[:, view, 0] = crops_NHW3.shape[1]
            target_NV3[:, view, 1] = crops_NHW3.data_ptr() + np.arange(count) * crops_NHW3.stride(0)
            target_NV3[:, view, 2] = self._filter_V[view]
        return target_NV3

    def _faults(self, done: _UnderWay) -> dict[int, str]:
        """Waits for the batch and returns the reason of failure for each place that failed."""
        faults: dict[int, str] = {}
        for beton, part in done.parts:
            error = _settled(beton, part)
            if error is not None:
                why = f"{type(error).__name__}: {error}"
                raise LoaderError(
                    f"FFCV stopped while reading {beton.path} ({why}). Use --loader torchvision, or report this."
                ) from error
            status_N = part.status_N.result()
            for i in np.flatnonzero(status_N).tolist():
                place = int(part.place_N[i])
                fault = self._fault(int(done.batch.row_N[place]), int(status_N[i]))
                if isinstance(fault, ShardError):
                    raise fault
                faults[place] = str(fault)
        return faults

    # ---- Single samples ----

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        sample = self._data.table[row]
        try:
            jpeg = np.frombuffer(self._jpeg(row), np.uint8)
        except BetonError as error:
            raise sample_error(self._data, row, "ffcv", error) from None
        crops_V = self._empty(1)
        target_V3, box_V4 = self._targets(crops_V, 1)[0], np.ascontiguousarray(box_V4, np.float32)
        status = crop_jpeg(jpeg, int(sample["height"]), int(sample["width"]), box_V4, target_V3)
        if status != 0:
            raise self._fault(row, status)
        return [crop[0] for crop in crops_V]

    def _fault(self, row: int, status: int) -> LoaderError:
        """Returns why a sample failed. The status does not say it, so this decodes the sample again."""
        sample = self._data.table[row]
        if status == LOST:
            lost = OSError("it was written while it was in use, or the disk failed")
            return shard_error(self._data, int(sample["ffcv_shard"]), lost)
        if status == NO_MEMORY:
            return sample_error(self._data, row, "ffcv", "there was not enough memory to decode it")
        try:
            _, height, width = _codec.decode(self._jpeg(row))
        except (BetonError, ValueError) as error:
            return sample_error(self._data, row, "ffcv", error)
        prepared = f"{sample['width']} x {sample['height']} RGB"
        why = f"it is {width} x {height} pixels, not {prepared} as prepared"
        return sample_error(self._data, row, "ffcv", why)

    def _jpeg(self, row: int) -> bytes:
        sample = self._data.table[row]
        return self._beton(int(sample["ffcv_shard"])).file.content(sample)

    # ---- Files ----

    def _path(self, shard: int) -> Path:
        return self._data.shard_path(shard)

    def _beton(self, shard: int) -> _Beton:
        if shard not in self._betons:
            self._betons[shard] = self._opened(shard)
        return self._betons[shard]

    def _opened(self, shard: int) -> _Beton:
        path = self._path(shard)
        try:
            file = FfcvReader(path)  # checks the file; FFCV itself does not
            reader = open_reader(
                path, batch_size=self._config.local_batch_size, num_views=len(self._filter_V), threads=self._threads
            )
        except (BetonError, OSError, ValueError, AssertionError, ShardFault) as error:  # FFCV asserts what it expects
            raise shard_error(self._data, shard, error) from None
        table = self._data.table[self._data.table["ffcv_shard"] == shard]
        image_S, id_S = (reader.metadata[name] for name in ("f0", "f2"))
        place_S = table["ffcv_place"]
        agrees = len(table) == 0 or (0 <= place_S.min() and place_S.max() < len(file.beton))
        for name, stored_S in (("id", id_S), ("width", image_S["width"]), ("height", image_S["height"])):
            agrees = agrees and np.array_equal(stored_S[place_S].reshape(-1), table[name])
        if not agrees:
            reader.end()
            raise LoaderError(
                f"{path} does not hold the samples that the table lists. Run fastcssl-prep verify {self._data.folder}."
            )
        return _Beton(path=path, file=file, reader=reader)

    def stage_seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        while self._betons:
            _, beton = self._betons.popitem()
            beton.reader.end()
        self._rings.clear()


def _settled(beton: _Beton, part: BatchPart) -> BaseException | None:
    """Waits for a part and returns the error that it raised, if any."""
    while True:
        try:
            return part.status_N.exception(_PATIENCE_SECONDS)
        except TimeoutError:
            if not beton.reader.is_alive() and not part.status_N.done():
                return RuntimeError("its thread is gone")
        except CancelledError:
            return RuntimeError("the loader was closed")


BACKEND = FfcvBackend
