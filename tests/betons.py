"""Records for .beton files, and a file of them."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataprep.writers.beton import JpegRecord
from dataprep.writers.ffcv_process import BetonWriter, JpegRecords

WIDTH, HEIGHT, COUNT = 48, 40, 203


def jpeg_of(index: int, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    coarse = np.random.default_rng(index).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92)
    return file.getvalue()


def record_of(index: int, **changes: Any) -> JpegRecord:
    values: dict[str, Any] = {"jpeg": jpeg_of(index), "width": WIDTH, "height": HEIGHT}
    values |= {"label": index % 7, "id": 5_000_000_000 + 3 * index, "domain": index % 3}
    return JpegRecord(**(values | changes))


def write_beton(path: Path, records: JpegRecords, *, num_workers: int, largest_bytes: int, **options: Any) -> None:
    with BetonWriter(num_workers) as writer:
        writer.write(path, records, largest_bytes=largest_bytes, **options)


def write_even(path: Path) -> None:
    """COUNT images of one size, written by two workers."""
    seen: list[int] = []
    records = [record_of(index) for index in range(COUNT)]
    write_beton(path, records, num_workers=2, largest_bytes=20_000, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == COUNT
    assert os.listdir(path.parent) == [path.name]
