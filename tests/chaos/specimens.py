"""Makes small valid image files in every format that Pillow writes, and seeded mutants of any file."""

import io
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

SUPPORTED = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "PGM")  # by the suffixes that dataprep lists
SUFFIX = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm"}
# These are recognised by their content, so a damaged one may come under any name.
STRANGE = ("AVIF", "BLP", "DDS", "DIB", "ICNS", "ICO", "IM", "JPEG2000", "MPO", "PCX", "QOI", "SGI", "TGA")
_EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def picture(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    """Returns a smooth picture that is different for every seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _saved(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def _upside_down() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


def jpegs() -> list[bytes]:
    """Returns JPEGs of every kind that the codec distinguishes."""
    image = picture(1)
    return [
        _saved(image, "JPEG", quality=80),
        _saved(image, "JPEG", quality=80, subsampling=0),
        _saved(image, "JPEG", quality=40, progressive=True),
        _saved(image, "JPEG", quality=80, restart_marker_blocks=1),
        _saved(image, "JPEG", quality=80, exif=_upside_down()),
        _saved(image.convert("L"), "JPEG", quality=80),
        _saved(image.convert("CMYK"), "JPEG", quality=80),
        _saved(picture(2, 1, 1), "JPEG", quality=80),
        _saved(picture(3, 70, 9), "JPEG", quality=80),
    ]


def _pngs() -> list[bytes]:
    image = picture(4)
    deep = Image.fromarray(np.arange(24 * 32, dtype=np.uint16).reshape(24, 32) * 80)
    return [
        _saved(image, "PNG"),
        _saved(image.convert("RGBA"), "PNG"),
        _saved(image.convert("P"), "PNG", transparency=3),
        _saved(image.convert("LA"), "PNG"),
        _saved(image.convert("1"), "PNG"),
        _saved(deep, "PNG"),
    ]


def _webps() -> list[bytes]:
    image = picture(5)
    frames = [picture(6), picture(7)]
    return [
        _saved(image, "WEBP", quality=60),
        _saved(image.convert("RGBA"), "WEBP", lossless=True),
        _saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
    ]


def _tiffs() -> list[bytes]:
    image = picture(8)
    return [
        *(_saved(image, "TIFF", compression=name) for name in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg")),
        _saved(image, "TIFF", compression="packbits"),
        _saved(image.convert("1"), "TIFF", compression="group4"),
        _saved(image.convert("I;16"), "TIFF"),
        _saved(image.convert("F"), "TIFF"),
    ]


def _gifs() -> list[bytes]:
    frames = [picture(seed) for seed in (9, 10)]
    return [
        _saved(frames[0], "GIF"),
        _saved(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2),
        _saved(frames[0].convert("P"), "GIF", transparency=1, interlace=1),
    ]


def _bmps() -> list[bytes]:
    image = picture(11)
    return [_saved(image.convert(mode), "BMP") for mode in ("RGB", "L", "P", "1", "RGBA")]


def _pnms(modes: tuple[str, ...]) -> list[bytes]:
    image = picture(12)
    plain = b"P3\n2 2\n255\n" + b"1 2 3 " * 4 if "RGB" in modes else b"P2\n2 2\n65535\n1 2 3 65535\n"
    return [*(_saved(image.convert(mode), "PPM") for mode in modes), plain]


_MAKERS: dict[str, Callable[[], list[bytes]]] = {
    "JPEG": jpegs,
    "PNG": _pngs,
    "WEBP": _webps,
    "GIF": _gifs,
    "BMP": _bmps,
    "TIFF": _tiffs,
    "PPM": lambda: _pnms(("RGB",)),
    "PGM": lambda: _pnms(("L", "I;16", "1")),
}


def files_of(format: str) -> list[bytes]:
    """Returns small valid files of a format."""
    if format in _MAKERS:
        return _MAKERS[format]()
    return [_saved(picture(13, 32, 32).convert("P" if format == "BLP" else "RGB"), format)]


def can_make(format: str) -> bool:
    """Returns whether this build of Pillow writes a format."""
    Image.init()
    return format in _MAKERS or format in Image.SAVE


def mutant(files: list[bytes], rng: random.Random) -> bytes:
    """Returns one of the files with one to four changes."""
    content = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = rng.choice(_CHANGES)(content, files, rng)
    if content.startswith(b"\x89PNG") and rng.random() < 0.7:
        content = _with_valid_checksums(content)
    return bytes(content)


def _place(content: bytearray, rng: random.Random) -> int:
    """Returns a position, more often in the header, where a change matters most."""
    end = len(content) if rng.random() < 0.5 else min(len(content), 64)
    return rng.randrange(end) if end else 0


def _flip(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    if content:
        content[_place(content, rng)] ^= 1 << rng.randrange(8)
    return content


def _extreme(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    """Overwrites a field with a number at which programs overflow."""
    size = rng.choice((1, 2, 4))
    number = rng.choice(_EXTREMES) & ((1 << 8 * size) - 1)
    at = _place(content, rng)
    content[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
    return content


def _cut(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content) + 1)]


def _remove(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    at = _place(content, rng)
    del content[at : at + rng.choice((1, 2, 7, 64))]
    return content


def _repeat(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    at, length = _place(content, rng), rng.choice((1, 4, 40, 200))
    content[at:at] = content[at : at + length] * rng.choice((1, 2, 30))
    return content


def _noise(content: bytearray, _: list[bytes], rng: random.Random) -> bytearray:
    at, length = _place(content, rng), rng.choice((1, 4, 16, 100))
    content[at : at + length] = rng.randbytes(length)
    return content


def _splice(content: bytearray, files: list[bytes], rng: random.Random) -> bytearray:
    other = rng.choice(files)
    return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other)) :]


_CHANGES = (_flip, _flip, _extreme, _extreme, _cut, _remove, _repeat, _noise, _splice)


def _with_valid_checksums(png: bytearray) -> bytearray:
    """Returns a PNG whose chunks have the checksums of their content, so that the decoder sees the change."""
    at = 8
    while at + 12 <= len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        end = at + 8 + length
        if end + 4 > len(png):
            break
        png[end : end + 4] = zlib.crc32(png[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return png
