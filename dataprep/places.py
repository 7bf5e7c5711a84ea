"""Checks the rows of a sample table against the manifest: ids, labels, sizes, and the place of every stored sample."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataprep.manifest import Manifest

_BLOCK_ROWS = 1 << 15  # so that a block stays in the processor's cache while its columns are checked one by one
_BY_ROW = ("array", "ffcv")  # formats whose place is a row; for tar it is a byte offset


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shards:
    """What the manifest says about the shards of one format, by their number P in the manifest."""

    format: str
    split_P: npt.NDArray[np.int8]  # 0 train, 1 val, -1 another format
    count_P: npt.NDArray[np.int64]
    bytes_P: npt.NDArray[np.int64]
    found_P: npt.NDArray[np.int64]  # rows seen so far
    first_P: npt.NDArray[np.int64]  # the place of a shard's first row in is_taken_S
    is_taken_S: npt.NDArray[np.bool_]  # one entry per row of all shards, if places are rows


def check_places(table: npt.NDArray[np.void], manifest: Manifest) -> str:
    """Returns what is wrong with the first row that does not fit the manifest, or "" if all rows fit."""
    for shard in manifest.shards:
        if not 0 <= shard.count <= len(table):
            return f"it has {len(table)} samples, but the manifest says that {shard.path} has {shard.count}"
    formats = [_shards(manifest, format) for format in manifest.formats]
    before = -1
    for begin in range(0, len(table), _BLOCK_ROWS):
        rows = table[begin : begin + _BLOCK_ROWS]
        id_N = rows["id"]
        if id_N[0] <= before or (id_N[1:] <= id_N[:-1]).any():
            return f"the ids of rows {begin} to {begin + len(rows) - 1} are not in rising order"
        before = int(id_N[-1])
        why = _numbers(rows, manifest)
        stored = rows if rows["is_stored"].all() else rows[rows["is_stored"]]
        for shards in formats:
            why = why or _places(stored, shards, manifest)
        if why:
            return why
    for shards in formats:
        wrong_P = np.flatnonzero((shards.split_P >= 0) & (shards.found_P != shards.count_P))
        if len(wrong_P):
            number = int(wrong_P[0])
            found, wrong = shards.found_P[number], manifest.shards[number]
            return f"it places {found} samples in {wrong.path}, which has {wrong.count}"
        if not shards.is_taken_S.all():
            return f"two samples have the same place in a shard of the format {shards.format}"
    return ""


def _shards(manifest: Manifest, format: str) -> _Shards:
    count_P = np.array([shard.count for shard in manifest.shards], np.int64)
    is_of_format_P = np.array([shard.format == format for shard in manifest.shards], np.bool_)
    is_val_P = np.array([shard.split == "val" for shard in manifest.shards], np.int8)
    held_P = np.where(is_of_format_P & (format in _BY_ROW), count_P, 0)
    return _Shards(
        format=format,
        split_P=np.where(is_of_format_P, is_val_P, np.int8(-1)),
        count_P=count_P,
        bytes_P=np.array([shard.bytes for shard in manifest.shards], np.int64),
        found_P=np.zeros(len(count_P), np.int64),
        first_P=np.cumsum(held_P) - held_P,
        is_taken_S=np.zeros(int(held_P.sum()), np.bool_),
    )


def _numbers(rows: npt.NDArray[np.void], manifest: Manifest) -> str:
    """Checks what does not depend on the format."""
    for name, first, end in (("label", 0, len(manifest.classes)), ("domain", -1, len(manifest.domains))):
        column_N = rows[name].copy()
        if why := _first(rows, (column_N < first) | (column_N >= end), name, f"but the manifest lists {max(end, 0)}"):
            return why
    for name in ("is_val", "is_stored"):
        if (rows[name].view(np.uint8) > 1).any():
            return f"the column {name} holds something other than 0 and 1"
    is_empty_N = rows["is_stored"] & ((rows["width"] == 0) | (rows["height"] == 0))
    return _first(rows, is_empty_N, "width", "although it is stored")


def _places(rows: npt.NDArray[np.void], shards: _Shards, manifest: Manifest) -> str:
    """Checks where the stored samples are, and notes which shards hold them."""
    format = shards.format
    # As contiguous columns of the type that numpy takes for indices, each of the steps below is several times faster.
    shard_N, place_N, bytes_N = (rows[f"{format}_{name}"].astype(np.intp) for name in ("shard", "place", "bytes"))
    num_shards = len(shards.count_P)
    if why := _first(rows, (shard_N < 0) | (shard_N >= num_shards), f"{format}_shard", f"of {num_shards} shards"):
        return why
    foreign_N = shards.split_P[shard_N] != rows["is_val"]
    if why := _first(rows, foreign_N, f"{format}_shard", "which is a shard of another format or split"):
        return why
    size_N = shards.bytes_P[shard_N]
    outside_N = (place_N < 0) | (bytes_N < 1) | (bytes_N > size_N) | (place_N > size_N - bytes_N)
    if format in _BY_ROW:
        outside_N |= place_N >= shards.count_P[shard_N]
    if outside_N.any():
        row = rows[np.argmax(outside_N)]
        shard = manifest.shards[int(row[f"{format}_shard"])]
        return (
            f"sample {row['id']} has the place {row[f'{format}_place']} ({row[f'{format}_bytes']} bytes) in "
            f"{shard.path}, which has {shard.count} samples and {shard.bytes} bytes"
        )
    if format == "array":
        pixels_N = 3 * rows["width"].astype(np.int64) * rows["height"]
        if why := _first(rows, bytes_N != pixels_N, "array_bytes", "which does not fit its width and height"):
            return why
    shards.found_P[:] += np.bincount(shard_N, minlength=num_shards)
    if format in _BY_ROW:
        shards.is_taken_S[shards.first_P[shard_N] + place_N] = True
    return ""


def _first(rows: npt.NDArray[np.void], is_wrong_N: npt.NDArray[np.bool_], name: str, but: str) -> str:
    """Returns a sentence about the first row that is wrong, or "" if none is."""
    if not is_wrong_N.any():
        return ""
    row = rows[np.argmax(is_wrong_N)]
    return f"sample {row['id']} has the {name.replace('_', ' ')} {row[name]}, {but}"
