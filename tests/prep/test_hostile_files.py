"""Files that are not what their names say cost a moment, never a build: they are quarantined with the reason."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from conftest import jpeg_of, picture, prep_ok
from PIL import Image, PngImagePlugin

from dataprep import _codec, imagefile
from dataprep.api import build_data
from dataprep.encode import Encoded, Encoding, Resize, encode_all
from dataprep.errors import PrepError
from dataprep.imagefile import ImageFault, decode_with_pillow, image_size
from dataprep.manifest import load_manifest
from dataprep.samples import Sample
from dataprep.sources import open_source
from dataprep.sources.tree import images_below


def encoded(content: bytes | str, resize: str = "none", **settings: object) -> Encoded:
    encoding = Encoding(resize=Resize.parse(resize), **settings)  # type: ignore[arg-type]
    sample = Sample(0, "it", 0, -1, False)
    return next(encode_all([sample], lambda _: content, encoding, want_jpeg=True, want_pixels=False, num_threads=1))


def small_tree(root: Path, classes: tuple[str, ...] = ("a", "b"), images: int = 3) -> Path:
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(images):
            (root / name / f"{i}.jpg").write_bytes(jpeg_of(picture(i)))
    return root


# ---- Links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "target"), [("a/again", "a"), ("a/up", "."), ("loop", "."), ("a/deep/er", "a"), ("a/x", "b/y")]
)
def test_a_link_to_a_folder_that_contains_it(tmp_path: Path, link: str, target: str) -> None:
    root = small_tree(tmp_path / "source")
    (root / "b" / "y").symlink_to(root / "a")  # with a/x -> b/y: two links that lead to each other
    if link != "a/x":
        (root / "b" / "y").unlink()
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(root / target)
    with pytest.raises(PrepError, match=rf"{root}/\S+ leads back to {root}\S*, a folder that contains it"):
        open_source(f"folder:{root}")


def test_a_class_is_not_reached_through_a_cycle(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "source")
    (root / "domain").symlink_to(root)
    with pytest.raises(PrepError, match="leads back to"):
        images_below(root / "domain" / "a", root)


def test_other_links_are_followed(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "source")
    elsewhere = small_tree(tmp_path / "elsewhere", ("c",))
    (root / "c").symlink_to(elsewhere / "c")
    (root / "a" / "more").symlink_to(elsewhere / "c")  # reached twice, but not from inside
    (root / "b" / "file.jpg").symlink_to(elsewhere / "c" / "0.jpg")
    (root / "b" / "itself.jpg").symlink_to(root / "b" / "itself.jpg")  # listed, and quarantined when it is read
    assert images_below(root / "a", root) == ["0.jpg", "1.jpg", "2.jpg", "more/0.jpg", "more/1.jpg", "more/2.jpg"]
    source = open_source(f"folder:{root}")
    assert source.classes == ("a", "b", "c") and len(source.samples) == 6 + 5 + 3


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small_tree(tmp_path / "source")

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PrepError, match="cannot be listed"):
        images_below(root / "a", root)


# ---- What is not a regular file --------------------------------------------------------------------------------------


def test_a_pipe_among_the_images_is_quarantined(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "source")
    os.mkfifo(root / "a" / "pipe.jpg")
    out = tmp_path / "out"
    prep_ok("build", f"folder:{root}", "--scenario", "joint", "--out", out, "--max-corrupt", 0.5)
    assert [(entry.path, entry.reason) for entry in load_manifest(out).quarantine] == [
        ("a/pipe.jpg", "is not a regular file")
    ]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", Path("/dev/zero"), tmp_path):
        assert encoded(str(path)).fault == "is not a regular file"
        with pytest.raises(ImageFault, match="not a regular file"):
            image_size(path)
    with pytest.raises(ImageFault, match="cannot be read: No such file"):
        image_size(tmp_path / "gone.jpg")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.jpg"
    huge.write_bytes(jpeg_of(picture(0)))
    os.truncate(huge, 1 << 40)
    assert "1099511627776 bytes, more than" in encoded(str(huge)).fault


# ---- Decoders that fail ----------------------------------------------------------------------------------------------


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(0)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("error", [RuntimeError("boom"), struct.error("boom"), zlib.error("boom"), AssertionError()])
def test_whatever_a_decoder_raises_is_a_fault(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    assert f"it cannot be decoded ({error})" in encoded(png()).fault


def test_a_lack_of_memory_is_not_the_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    assert "asks for more memory" in encoded(png()).fault  # the memory for its pixels is there
    monkeypatch.setattr(imagefile, "_BYTES_PER_PIXEL", 1 << 50)
    with pytest.raises(PrepError, match="memory ran out"):
        encoded(png())


@pytest.mark.parametrize("kind", ["TGA", "ICO", "PCX", "AVIF"])
def test_other_formats_are_not_decoded(kind: str) -> None:
    buffer = io.BytesIO()
    try:
        Image.fromarray(picture(0)).save(buffer, kind)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow does not write {kind}")
    assert encoded(buffer.getvalue()).fault == "it is not an image of a known format"


def test_nothing_but_damage_is_not_a_data_set(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "source")
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"not an image")
    with pytest.raises(PrepError, match="None of the 6 images can be decoded"):
        build_data(f"folder:{root}", tmp_path / "out", scenario="joint", max_corrupt=1.0)


# ---- Small files with large costs ------------------------------------------------------------------------------------


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are `count`."""
    jpeg = jpeg_of(np.full((48, 64, 3), 100, np.uint8), progressive=True)  # blank, so a repetition changes nothing
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * (count - jpeg.count(b"\xff\xda") + 1) + jpeg[-2:]


def with_size(width: int, height: int, jpeg: bytes) -> bytes:
    """A JPEG whose header says another size."""
    frame = max(jpeg.find(b"\xff\xc0"), jpeg.find(b"\xff\xc2"))
    return jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :]


def test_scans_are_counted() -> None:
    _codec.decode(with_scans(500))
    for decode in (_codec.decode, lambda jpeg: _codec.decode_region(jpeg, 64, 48, 0, 0, 64, 48)):
        with pytest.raises(ValueError, match="501 scans of 64 x 48 pixels, more than 500 are not read"):
            decode(with_scans(501))
    for check in ("full", "header"):
        assert "2000 scans" in encoded(with_scans(2000), check=check).fault


def test_markers_inside_a_segment_are_not_scans() -> None:
    thumbnail = b"\xff\xda\x00\x02" * 900
    jpeg = jpeg_of(picture(3), progressive=True)
    comment = b"\xff\xfe" + struct.pack(">H", len(thumbnail) + 2) + thumbnail
    _codec.decode(jpeg[:2] + comment + jpeg[2:])


def test_a_large_picture_has_fewer_scans() -> None:
    # The limit is on pixels times scans: 2 ** 32 of them.
    with pytest.raises(ValueError, match="100 scans of 8000 x 8000 pixels, more than 67 are not read"):
        _codec.decode(with_size(8000, 8000, with_scans(100)) + bytes(20_000))


@pytest.mark.parametrize(
    ("size", "says"), [((16000, 16000), "more than 178956970"), ((12000, 12000), "cannot be stored in")]
)
def test_a_header_cannot_ask_for_any_memory(size: tuple[int, int], says: str) -> None:
    jpeg = with_size(*size, jpeg_of(picture(0)))
    assert says in encoded(jpeg).fault
    with pytest.raises(ValueError, match=says):
        _codec.decode_region(jpeg, *size, 0, 0, 8, 8)


def test_pillow_reads_the_size_before_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def fail(_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    assert "178,956,970 pixels are not read" in encoded(bomb).fault


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L", "1", "I;16"])
def test_strips_join_without_a_seam(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 4), dtype=np.uint8)
    image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(pixels)
    buffer = io.BytesIO()
    (image if mode == "I;16" else image.convert(mode)).save(buffer, "PNG")
    whole = decode_with_pillow(buffer.getvalue())
    monkeypatch.setattr(imagefile, "_STRIP_PIXELS", 7 * 40)
    assert (decode_with_pillow(buffer.getvalue()) == whole).all()
