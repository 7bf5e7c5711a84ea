"""Reads and writes the sample table: one row per sample, sorted by id, in a plain .npy file.

A row holds what a reader needs to find and crop a sample without opening its shard: its place in every format, and its
stored width and height. Quarantined samples keep their row (is_stored = false), so that another split of the same data
partitions exactly the samples of the source.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataprep.contract import num_samples
from dataprep.manifest import Manifest, ManifestError, settle
from dataprep.samples import Samples

Table = npt.NDArray[np.void]

_COLUMNS: list[tuple[str, str]] = [
    ("id", "<i8"),
    ("label", "<i4"),
    ("domain", "<i4"),
    ("is_val", "?"),
    ("is_stored", "?"),
    ("width", "<u2"),
    ("height", "<u2"),
]


def place_columns(format: str) -> list[tuple[str, str]]:
    """Returns the columns of a format: the shard's number in the manifest, the place in the shard, and the bytes.

    The place is a byte offset in a tar shard and a row in an array or ffcv shard.
    """
    return [(f"{format}_shard", "<i4"), (f"{format}_place", "<i8"), (f"{format}_bytes", "<i8")]


def table_dtype(formats: list[str]) -> np.dtype[Any]:
    """Returns the columns of a table for these formats."""
    return np.dtype(_COLUMNS + [column for format in formats for column in place_columns(format)])


def empty_table(samples: Samples, formats: list[str]) -> Table:
    """Returns a table of all samples in which none is stored yet."""
    table = np.zeros(len(samples), table_dtype(formats))
    table["id"], table["label"], table["domain"] = samples.id_S, samples.label_S, samples.domain_S
    table["is_val"] = samples.is_val_S
    for format in formats:
        table[f"{format}_shard"] = -1
    return table


def save_table(table: Table, path: Path) -> None:
    """Writes a table durably."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.lib.format.write_array(file, table, allow_pickle=False)
        settle(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def load_table(manifest: Manifest, folder: Path) -> Table:
    """Returns the table of a prepared folder."""
    path = manifest.samples.path_in(folder)
    try:
        table: Table = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError, MemoryError, RecursionError) as error:
        raise ManifestError(f"{path} cannot be read ({error}). Build the data set again.") from None
    if table.dtype != table_dtype(manifest.formats):
        raise ManifestError(f"{path} does not have the columns of the manifest's formats. Build the data set again.")
    for fault in _faults(table, manifest):
        raise ManifestError(f"{path}: {fault}. Restore it from a copy, or build the data set again.")
    return table


def _faults(table: Table, manifest: Manifest) -> Iterator[str]:
    """Yields what contradicts the manifest, as the ends of sentences."""
    if table.shape != (num_samples(manifest),):
        yield f"it has the shape {table.shape}, but the manifest says {num_samples(manifest)} samples"
        return
    if len(table) and (table["id"][0] < 0 or (np.diff(table["id"]) <= 0).any()):
        yield "its ids are not in rising order"
    for column, low, names in (("label", 0, manifest.classes), ("domain", -1, manifest.domains)):
        strange = (table[column] < low) | (table[column] >= len(names))
        if strange.any():
            row = table[np.argmax(strange)]
            yield f"sample {row['id']} has the {column} {row[column]}, but the manifest names {len(names)}"
    empty = table["is_stored"] & ((table["width"] == 0) | (table["height"] == 0))
    if empty.any():
        yield f"sample {table['id'][np.argmax(empty)]} is stored but has no pixels"


def samples_of(table: Table) -> Samples:
    """Returns the table as samples without keys, for another split."""
    return Samples(
        id_S=table["id"].copy(),
        label_S=table["label"].copy(),
        domain_S=table["domain"].copy(),
        is_val_S=table["is_val"].copy(),
        _keys=b"",
        _key_ends_S=np.zeros(len(table), np.int64),
    )


def rows_of_ids(table: Table, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the row of each sample id."""
    rows = np.searchsorted(table["id"], ids)
    found = rows < len(table)
    if not found.all() or not np.array_equal(table["id"][rows], ids):
        raise ManifestError("A task names a sample that the table does not hold. Run fastcssl-prep split again.")
    return rows
