"""Turns images into the bytes that are stored.

Native threads (dataprep._codec) read, check, resize and re-encode JPEGs. Pillow, whose decoders also release the
interpreter lock, decodes other formats; the pixels then take the same native path.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from dataprep._codec import Status, Stored, Transcoder
from dataprep.errors import Interrupted, PrepError
from dataprep.imagefile import ImageFault, Pixels, decode_with_pillow, out_of_memory
from dataprep.samples import Sample

Check = Literal["full", "header"]
_POLL_SECONDS = 0.2
T = TypeVar("T")
MAX_SIDE_PX = 65_535  # the limit of FFCV's and the sample table's 16-bit columns, and above that of JPEG


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """How images are resized. `short` and `max` only shrink; `square` makes the centre square `size_px` wide."""

    fit: Literal["none", "short", "max", "square"] = "none"
    size_px: int = 0

    @classmethod
    def parse(cls, text: str) -> "Resize":
        """Returns the value of the flag --resize."""
        if text == "none":
            return cls()
        match = re.fullmatch(r"(short|max|square):(\d+)", text)
        if match is None or not 8 <= int(match[2]) <= MAX_SIDE_PX:
            raise PrepError(f"--resize {text} is not understood. Use short:256, max:500, square:96 or none.")
        return cls(fit=match[1], size_px=int(match[2]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self.fit if self.fit == "none" else f"{self.fit}:{self.size_px}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How images are resized, encoded and checked."""

    resize: Resize = Resize()
    quality: int = 90
    check: Check = "full"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """An image as it is stored. A damaged image has a `fault` and no content."""

    sample: Sample
    width: int = 0
    height: int = 0
    jpeg: bytes = b""
    pixels: Pixels | None = None
    passed_through: bool = False
    num_warnings: int = 0
    fault: str = ""


def encode_all(
    samples: Iterable[Sample],
    payload: Callable[[Sample], str | bytes | Pixels],
    encoding: Encoding,
    *,
    want_jpeg: bool,
    want_pixels: bool,
    num_threads: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Encoded]:
    """Yields every sample encoded, in order. `num_threads` threads work on a bounded number of samples at a time.

    `should_stop` is called several times per second; when it returns true, Interrupted is raised without waiting for
    images that are being encoded.
    """
    native = _transcoder(encoding, want_jpeg=want_jpeg, want_pixels=want_pixels, num_threads=num_threads)
    submitted: deque[Sample] = deque()
    finished: deque[Future[Encoded]] = deque()
    room = 4 * num_threads + 8
    waiting = iter(samples)
    exhausted = False

    def through_pillow(sample: Sample, file: bytes) -> Encoded:
        try:
            return _encoded(sample, native.store_pixels(decode_with_pillow(file)), want_pixels)
        except ImageFault as fault:
            return Encoded(sample=sample, fault=str(fault))

    pillow = ThreadPoolExecutor(num_threads, thread_name_prefix="pillow")
    try:
        while True:
            while not exhausted and len(submitted) + len(finished) < room:
                sample = next(waiting, None)
                exhausted = sample is None
                if sample is not None:
                    _submit(native, payload(sample))
                    submitted.append(sample)
            if submitted and not (finished and finished[0].done()) and len(finished) < room // 2:
                stored = _awaited(native.pop, should_stop)
                sample = submitted.popleft()
                if stored.status == Status.foreign:
                    finished.append(pillow.submit(through_pillow, sample, stored.file))
                else:
                    done: Future[Encoded] = Future()
                    done.set_result(_encoded(sample, stored, want_pixels))
                    finished.append(done)
            elif finished:
                yield _awaited(partial(_result, finished.popleft()), should_stop)
            else:
                return
    except MemoryError:
        raise out_of_memory() from None
    finally:
        pillow.shutdown(wait=False, cancel_futures=True)


def _awaited(poll: Callable[[float], T | None], should_stop: Callable[[], bool]) -> T:
    """Returns what `poll` returns within its seconds, asking again and again. Between calls, signals are handled."""
    while (found := poll(_POLL_SECONDS)) is None:
        if should_stop():
            raise Interrupted
    return found


def _result(future: Future[T], seconds: float) -> T | None:
    return future.result() if wait([future], seconds).done else None


def _transcoder(encoding: Encoding, *, want_jpeg: bool, want_pixels: bool, num_threads: int) -> Transcoder:
    return Transcoder(
        fit=encoding.resize.fit,
        size=encoding.resize.size_px,
        quality=encoding.quality,
        check_in_full=encoding.check == "full",
        want_jpeg=want_jpeg,
        want_pixels=want_pixels,
        num_threads=num_threads,
    )


def _submit(codec: Transcoder, payload: str | bytes | Pixels) -> None:
    if isinstance(payload, str):
        codec.submit_path(os.fsencode(payload))
    elif isinstance(payload, bytes):
        codec.submit_file(payload)
    else:
        codec.submit_pixels(payload)


def _encoded(sample: Sample, stored: Stored, want_pixels: bool) -> Encoded:
    if stored.status != Status.ok:
        return Encoded(sample=sample, fault=stored.fault)
    if max(stored.width, stored.height) > MAX_SIDE_PX:
        return Encoded(sample=sample, fault=f"{stored.width} x {stored.height} pixels are more than a shard can hold")
    pixels = np.frombuffer(stored.pixels, np.uint8).reshape(stored.height, stored.width, 3) if want_pixels else None
    return Encoded(
        sample=sample,
        width=stored.width,
        height=stored.height,
        jpeg=stored.jpeg,
        pixels=pixels,
        passed_through=stored.passed_through,
        num_warnings=stored.num_warnings,
    )
