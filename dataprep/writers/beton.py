"""Reads the .beton files that dataprep.writers.ffcv writes, without FFCV.

The layout (FFCV version 2, little-endian) is a header, one descriptor per field, one metadata row per sample,
zeros up to a page boundary, whole pages of image bytes, and an allocation table that says which bytes belong
to which sample. The header's pointer to that table is written last, so zero means that the file is unfinished.
Every value is checked against the size of the file before it is used. Nothing is mapped (see dataprep.reading).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataprep.errors import PrepError, unreadable
from dataprep.reading import read_at

VERSION = 2
SMALLEST_PAGE = 1 << 21
DEFAULT_PAGE = 1 << 23
# The format allows 2 GiB, but Linux reads less than that in one call, and FFCV's reader makes only one call.
LARGEST_PAGE = 1 << 30
LARGEST_SIDE = (1 << 16) - 1  # width and height are 16-bit in the format
INT_TYPE_ID = 1
RGB_TYPE_ID = 2
JPEG_MODE = 0
FIELDS = {"image": RGB_TYPE_ID, "label": INT_TYPE_ID, "id": INT_TYPE_ID, "domain": INT_TYPE_ID}

HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_size", "<u4"),
        ("num_samples", "<u8"),
        ("alloc_table_ptr", "<u8"),
    ],
    align=True,
)
DESCRIPTOR = np.dtype([("type_id", "<u1"), ("name", "<u1", (16,)), ("arguments", "<u1", (1024,))], align=True)
IMAGE = np.dtype([("mode", "<u1"), ("width", "<u2"), ("height", "<u2"), ("data_ptr", "<u8")])
# FFCV aligns the row but packs the image's own members.
ROW = np.dtype([("image", IMAGE), ("label", "<i8"), ("id", "<i8"), ("domain", "<i8")], align=True)
ALLOCATION = np.dtype([("sample_id", "<u8"), ("ptr", "<u8"), ("size", "<u8")])


class BetonError(PrepError):
    """A .beton file could not be written or read. The message says what failed and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegRecord:
    """One sample: an encoded JPEG with its size in pixels, and the numbers stored beside it."""

    jpeg: bytes
    width: int
    height: int
    label: int
    id: int
    domain: int


def page_size_for(largest_bytes: int) -> int:
    """Returns the smallest page size that holds `largest_bytes`, between FFCV's default and its maximum."""
    return max(DEFAULT_PAGE, min(LARGEST_PAGE, 1 << (max(largest_bytes, 1) - 1).bit_length()))


def why_not_storable(record: JpegRecord, page_size: int) -> str:
    """Returns why a record cannot be stored with this page size and what to do, or "" if it can."""
    length, who = len(record.jpeg), f"(id {record.id})"
    if not record.jpeg.startswith(b"\xff\xd8"):
        return f"{who} is not a JPEG; encode it first"
    if not (0 < record.width <= LARGEST_SIDE and 0 < record.height <= LARGEST_SIDE):
        sides = f"{record.width}x{record.height}"
        return f"{who} measures {sides} but FFCV takes 1 to {LARGEST_SIDE}; resize it or leave it out"
    if length > LARGEST_PAGE:
        return f"{who} has {length} bytes but FFCV takes {LARGEST_PAGE}; resize it or leave it out"
    if length > page_size:
        return f"{who} has {length} bytes, more than announced; pass at least that as largest_bytes"
    if not all(-(1 << 63) <= value < 1 << 63 for value in (record.label, record.id, record.domain)):
        return f"{who} has a label, id or domain beyond 64 bits; use smaller numbers"
    return ""


class BetonFile:
    """A finished .beton file as a sequence of JpegRecord, in sample order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            self._sizes, self._rows_start, self.page_size = self._opened()
        except OSError as error:
            raise BetonError(unreadable(path, error, "Check the path and its permissions.")) from error

    def _opened(self) -> tuple[np.ndarray, int, int]:
        """Checks the file. Returns the sizes of the images, where the rows begin, and the page size."""
        path = self.path
        if self._size < HEADER.itemsize:
            raise self._broken("it is shorter than a header")
        header = self._table(HEADER, 0, 1)[0]
        if int(header["version"]) != VERSION:
            raise BetonError(
                f"{path} is not an FFCV version {VERSION} file (it says version {int(header['version'])}). "
                "Give the path of a .beton file written by this project."
            )
        page_size = int(header["page_size"])
        if page_size < SMALLEST_PAGE or page_size & (page_size - 1):
            raise self._broken(f"its page size, {page_size}, is not valid in FFCV")
        table_start = int(header["alloc_table_ptr"])
        if table_start == 0:
            raise self._broken("its writer stopped before the end (there is no allocation table)")
        if int(header["num_fields"]) != len(FIELDS):
            raise self._foreign()
        descriptors = self._table(DESCRIPTOR, HEADER.itemsize, len(FIELDS))
        found = [(row["name"].tobytes().rstrip(b"\0"), int(row["type_id"])) for row in descriptors]
        if found != [(name.encode(), type_id) for name, type_id in FIELDS.items()]:
            raise self._foreign()

        count = int(header["num_samples"])
        rows_start = HEADER.itemsize + descriptors.nbytes
        rows = self._table(ROW, rows_start, count)
        # FFCV starts the image bytes at the next whole page and writes only whole pages.
        data_start = -(-(rows_start + count * ROW.itemsize) // page_size) * page_size
        if table_start < data_start or (table_start - data_start) % page_size:
            raise self._broken("its image pages are not complete")
        if table_start + count * ALLOCATION.itemsize != self._size:
            raise self._broken(f"its allocation table does not hold {count} samples")
        allocation = self._table(ALLOCATION, table_start, count)
        return self._check(rows, allocation, data_start, table_start, page_size), rows_start, page_size

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> JpegRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples; there is no sample {index}")
        try:
            row = self._table(ROW, self._rows_start + index * ROW.itemsize, 1)[0]
            image = row["image"]
            jpeg = read_at(self.path, int(image["data_ptr"]), int(self._sizes[index]))
        except OSError as error:
            raise BetonError(unreadable(self.path, error, "Restore it from a copy, or write it again.")) from error
        if not jpeg.startswith(b"\xff\xd8"):
            raise self._broken(f"the image of sample {index} (id {int(row['id'])}) is not a JPEG")
        return JpegRecord(
            jpeg=jpeg,
            width=int(image["width"]),
            height=int(image["height"]),
            label=int(row["label"]),
            id=int(row["id"]),
            domain=int(row["domain"]),
        )

    def __iter__(self) -> Iterator[JpegRecord]:
        return (self[index] for index in range(len(self)))

    def _table(self, dtype: np.dtype[np.void], start: int, count: int) -> np.ndarray:
        """Returns `count` rows at `start`. These are Python integers, so a huge count cannot overflow."""
        end = start + count * dtype.itemsize
        if end > self._size:
            raise self._broken(f"it ends at byte {self._size}, but {end} bytes are expected")
        return np.frombuffer(read_at(self.path, start, end - start), dtype)

    def _check(self, rows: np.ndarray, table: np.ndarray, data_start: int, data_end: int, page_size: int) -> np.ndarray:
        """Checks every sample's place and returns the sizes of the images in sample order."""
        count = len(table)
        order = np.argsort(table["sample_id"], kind="stable")  # FFCV lists them worker by worker
        table = table[order]
        if not np.array_equal(table["sample_id"], np.arange(count, dtype=np.uint64)):
            raise self._broken("its allocation table does not name every sample once")
        images, id_S = rows["image"], rows["id"]
        self._reject(id_S, images["data_ptr"] != table["ptr"], "does not point at its own bytes")
        self._reject(id_S, images["mode"] != JPEG_MODE, "is not stored as JPEG")
        self._reject(id_S, (images["width"] == 0) | (images["height"] == 0), "has no pixels")
        outside = (table["ptr"] < data_start) | (table["ptr"] >= data_end)
        outside |= (table["size"] == 0) | (table["size"] > page_size)
        self._reject(id_S, outside, "lies outside the data")
        starts = table["ptr"].astype(np.int64)  # all values are inside the file, so nothing below can overflow
        sizes = table["size"].astype(np.int64)
        crossing = starts // page_size != (starts + sizes - 1) // page_size
        self._reject(id_S, crossing, "crosses a page")
        by_place = np.argsort(starts)
        overlaps = np.zeros(count, dtype=bool)
        overlaps[by_place[1:]] = (starts + sizes)[by_place[:-1]] > starts[by_place[1:]]
        self._reject(id_S, overlaps, "overlaps another")
        return sizes

    def _reject(self, id_S: np.ndarray, bad: np.ndarray, what: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            raise self._broken(f"the image of sample {index} (id {int(id_S[index])}) {what}")

    def _broken(self, why: str) -> BetonError:
        return BetonError(f"{self.path} is unfinished or damaged: {why}. Delete it and write it again.")

    def _foreign(self) -> BetonError:
        return BetonError(
            f"{self.path} is an FFCV file whose fields are not {', '.join(FIELDS)}. "
            "Give the path of a .beton file written by this project."
        )
