"""Writes samples to shards and reads them back. Each format has its own module, which `formats` discovers.

A format module defines `FORMAT`, an object with the attributes below. Streamed formats write one sample after another
into a part file. Derived formats have a writer that makes files from complete tar parts. Only a format's reader knows
how a row of the table becomes bytes, so everything that needs a stored sample uses a reader.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dataprep.encode import Encoded
from dataprep.imagefile import Pixels
from dataprep.table import Table


class Place(NamedTuple):
    """The place of a sample in its shard. See dataprep.table.place_columns."""

    place: int
    num_bytes: int


class Record(NamedTuple):
    """A stored sample, read back."""

    id: int
    label: int
    content: bytes | Pixels


class ShardWriter(Protocol):
    """Writes one part. `index` is an extra file that the format needs beside its shard, or None."""

    index: Path | None

    def size_with(self, encoded: Encoded) -> int:
        """Returns the size of the finished file if this sample were added."""
        ...

    def add(self, encoded: Encoded) -> Place:
        """Writes a sample and returns its place."""
        ...

    def finish(self) -> None:
        """Completes and syncs the file."""
        ...

    def abandon(self) -> None:
        """Closes the file without completing it. The caller discards it."""
        ...


class ShardReader(Protocol):
    """Reads single samples of one shard, in any order. It keeps no file open: there may be thousands of shards."""

    def content(self, row: np.void) -> bytes | Pixels:
        """Returns the sample of a row of the table: an encoded image, or pixels [height, width, 3].

        Raises OSError or ValueError if the shard does not have it, such as after it was cut short.
        """
        ...

    def close(self) -> None: ...


class DerivedWriter(Protocol):
    """Writes the files of a derived format, one after another."""

    def write(self, path: Path, parts: list[Path], rows: list[Table], on_progress: Callable[[int], None]) -> None:
        """Writes one file from tar parts and their rows. Sample i of the file is row i of the concatenated rows."""
        ...

    def close(self) -> None: ...


class Format(Protocol):
    """A shard format."""

    name: str
    suffix: str
    stores: Literal["jpeg", "pixels"]

    def reader(self, shard: Path) -> ShardReader:
        """Opens a shard for reading single samples."""
        ...

    def read(self, shard: Path, rows: Table) -> Iterator[Record]:
        """Yields the shard's samples in stored order and checks them against `rows`, its table rows sorted by place."""
        ...


@runtime_checkable
class StreamedFormat(Format, Protocol):
    """A format that is written sample by sample."""

    def open(self, path: Path) -> ShardWriter:
        """Opens a new part file."""
        ...


@runtime_checkable
class DerivedFormat(Format, Protocol):
    """A format that is made from complete tar parts."""

    def require(self) -> None:
        """Raises PrepError if the format's package is missing."""
        ...

    def derive(self, num_workers: int) -> DerivedWriter:
        """Returns a writer, which starts its processes only with the first file."""
        ...


class ShardDamage(Exception):
    """A shard does not hold what its rows say. The text is a sentence that says why."""


def formats() -> dict[str, Format]:
    """Returns every format by its name."""
    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "FORMAT"):
            found[module.FORMAT.name] = module.FORMAT
    return found
