"""Stores small images of one size as a uint8 array [samples, height, width, 3] in a .npy file that can be mapped."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dataprep.encode import Encoded
from dataprep.imagefile import Pixels
from dataprep.reading import array_header, read_rows
from dataprep.table import Table
from dataprep.writers import Place, Record, ShardDamage

# Every header is padded to this size, so that it can be overwritten when the number of samples is known.
_HEADER_BYTES = 128
_BUFFER_BYTES = 1 << 20
_READ_ROWS = 64  # images that are read at once when a shard is verified


def _header(count: int, height: int, width: int) -> bytes:
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({count}, {height}, {width}, 3), }}"
    magic = b"\x93NUMPY\x01\x00"
    length = _HEADER_BYTES - len(magic) - 2
    return magic + length.to_bytes(2, "little") + text.ljust(length - 1).encode("ascii") + b"\n"


class ArrayWriter:
    """Writes images of one size into an array, whose header comes last."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._file.write(bytes(_HEADER_BYTES))
        self._count = 0
        self._size: tuple[int, int] | None = None
        self.index: Path | None = None

    def size_with(self, encoded: Encoded) -> int:
        return _HEADER_BYTES + (self._count + 1) * encoded.height * encoded.width * 3

    def add(self, encoded: Encoded) -> Place:
        assert encoded.pixels is not None
        size = (encoded.height, encoded.width)
        assert self._size in (None, size), "the build checks that all images have one size"
        self._size = size
        content = encoded.pixels.tobytes()
        self._file.write(content)
        self._count += 1
        return Place(self._count - 1, len(content))

    def finish(self) -> None:
        assert self._size is not None
        self._file.seek(0)
        self._file.write(_header(self._count, *self._size))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


class ArrayReader:
    """Reads images of a shard. `shape` is that of the whole array, [samples, height, width, 3]."""

    def __init__(self, shard: Path) -> None:
        self._shard = shard
        with shard.open("rb") as file:
            shape, is_fortran, dtype = array_header(file)
            self.offset = file.tell()  # of the first image
            num_bytes = os.fstat(file.fileno()).st_size - self.offset
        if len(shape) != 4 or shape[3] != 3 or min(shape) < 1 or is_fortran or dtype != np.uint8:
            raise ValueError(f"its header says {shape} of {dtype}, which are not images")
        if math.prod(shape) != num_bytes:
            raise ValueError(f"its header says {shape}, but {num_bytes} bytes follow")
        self.shape: tuple[int, int, int, int] = (shape[0], shape[1], shape[2], shape[3])

    def content(self, row: np.void | Table) -> Pixels:
        """Returns the image of a row, or the images of several."""
        place = row["array_place"]
        return self.images(place.reshape(-1)).reshape(*place.shape, *self.shape[1:])

    def images(self, place_N: npt.NDArray[np.int64]) -> Pixels:
        """Returns the images at these places. Raises OSError if the file does not have them any more."""
        if len(place_N) and not (0 <= place_N.min() and place_N.max() < self.shape[0]):
            wrong = place_N[(place_N < 0) | (place_N >= self.shape[0])][0]
            raise ValueError(f"row {wrong} is needed, but it has {self.shape[0]} rows")
        images_NHW3 = np.empty((len(place_N), *self.shape[1:]), np.uint8)
        read_rows(self._shard, self.offset, place_N, images_NHW3)
        return images_NHW3

    def close(self) -> None:
        """Has nothing to close: the file is open only while it is read."""


class ArrayFormat:
    name = "array"
    suffix = ".npy"
    stores: Literal["pixels"] = "pixels"

    def open(self, path: Path) -> ArrayWriter:
        return ArrayWriter(path)

    def reader(self, shard: Path) -> ArrayReader:
        return ArrayReader(shard)

    def read(self, shard: Path, rows: Table) -> Iterator[Record]:
        try:
            reader = self.reader(shard)
            if reader.shape[0] != len(rows):
                raise ShardDamage(f"{shard} holds {reader.shape[0]} samples, but the table says {len(rows)}")
            for begin in range(0, len(rows), _READ_ROWS):
                place_N = np.arange(begin, min(begin + _READ_ROWS, len(rows)))
                for place, pixels in zip(place_N.tolist(), reader.images(place_N), strict=True):
                    row = rows[place]
                    if int(row["array_place"]) != place or reader.shape[1:3] != (row["height"], row["width"]):
                        raise ShardDamage(f"{shard} does not hold sample {row['id']} at row {place}")
                    # The array has no ids and labels. They come from the table; the shard's checksum ties them to the
                    # pixels.
                    yield Record(int(row["id"]), int(row["label"]), pixels)
        except (OSError, EOFError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ShardDamage(f"{shard} is not a complete array ({error})") from None


FORMAT = ArrayFormat()
