"""The sample table: every number in it is checked against the manifest before a loader uses it as an address."""

import dataclasses
import errno
import hashlib
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import jpeg_of, picture, prep_ok

from dataprep.encode import Encoding, Resize, encode_all
from dataprep.errors import output_error
from dataprep.manifest import Manifest, ManifestError, load_manifest
from dataprep.samples import NO_DOMAIN, Sample
from dataprep.table import load_table, rows_of_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table") / "out"
    args = ("build", "synthetic:size=32,train=3,val=1", "--scenario", "class", "--tasks", 2)
    prep_ok(*args, "--formats", "tar,array", "--out", out)
    return out


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., tuple[Manifest, Path]]:
    """A folder whose table was changed. The manifest's checksum follows, as in a hostile or wrongly written folder."""

    def change(edit: Callable[[Any], Any]) -> tuple[Manifest, Path]:
        manifest = load_manifest(folder)
        table = np.load(folder / "samples.npy")
        edited = edit(table)
        np.save(tmp_path / "samples.npy", table if edited is None else edited)
        content = (tmp_path / "samples.npy").read_bytes()
        entry = dataclasses.replace(manifest.samples, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        return dataclasses.replace(manifest, samples=entry), tmp_path

    return change


def put(column: str, value: int, row: int = 0) -> Callable[[Any], None]:
    def edit(table: Any) -> None:
        table[column][row] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put("array_place", -5), r"has the place -5 \(3072 bytes\) in .*\.npy, which has \d+ samples"),
        (put("array_place", 10**6), r"has the place 1000000 .* in .*\.npy"),
        (put("array_place", 1 << 40), "has the place 1099511627776"),
        (put("array_bytes", 3071), "has the array bytes 3071, which does not fit its width and height"),
        (put("array_shard", 99), "has the array shard 99, of"),
        (put("array_shard", -1), "has the array shard -1, of"),
        (put("array_shard", 0), "a shard of another format or split"),
        (put("tar_place", 1 << 40), "has the place 1099511627776"),
        (put("tar_place", (1 << 63) - 1), "has the place 9223372036854775807"),
        (put("tar_bytes", 0), r"\(0 bytes\)"),
        (put("tar_bytes", 1 << 40), r"\(1099511627776 bytes\)"),
        (put("label", 1000), "has the label 1000, but the manifest lists"),
        (put("label", -1), "has the label -1"),
        (put("domain", 7), "has the domain 7"),
        (put("width", 0), "has the width 0"),
        (put("is_val", True), "a shard of another format or split"),
        (put("is_stored", False), "it places .* samples in"),
        (put("id", 5), "not in rising order"),
        (lambda table: table["is_stored"].view(np.uint8).__setitem__(0, 2), "other than 0 and 1"),
        (lambda table: table["array_place"].__setitem__(slice(0, 2), table["array_place"][0]), "the same place"),
        (lambda table: table[None], "rows of its columns"),
        (lambda table: table[:-1], "it places .* samples in|but the manifest says"),
        (lambda table: table[["id", "label"]], "the columns of the manifest's formats"),
    ],
)
def test_a_row_that_does_not_fit_is_named(changed: Any, edit: Any, says: str) -> None:
    manifest, where = changed(edit)
    with pytest.raises(ManifestError, match=says) as error:
        load_table(manifest, where)
    assert str(where / "samples.npy") in str(error.value) and "Restore it" in str(error.value)


def test_the_table_as_written_opens(changed: Any, folder: Path) -> None:
    manifest, where = changed(lambda table: table)
    assert np.array_equal(load_table(manifest, where), np.load(folder / "samples.npy"))


def test_one_flipped_bit_is_seen(folder: Path, tmp_path: Path) -> None:
    content = bytearray((folder / "samples.npy").read_bytes())
    content[-1] ^= 1
    (tmp_path / "samples.npy").write_bytes(content)
    with pytest.raises(ManifestError, match="checksum differs"):
        load_table(load_manifest(folder), tmp_path)


def test_a_header_that_promises_more_than_the_file_has(folder: Path, tmp_path: Path) -> None:
    content = (folder / "samples.npy").read_bytes()
    manifest = load_manifest(folder)
    count = len(load_table(manifest, folder))
    begin = int.from_bytes(content[8:10], "little") + 10  # of the rows
    header = content[10:begin].replace(f"({count},)".encode(), b"(9999999999999,)", 1)
    content = content[:10] + header.rstrip().ljust(begin - 11) + b"\n" + content[begin:]
    (tmp_path / "samples.npy").write_bytes(content)
    entry = dataclasses.replace(manifest.samples, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(ManifestError, match=r"9999999999999.* rows of its columns"):
        load_table(dataclasses.replace(manifest, samples=entry), tmp_path)


def test_a_count_that_the_table_cannot_have(folder: Path) -> None:
    manifest = load_manifest(folder)
    shards = [dataclasses.replace(manifest.shards[0], count=1 << 80), *manifest.shards[1:]]
    with pytest.raises(ManifestError, match=r"the manifest says that .* has 1208925819614629174706176"):
        load_table(dataclasses.replace(manifest, shards=shards), folder)


def test_a_task_does_not_name_a_sample_that_is_not_stored(folder: Path) -> None:
    table = load_table(load_manifest(folder), folder).copy()
    table["is_stored"][2] = False
    with pytest.raises(ManifestError, match="not stored"):
        rows_of_ids(table, table["id"][1:3])


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held)


def test_an_image_is_not_to_blame_for_the_limit_of_open_files(tmp_path: Path) -> None:
    image = tmp_path / "image.jpg"
    image.write_bytes(jpeg_of(picture(1)))
    encoded = encode_all(
        [Sample(0, "image.jpg", 0, NO_DOMAIN, False)],
        lambda _: str(image),
        Encoding(resize=Resize(), check="full"),
        want_jpeg=True,
        want_pixels=False,
        num_threads=1,
    )
    with no_descriptor_left(), pytest.raises(OSError, match=r"image\.jpg") as error:
        list(encoded)
    assert error.value.errno == errno.EMFILE
    assert "ulimit -n" in str(output_error(tmp_path, error.value))


def test_the_limit_of_open_files_is_named_for_the_manifest_and_the_table(folder: Path) -> None:
    manifest = load_manifest(folder)
    with no_descriptor_left():
        with pytest.raises(ManifestError, match="ulimit -n"):
            load_manifest(folder)
        with pytest.raises(ManifestError, match="ulimit -n"):
            load_table(manifest, folder)
