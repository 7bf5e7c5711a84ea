"""Samples -> shards, and shards -> samples. One file a format; `formats` discovers them.

A format module defines `FORMAT`, an object with the attributes below. Formats that are streamed write sample after
sample into a part file. Derived formats are made from whole tar parts by a writer of their own. Whoever wants a stored
sample asks its format for a reader: how a row of the table becomes bytes is known nowhere else.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dataprep.encode import Encoded, Pixels
from dataprep.table import Table


class Place(NamedTuple):
    """Where a sample lies in its shard; see dataprep.table.place_columns."""

    place: int
    num_bytes: int


class Record(NamedTuple):
    """A stored sample, read back."""

    id: int
    label: int
    content: bytes | Pixels


class ShardWriter(Protocol):
    """Writes one part. `index` is an extra file that the format wants beside its shard, or None."""

    index: Path | None

    def size_with(self, encoded: Encoded) -> int:
        """How large the file would be with this sample too."""
        ...

    def add(self, encoded: Encoded) -> Place: ...

    def finish(self) -> None:
        """Completes and syncs the file."""
        ...

    def abandon(self) -> None:
        """Closes without completing; the file is discarded."""
        ...


class ShardReader(Protocol):
    """Reads single samples of one open shard, in any order."""

    def content(self, row: np.void) -> bytes | Pixels:
        """Returns the sample of a row of the table: an encoded image, or pixels [height, width, 3].

        A shard that was cut short may give fewer bytes than the row says; what that means is for the caller to say.
        """
        ...

    def close(self) -> None: ...


class DerivedWriter(Protocol):
    """Writes whole files, one after another."""

    def write(self, path: Path, parts: list[Path], rows: list[Table], on_progress: Callable[[int], None]) -> None:
        """One file from tar parts and their rows: sample i of the file is row i of all rows together."""
        ...

    def close(self) -> None: ...


class Format(Protocol):
    name: str
    suffix: str
    stores: Literal["jpeg", "pixels"]

    def reader(self, shard: Path) -> ShardReader:
        """Opens a shard for reading single samples."""
        ...

    def read(self, shard: Path, rows: Table) -> Iterator[Record]:
        """Yields the shard's samples as they lie in it, checked against `rows`: its rows of the table, by place."""
        ...


@runtime_checkable
class StreamedFormat(Format, Protocol):
    def open(self, path: Path) -> ShardWriter: ...


@runtime_checkable
class DerivedFormat(Format, Protocol):
    def require(self) -> None:
        """Raises PrepError when the format's package is missing."""
        ...

    def derive(self, num_workers: int) -> DerivedWriter:
        """Costs nothing until the first file."""
        ...


class ShardDamage(Exception):
    """A shard does not hold what its rows say; a sentence."""


def formats() -> dict[str, Format]:
    """Returns every format by its name."""
    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if hasattr(module, "FORMAT"):
            found[module.FORMAT.name] = module.FORMAT
    return found
