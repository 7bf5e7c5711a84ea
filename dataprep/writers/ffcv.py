"""FFCV's .beton format: one file per task and split, with the JPEGs of the tar parts, byte for byte."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dataprep.errors import PrepError
from dataprep.table import Table
from dataprep.writers import Record, ShardDamage
from dataprep.writers.beton import BetonError, BetonFile, JpegRecord
from dataprep.writers.ffcv_process import INSTALL, BetonWriter
from dataprep.writers.tar import TarReader


class TarRecords:
    """The samples of tar parts by number. They are pickled into FFCV's process and read in its workers."""

    def __init__(self, parts: list[Path], rows: list[Table]) -> None:
        self._parts = parts
        self._rows: Table = np.concatenate(rows)
        self._part_of_row = np.repeat(np.arange(len(rows)), [len(part) for part in rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> JpegRecord:
        row, part = self._rows[index], int(self._part_of_row[index])
        jpeg = TarReader(self._parts[part]).content(row)
        numbers = {name: int(row[name]) for name in ("width", "height", "label", "id", "domain")}
        return JpegRecord(jpeg=jpeg, **numbers)

    @property
    def largest_bytes(self) -> int:
        """Returns the size of the largest JPEG."""
        return int(self._rows["tar_bytes"].max())


class FfcvWriter:
    """Writes all files with one process, because importing FFCV takes seconds."""

    def __init__(self, num_workers: int) -> None:
        self._betons = BetonWriter(num_workers)

    def write(self, path: Path, parts: list[Path], rows: list[Table], on_progress: Callable[[int], None]) -> None:
        records = TarRecords(parts, rows)
        self._betons.write(path, records, largest_bytes=records.largest_bytes, on_progress=on_progress)

    def close(self) -> None:
        self._betons.close()


class FfcvReader:
    """Reads the JPEGs of a finished file. Opening the file checks it."""

    def __init__(self, shard: Path) -> None:
        self.beton = BetonFile(shard)

    def content(self, row: np.void) -> bytes:
        """Returns the JPEG of a row."""
        return self.beton[int(row["ffcv_place"])].jpeg

    def close(self) -> None:
        del self.beton


class FfcvFormat:
    name = "ffcv"
    suffix = ".beton"
    stores: Literal["jpeg"] = "jpeg"

    def require(self) -> None:
        if importlib.util.find_spec("ffcv") is None:
            raise PrepError(f"The format ffcv needs the package ffcv, which is not installed. {INSTALL}")

    def derive(self, num_workers: int) -> FfcvWriter:
        return FfcvWriter(num_workers)

    def reader(self, shard: Path) -> FfcvReader:
        return FfcvReader(shard)

    def read(self, shard: Path, rows: Table) -> Iterator[Record]:
        try:
            beton = BetonFile(shard)
            if len(beton) != len(rows):
                raise ShardDamage(f"{shard} holds {len(beton)} samples, but the table says {len(rows)}")
            for place, row in enumerate(rows):
                found = beton[place]
                numbers = (found.id, found.domain, found.width, found.height)
                if numbers != tuple(int(row[name]) for name in ("id", "domain", "width", "height")):
                    raise ShardDamage(f"{shard} does not hold sample {row['id']} at row {place}")
                yield Record(found.id, found.label, found.jpeg)
        except BetonError as error:
            raise ShardDamage(str(error)) from None


FORMAT = FfcvFormat()
