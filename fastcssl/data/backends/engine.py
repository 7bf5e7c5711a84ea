"""Adapts the native engine (csrc/views/engine.h) to the back-end contract, with a ring of buffers for the batches.

When training on a CPU, the engine does the photometry in the same pass and returns finished views. For a GPU, it
returns uint8 crops in pinned memory and the photometry follows on the GPU.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fastcssl.data._native import Engine, Job, ShardFault, View
from fastcssl.data.backends import (
    BackendConfig,
    Crops,
    LoaderError,
    LocalBatch,
    LocalPlan,
    ShardError,
    remedy,
    shard_error,
)
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import ViewSpec

_OUT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native_view(spec: ViewSpec) -> View:
    """Returns the engine's form of a view."""
    return View(
        size_px=spec.size_px,
        bicubic=spec.interpolation == "bicubic",
        antialias=spec.antialias,
        # A center crop is a window on the resized whole image, so its filter reads past the window.
        stop_at_box=spec.crop != "center",
        mean=spec.mean,
        std=spec.std,
    )


class Slot:
    """The buffers of one batch: crops, or finished views."""

    def __init__(self, config: BackendConfig, *, finished: bool) -> None:
        shapes = [(config.local_batch_size, v.size_px, v.size_px, 3) for v in config.policy]
        self.finished = finished
        dtype, pinned = (config.dtype, False) if finished else (torch.uint8, config.device.type == "cuda")
        self.buffers_V = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for shape in shapes]

    def addresses(self) -> tuple[list[int], list[int]]:
        """Returns the addresses for crops and for finished views. The list that is not wanted holds zeros."""
        real, none = [buffer.data_ptr() for buffer in self.buffers_V], [0] * len(self.buffers_V)
        return (none, real) if self.finished else (real, none)

    def crops(self, faults: dict[int, str]) -> Crops:
        """Returns the buffers as the crops, or the finished views, of a batch."""
        if self.finished:
            # A permuted view of [N, H, W, 3] memory is channels-last.
            return Crops(crops_V=[], views_V=[b.permute(0, 3, 1, 2) for b in self.buffers_V], faults=faults)
        return Crops(crops_V=self.buffers_V, faults=faults)


class EngineBackend:
    """The common part of the native and the resident back end. A subclass maps the shards."""

    def __init__(self, data: Prepared, config: BackendConfig, format: str) -> None:
        self._data, self._config, self._format = data, config, format
        self._engine: Engine | None = Engine([native_view(spec) for spec in config.policy], config.num_threads)
        self._finished = config.augment == "fused" and config.device.type == "cpu" and config.dtype in _OUT_TYPES
        self._spare: list[Slot] = []  # reused in later epochs and tasks
        one = BackendConfig(
            policy=config.policy, local_batch_size=1, num_threads=1, device=torch.device("cpu"),
            dtype=config.dtype, augment="torch",
        )  # fmt: skip
        self._single = Slot(one, finished=False)
        self._mapped = np.full(len(data.manifest.shards), -1, np.int32)

    def _map(self, shard: int) -> int:
        """Maps a shard of the manifest into the engine and returns the engine's number for it.

        Raises OSError, ValueError, EOFError or ShardFault if that fails.
        """
        raise NotImplementedError

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        # The caller holds some beside the batches in progress. Streams may run in parallel, each with its own slots.
        count = self._config.prefetch + self._config.held
        free = deque(self._spare.pop() if self._spare else self._new_slot() for _ in range(count))
        under_way: deque[tuple[Slot, Job, int]] = deque()
        number = first
        held: deque[Slot] = deque()
        try:
            while True:
                while number < len(plan) and len(under_way) <= self._config.prefetch:  # one is returned below
                    slot = free.popleft()
                    under_way.append((slot, self._submit(plan[number], slot), number))
                    number += 1
                if not under_way:
                    return
                slot, job, done = under_way.popleft()
                faults = {place: self._named(plan[done], place, why) for place, why in self._settled(job)}
                held.append(slot)
                yield slot.crops(faults)
                if len(held) == self._config.held:
                    free.append(held.popleft())
        finally:
            engine = self._engine
            if engine is not None:
                for _, job, _ in under_way:
                    engine.cancel(job)
                for _, job, _ in under_way:
                    engine.wait(job)  # until no thread writes to their buffers
            self._spare += [*free, *(slot for slot, _, _ in under_way), *held]

    def _new_slot(self) -> Slot:
        return Slot(self._config, finished=self._finished)

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        batch = LocalBatch(
            number=0,
            row_N=np.array([row]),
            valid_N=np.ones(1, np.bool_),
            visit_N=np.zeros(1, np.int64),
            box_VN4=np.ascontiguousarray(box_V4[:, None]),
            columns_VNC=np.zeros((len(box_V4), 1, 9), np.float32),
        )
        faults = self._settled(self._submit(batch, self._single))
        if faults:
            raise LoaderError(self._named(batch, 0, faults[0][1]))
        return [buffer[0].clone() for buffer in self._single.buffers_V]

    def stage_seconds(self) -> dict[str, float]:
        return self._live().stage_seconds()

    def close(self) -> None:
        self._engine = None  # its destructor ends the threads

    def _live(self) -> Engine:
        if self._engine is None:
            raise LoaderError("This loader is closed. Open another.")
        return self._engine

    def _settled(self, job: Job) -> list[tuple[int, str]]:
        """Waits for a batch and returns which samples could not be decoded, and why."""
        faults = self._live().wait(job)
        if job.shard_fault:
            raise ShardError(f"{job.shard_fault}. {remedy(self._data)}")
        return faults

    def _submit(self, batch: LocalBatch, slot: Slot) -> Job:
        rows = self._data.table[batch.row_N]
        shard_N = rows[f"{self._format}_shard"]
        for shard in np.unique(shard_N[self._mapped[shard_N] < 0]).tolist():
            try:
                self._mapped[shard] = self._map(shard)
            except (OSError, ValueError, EOFError, ShardFault) as error:
                raise shard_error(self._data, shard, error) from None
        crops_V, views_V = slot.addresses()
        return self._live().submit(
            shard_N=self._mapped[shard_N],
            place_N=rows[f"{self._format}_place"],
            bytes_N=rows[f"{self._format}_bytes"],
            width_N=rows["width"].astype(np.int32),
            height_N=rows["height"].astype(np.int32),
            box_VN4=batch.box_VN4,
            columns_VNC=batch.columns_VNC,
            crops_V=crops_V,
            views_V=views_V,
            type=_OUT_TYPES.get(self._config.dtype, 0),
        )

    def _path(self, shard: int) -> Path:
        return self._data.shard_path(shard)

    def _named(self, batch: LocalBatch, place: int, why: str) -> str:
        row = self._data.table[batch.row_N[place]]
        return f"sample {row['id']} in {self._path(int(row[f'{self._format}_shard']))}: {why}"
