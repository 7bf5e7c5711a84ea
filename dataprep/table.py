"""Reads and writes the sample table: one row per sample, sorted by id, in a plain .npy file.

A row holds what a reader needs to find and crop a sample without opening its shard: its place in every format, and its
stored width and height. Quarantined samples keep their row (is_stored = false), so that another split of the same data
partitions exactly the samples of the source.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataprep.contract import num_samples
from dataprep.errors import unreadable
from dataprep.manifest import Manifest, ManifestError, replacing
from dataprep.places import check_places
from dataprep.reading import array_header
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


_MAX_HEADER_BYTES = 1 << 16
_RESTORE = "Restore it from a copy, or build the data set again."


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
    with replacing(path) as part, part.open("wb") as file:
        np.lib.format.write_array(file, table, allow_pickle=False)


def load_table(manifest: Manifest, folder: Path) -> Table:
    """Returns the table of a prepared folder.

    Everything in it is checked: loaders use its numbers as addresses. For 14 million rows (590 MB), the checksum takes
    about as long as reading the file, and the other checks take a second.
    """
    path = manifest.samples.path_in(folder)
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ManifestError(unreadable(path, error, _RESTORE)) from None
    if hashlib.sha256(content.data).hexdigest() != manifest.samples.sha256:
        raise ManifestError(f"{path} has changed: its checksum differs from the manifest's. {_RESTORE}")
    table = _parsed(content, path)
    if table.dtype != table_dtype(manifest.formats):
        raise ManifestError(f"{path} does not have the columns of the manifest's formats. {_RESTORE}")
    if len(table) != (count := num_samples(manifest)):
        raise ManifestError(f"{path} has {len(table)} rows, but the manifest says {count} samples. {_RESTORE}")
    if why := check_places(table, manifest):
        raise ManifestError(f"{path}: {why}. {_RESTORE}")
    return table


def _parsed(content: npt.NDArray[np.uint8], path: Path) -> Table:
    """Returns a .npy file of rows without copying it. The header may promise only what the file has."""
    header = io.BytesIO(content[:_MAX_HEADER_BYTES].tobytes())
    try:
        shape, _, dtype = array_header(header)
    except ValueError as error:
        raise ManifestError(f"{path} cannot be read ({error}). {_RESTORE}") from None
    body = content[header.tell() :]
    if len(shape) != 1 or dtype.hasobject or shape[0] * dtype.itemsize != len(body):
        raise ManifestError(
            f"{path} has {len(body)} bytes of rows, which are not {shape} rows of its columns. {_RESTORE}"
        )
    table: Table = body.view(dtype)
    return table


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
    if not table["is_stored"][rows].all():
        raise ManifestError("A task names a sample that is not stored. Run fastcssl-prep split again.")
    return rows
