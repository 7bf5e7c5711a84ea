"""Reading .beton files without FFCV: what is whole is read, and nothing in a file is believed before it is checked."""

import random
from pathlib import Path

import pytest
from betons import COUNT, jpeg_of, record_of
from conftest import backend

from dataprep.writers import beton
from dataprep.writers.beton import BetonError, BetonFile

ffcv = backend("ffcv")  # which writes them


def test_page_size_and_limits() -> None:
    sizes = {0: 8, 8 << 20: 8, (8 << 20) + 1: 16, 1 << 30: 1024, 1 << 40: 1024}
    assert {size: beton.page_size_for(size) >> 20 for size in sizes} == sizes
    assert beton.why_not_storable(record_of(0, width=65535), 8 << 20) == ""
    assert "(id 5000000000) has 9000002 bytes, more than announced" in beton.why_not_storable(
        record_of(0, jpeg=b"\xff\xd8" + bytes(9_000_000)), 8 << 20
    )
    assert "not a JPEG" in beton.why_not_storable(record_of(0, jpeg=b"GIF89a"), 8 << 20)
    assert "64 bits" in beton.why_not_storable(record_of(0, label=1 << 63), 8 << 20)
    assert "takes 1 to 65535" in beton.why_not_storable(record_of(0, height=0), 8 << 20)


@pytest.mark.parametrize("size", [0, 1, 23, 24, 4187, 4188, 5000, 1 << 20, (8 << 20) + 5, 16 << 20, -24, -1])
def test_truncated_file_is_refused(even: Path, tmp_path: Path, size: int) -> None:
    whole = even.read_bytes()
    path = tmp_path / "cut.beton"
    path.write_bytes(whole[:size])
    with pytest.raises(BetonError, match="unfinished or damaged"):
        BetonFile(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BetonError, match="cannot be read"):
        BetonFile(tmp_path / "missing.beton")
    with pytest.raises(BetonError):
        BetonFile(tmp_path)
    path = tmp_path / "photo.beton"
    path.write_bytes(jpeg_of(1))
    with pytest.raises(BetonError, match="not an FFCV version 2 file"):
        BetonFile(path)


def header(**values: int) -> tuple[int, bytes]:
    ((name, value),) = values.items()
    field = beton.HEADER.fields[name]  # type: ignore[index]
    return int(field[1]), value.to_bytes(field[0].itemsize, "little")


ROW_0 = beton.HEADER.itemsize + 4 * beton.DESCRIPTOR.itemsize
TABLE = -COUNT * beton.ALLOCATION.itemsize  # from the end


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (header(alloc_table_ptr=0), "stopped before the end"),
        (header(alloc_table_ptr=1 << 63), "allocation table"),
        (header(alloc_table_ptr=4096), "pages are not complete"),
        (header(alloc_table_ptr=(16 << 20) + 24), "pages are not complete"),
        (header(num_samples=COUNT - 1), "does not hold"),
        (header(num_samples=(1 << 64) - 1), "ends at byte"),
        (header(num_samples=0), "does not hold"),
        (header(page_size=3 << 20), "page size"),
        (header(page_size=0), "page size"),
        (header(num_fields=3), "fields are not image, label, id, domain"),
        ((24, b"\x03"), "fields are not image, label, id, domain"),
        ((25, b"photo"), "fields are not image, label, id, domain"),
        ((ROW_0, b"\x01"), "sample 0 .*not stored as JPEG"),
        ((ROW_0 + 1, b"\0\0"), "sample 0 .*no pixels"),
        ((ROW_0 + 5, b"\xff" * 8), "sample 0 .*its own bytes"),
        ((TABLE, b"\xff" * 8), "every sample once"),
        ((TABLE + 16, b"\xff" * 8), "outside the data"),
        ((TABLE + 16, bytes(8)), "outside the data"),
        ((TABLE + 16, (6 << 20).to_bytes(8, "little")), "overlaps"),
        ((TABLE + 16, (8 << 20).to_bytes(8, "little")), "crosses a page|overlaps"),
        ((8 << 20, bytes(2)), "not a JPEG"),
    ],
)
def test_damaged_file_is_refused(even: Path, place: tuple[int, bytes], words: str, tmp_path: Path) -> None:
    data = bytearray(even.read_bytes())
    start = place[0] % len(data)
    data[start : start + len(place[1])] = place[1]
    path = tmp_path / "damaged.beton"
    path.write_bytes(data)
    with pytest.raises(BetonError, match=words):
        list(BetonFile(path))


def test_random_damage_never_crashes(even: Path, tmp_path: Path) -> None:
    path = tmp_path / "random.beton"
    path.write_bytes(even.read_bytes())
    chance = random.Random(1)
    size = path.stat().st_size
    regions = [(0, 24), (24, 60), (ROW_0, ROW_0 + beton.ROW.itemsize * COUNT), (size + TABLE, size)]
    with path.open("r+b", buffering=0) as file:
        for turn in range(400):
            at = chance.randrange(*regions[turn % 4])
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ 1 << chance.randrange(8)]))
            try:
                for record in BetonFile(path):
                    assert 0 < len(record.jpeg) <= 8 << 20
            except BetonError:
                pass
            file.seek(at)
            file.write(before)
