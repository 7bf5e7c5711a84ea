"""Opens image files with Pillow: only the supported formats, only regular files, and only up to the codec's limits."""

import io
import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from dataprep._codec import MAX_PIXELS
from dataprep.errors import PrepError

Pixels = npt.NDArray[np.uint8]
# Pillow knows dozens of other formats, whose decoders are less tested and read what nobody meant to give them.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_LARGE_PIXELS = 1 << 25
_STRIP_PIXELS = 1 << 22
_BYTES_PER_PIXEL = 16  # more than any decoder of these formats needs
_turn = threading.Lock()  # large images take turns, so that the memory does not grow with the number of threads


class ImageFault(ValueError):
    """The image cannot be decoded; the text says why."""


def open_image(file: bytes | BinaryIO) -> Image.Image:
    """Returns an image whose header is read and whose pixels are not. Raises ImageFault if it cannot be read."""
    try:
        image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_FORMATS)
    except UnidentifiedImageError:
        raise ImageFault("it is not an image of a known format") from None
    except Image.DecompressionBombError:
        raise ImageFault(f"more than {MAX_PIXELS:,} pixels are not read") from None
    except MemoryError:
        raise _memory_fault(1 << 26) from None
    except Exception as error:  # Pillow's plugins raise all kinds of errors on damaged files
        raise ImageFault(f"it cannot be decoded ({error})") from None
    if image.width * image.height > MAX_PIXELS:
        raise ImageFault(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,} are not read")
    return image


def image_size(path: Path) -> tuple[int, int]:
    """Returns the (height, width) in the header of an image file. Raises ImageFault if it cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a device may have an effect
            raise ImageFault("is not a regular file")
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # it has been replaced
                raise ImageFault("is not a regular file")
            with open_image(file) as image:
                return image.height, image.width
    except OSError as error:
        raise ImageFault(f"cannot be read: {error.strerror}") from None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def decode_with_pillow(file: bytes) -> Pixels:
    """Returns an image file as RGB: the first frame, upright, 16-bit values scaled, transparency over white."""
    with open_image(file) as image:
        num_pixels = image.width * image.height
        if num_pixels <= _LARGE_PIXELS:
            return _decoded(image, num_pixels)
        with _turn:
            return _decoded(image, num_pixels)


def _decoded(image: Image.Image, num_pixels: int) -> Pixels:
    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        rgb = np.empty((image.height, image.width, 3), np.uint8)
        # Conversions need several times the memory of their input, so they take a few rows at a time.
        step = max(1, _STRIP_PIXELS // image.width)
        for top in range(0, image.height, step):
            bottom = min(top + step, image.height)
            rgb[top:bottom] = _rgb(image.crop((0, top, image.width, bottom)))
        return rgb
    except MemoryError:
        raise _memory_fault(_BYTES_PER_PIXEL * num_pixels) from None
    except Exception as error:  # Pillow's plugins raise all kinds of errors on damaged files
        raise ImageFault(f"it cannot be decoded ({error})") from None


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):
        # 16-bit grey. Pillow's own conversion would clip it at 255.
        grey = np.clip(np.rint(np.asarray(image).astype(np.float64) / 257.0), 0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def _memory_fault(needed_bytes: int) -> Exception:
    """Returns the error to raise after a MemoryError: the image's fault if the memory that it should need is there.

    An image must not be left out because the machine is small: the result would depend on the machine.
    """
    try:
        bytearray(needed_bytes + (1 << 24))
    except MemoryError:
        return out_of_memory()
    return ImageFault("it asks for more memory than its pixels need")


def out_of_memory() -> PrepError:
    """Returns the error to raise when an image within the limits does not fit into the memory."""
    return PrepError(
        "The memory ran out while an image was decoded. Use fewer --workers, or end other programs, and run the same "
        "command again."
    )
