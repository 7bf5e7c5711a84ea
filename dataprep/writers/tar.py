"""Writes and reads WebDataset's layout: {id}.jpg and {id}.cls in a plain tar, with an index of offsets.

Any tar tool, webdataset and DALI's WebDataset reader can read it. Headers have no times and no owners, so the same
samples give the same bytes.
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from dataprep.encode import Encoded
from dataprep.reading import read_at
from dataprep.table import Table
from dataprep.writers import Place, Record, ShardDamage

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_BUFFER_BYTES = 1 << 20


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def member_name(sample_id: int, suffix: str) -> str:
    """Returns the name of a file in the archive."""
    return f"{sample_id:010d}.{suffix}"


# A header made by tarfile. Only name, size and checksum are filled in: making a new header takes ten times as long.
_TEMPLATE = tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)
_NAME, _SIZE, _CHECKSUM = slice(0, 100), slice(124, 136), slice(148, 156)


def _header(name: str, num_bytes: int) -> bytes:
    header = bytearray(_TEMPLATE)
    header[_NAME] = name.encode("ascii").ljust(100, b"\0")
    header[_SIZE] = b"%011o\0" % num_bytes
    header[_CHECKSUM] = b" " * 8
    header[_CHECKSUM] = b"%06o\0 " % sum(header)
    return bytes(header)


class TarWriter:
    """Writes samples into a tar part and collects the lines of its index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=_BUFFER_BYTES)
        self._position = 0
        self._index_lines: list[str] = []
        self.index: Path | None = None

    def size_with(self, encoded: Encoded) -> int:
        return self._position + 3 * _BLOCK + _padded(len(encoded.jpeg)) + len(_END)

    def add(self, encoded: Encoded) -> Place:
        sample = encoded.sample
        label = str(sample.label).encode()
        jpeg_at = self._member(member_name(sample.id, "jpg"), encoded.jpeg)
        label_at = self._member(member_name(sample.id, "cls"), label)
        self._index_lines.append(
            f"jpg {jpeg_at} {len(encoded.jpeg)} {member_name(sample.id, 'jpg')} "
            f"cls {label_at} {len(label)} {member_name(sample.id, 'cls')}"
        )
        return Place(jpeg_at, len(encoded.jpeg))

    def _member(self, name: str, content: bytes) -> int:
        """Writes one file of the archive and returns where its content begins."""
        begin = self._position + _BLOCK
        padding = _padded(len(content)) - len(content)
        self._file.write(b"".join((_header(name, len(content)), content, bytes(padding))))
        self._position = begin + len(content) + padding
        return begin

    def finish(self) -> None:
        self._file.write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        # The format of NVIDIA's wds2idx: version and count, then one line per sample with the kind, offset, size and
        # name of each of its files.
        self.index = self._path.with_name(self._path.name + ".idx")
        lines = [f"v1.2 {len(self._index_lines)}", *self._index_lines]
        self.index.write_text("\n".join(lines) + "\n", encoding="ascii")

    def abandon(self) -> None:
        self._file.close()


class TarReader:
    """Reads images by their offsets, without parsing the archive."""

    def __init__(self, shard: Path) -> None:
        self._shard = shard

    def content(self, row: np.void) -> bytes:
        """Returns the encoded image of a row. Raises OSError if the shard does not have it."""
        return read_at(self._shard, int(row["tar_place"]), int(row["tar_bytes"]))

    def close(self) -> None:
        """Has nothing to close: the file is open only while it is read."""


class TarFormat:
    name = "tar"
    suffix = ".tar"
    stores: Literal["jpeg"] = "jpeg"

    def open(self, path: Path) -> TarWriter:
        return TarWriter(path)

    def reader(self, shard: Path) -> TarReader:
        return TarReader(shard)

    def read(self, shard: Path, rows: Table) -> Iterator[Record]:
        """Yields the samples by reading the archive as a tar tool does, and checks each against its row."""
        try:
            with tarfile.open(shard, "r:") as archive:
                for row in rows:
                    jpeg, cls = archive.next(), archive.next()
                    if jpeg is None or cls is None:
                        raise ShardDamage(f"{shard} ends before sample {row['id']}")
                    expected = (member_name(int(row["id"]), "jpg"), int(row["tar_place"]), int(row["tar_bytes"]))
                    if (jpeg.name, jpeg.offset_data, jpeg.size) != expected:
                        raise ShardDamage(f"{shard} has {jpeg.name} where {expected[0]} belongs")
                    content, label = archive.extractfile(jpeg), archive.extractfile(cls)
                    if content is None or label is None:
                        raise ShardDamage(f"{shard} holds something else than a file for sample {row['id']}")
                    yield Record(int(row["id"]), int(label.read()), content.read())
                    # tarfile remembers every member, which would fill the memory for a large shard.
                    archive.members = []  # type: ignore[attr-defined]
                if archive.next() is not None:
                    raise ShardDamage(f"{shard} holds more samples than the table says")
        except ShardDamage:
            raise
        except Exception as error:  # tarfile raises all kinds of errors on damaged archives
            raise ShardDamage(f"{shard} is not a complete tar archive ({error})") from None


FORMAT = TarFormat()
