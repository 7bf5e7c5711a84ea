"""Keeps small images of one size as one uint8 tensor on the training device.

On a GPU the images are copied to it once, and crops and photometry are batched ops there, launched on the current
stream without waiting for it. If the images do not fit, they are read from the file batch by batch. On a CPU the page
cache holds the array, and the native engine crops it.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from dataprep.writers.array import ArrayReader
from fastcssl.data.backends import BackendConfig, Crops, LocalPlan, shard_error
from fastcssl.data.backends.engine import EngineBackend
from fastcssl.data.backends.geometry import crop_batch
from fastcssl.data.prepared import Prepared
from fastcssl.data.transfer import moved

_MAX_SHARE = 0.5  # the share of the GPU's free memory that images may use


class ResidentBackend(EngineBackend):
    name: ClassVar[str] = "resident"
    formats: ClassVar[tuple[str, ...]] = ("array",)

    def __init__(self, data: Prepared, config: BackendConfig) -> None:
        super().__init__(data, config, "array")
        self._batched = config.device.type != "cpu"  # tests also set it on the CPU
        self._resident: torch.Tensor | None = None
        self._is_tried = False  # whether the images fit is asked once: the answer takes a call to the driver
        self._slot_of_row: npt.NDArray[np.int64] = np.full(len(data.table), -1, np.int64)
        self._arrays: dict[int, ArrayReader] = {}

    def _map(self, shard: int) -> int:
        array, entry = self._array(shard), self._data.manifest.shards[shard]
        return self._live().map_array(str(self._path(shard)), entry.bytes, array.offset, *array.shape[:3])

    def _array(self, shard: int) -> ArrayReader:
        if shard not in self._arrays:
            array, count = ArrayReader(self._path(shard)), self._data.manifest.shards[shard].count
            if array.shape[0] != count:
                raise ValueError(f"its header says {array.shape[0]} samples, but the manifest says {count}")
            self._arrays[shard] = array
        return self._arrays[shard]

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        if not self._batched:
            yield from super().run(plan, first)
            return
        for number in range(first, len(plan)):
            batch = plan[number]
            images_NHW3 = self._on_device(batch.row_N)
            box_VN4 = moved(batch.box_VN4, self._config.device)
            crops_V = [crop_batch(images_NHW3, box_VN4[v], spec) for v, spec in enumerate(self._config.policy)]
            yield Crops(crops_V=crops_V)

    def _on_device(self, row_N: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns the images of these rows on the training device, without copying those that are already there."""
        if not self._is_tried:
            self._is_tried = True
            if self._fits():
                self._make_resident()
        slot_N = self._slot_of_row[row_N]
        if self._resident is None or (slot_N < 0).any():
            return moved(self._read(row_N), self._config.device)
        return self._resident[moved(slot_N, self._config.device)]

    def _fits(self) -> bool:
        total = int(self._data.table["array_bytes"].sum())
        if self._config.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self._config.device)
        return total <= _MAX_SHARE * free

    def _make_resident(self) -> None:
        """Copies all samples to the device. Then a new task needs no copy, and replay needs the earlier ones anyway."""
        rows = np.flatnonzero(self._data.table["is_stored"])
        self._resident = torch.from_numpy(self._read(rows)).to(self._config.device)
        self._slot_of_row[rows] = np.arange(len(rows))

    def _read(self, row_N: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        rows = self._data.table[row_N]
        images_NHW3 = np.empty((len(rows), int(rows["height"][0]), int(rows["width"][0]), 3), np.uint8)
        for shard in np.unique(rows["array_shard"]).tolist():
            mine = rows["array_shard"] == shard
            try:
                images = self._array(shard).content(rows[mine])
                if images.shape[1:] != images_NHW3.shape[1:]:
                    raise ValueError(f"its images have the shape {images.shape[1:]}, not {images_NHW3.shape[1:]}")
            except (OSError, ValueError, EOFError) as error:
                raise shard_error(self._data, shard, error) from None
            images_NHW3[mine] = images
        return images_NHW3

    def close(self) -> None:
        super().close()
        self._arrays.clear()
        self._resident = None


BACKEND = ResidentBackend
