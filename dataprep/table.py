"""The sample table: one row a sample, sorted by id, in a plain .npy file.

It holds what a reader needs to find and crop a sample without opening its shard: where it lies in every format, and its
stored width and height. Quarantined samples keep their row (is_stored = false), so that another split of the same data
partitions exactly the samples that the source had.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataprep.manifest import Manifest, ManifestError
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
    """Shard (its number in the manifest), place in it (tar: byte offset; array and ffcv: row) and bytes."""
    return [(f"{format}_shard", "<i4"), (f"{format}_place", "<i8"), (f"{format}_bytes", "<i8")]


def table_dtype(formats: list[str]) -> np.dtype[Any]:
    return np.dtype(_COLUMNS + [column for format in formats for column in place_columns(format)])


def empty_table(samples: Samples, formats: list[str]) -> Table:
    table = np.zeros(len(samples), table_dtype(formats))
    table["id"], table["label"], table["domain"] = samples.id_S, samples.label_S, samples.domain_S
    table["is_val"] = samples.is_val_S
    for format in formats:
        table[f"{format}_shard"] = -1
    return table


def save_table(table: Table, path: Path) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, table, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def load_table(manifest: Manifest, folder: Path) -> Table:
    path = manifest.samples.path_in(folder)
    try:
        table: Table = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read ({error}). Build the data set again.") from None
    if table.dtype != table_dtype(manifest.formats):
        raise ManifestError(f"{path} has other columns than the manifest's formats need. Build the data set again.")
    return table


def samples_of(table: Table) -> Samples:
    """The table as samples without names, for splitting it anew."""
    return Samples(
        id_S=table["id"].copy(),
        label_S=table["label"].copy(),
        domain_S=table["domain"].copy(),
        is_val_S=table["is_val"].copy(),
        _keys=b"",
        _key_ends_S=np.zeros(len(table), np.int64),
    )


def rows_of_ids(table: Table, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows = np.searchsorted(table["id"], ids)
    found = rows < len(table)
    if not found.all() or not np.array_equal(table["id"][rows], ids):
        raise ManifestError("A task names a sample that the table does not hold. Run fastcssl-prep split again.")
    return rows
