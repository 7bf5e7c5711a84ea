"""Stores small images of one size as a uint8 array [samples, height, width, 3] in a .npy file that can be mapped."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dataprep.encode import Encoded
from dataprep.imagefile import Pixels
from dataprep.table import Table
from dataprep.writers import Place, Record, ShardDamage

# Every header is padded to this size, so that it can be overwritten when the number of samples is known.
_HEADER_BYTES = 128
_BUFFER_BYTES = 1 << 20


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
    """Maps a shard into memory. `pixels` is the whole array, [samples, height, width, 3]."""

    def __init__(self, shard: Path) -> None:
        self.pixels: Pixels = np.load(shard, mmap_mode="r", allow_pickle=False)

    def content(self, row: np.void | Table) -> Pixels:
        """Returns the image of a row, or the images of several."""
        image: Pixels = self.pixels[row["array_place"]]
        return image

    def close(self) -> None:
        del self.pixels  # the file is unmapped together with the last view of it


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
            pixels = self.reader(shard).pixels
        except (OSError, EOFError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise ShardDamage(f"{shard} is not a complete array ({error})") from None
        if pixels.dtype != np.uint8 or pixels.shape[3:] != (3,) or len(pixels) != len(rows):
            raise ShardDamage(f"{shard} has shape {pixels.shape}, but the table says {len(rows)} samples")
        for place, row in enumerate(rows):
            if int(row["array_place"]) != place or pixels.shape[1:3] != (row["height"], row["width"]):
                raise ShardDamage(f"{shard} does not hold sample {row['id']} at row {place}")
            # The array has no ids and labels. They come from the table; the shard's checksum ties them to the pixels.
            yield Record(int(row["id"]), int(row["label"]), np.ascontiguousarray(pixels[place]))


FORMAT = ArrayFormat()
