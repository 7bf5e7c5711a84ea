"""Reads STL-10's labelled binary files: channels first, pixels column by column, labels from 1."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Sample, Samples
from dataprep.sources import Source, SourceRequest

KINDS = ("stl10",)
SIZE_PX = 96
_NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def open_source(request: SourceRequest) -> Source:
    request.refuse(classes=True, domains=True)
    root = request.root()
    if (root / "stl10_binary").is_dir():
        root = root / "stl10_binary"
    images: dict[bool, npt.NDArray[np.uint8]] = {}
    rows: list[tuple[str, int, int, bool]] = []
    for is_val, split in ((False, "train"), (True, "test")):
        images[is_val], labels = _read(root, split)
        rows.extend((f"{split}/{i:06d}", int(label) - 1, NO_DOMAIN, is_val) for i, label in enumerate(labels))

    def payload(sample: Sample) -> npt.NDArray[np.uint8]:
        index = int(sample.key.rpartition("/")[2])
        return np.ascontiguousarray(images[sample.is_val][index].transpose(2, 1, 0))

    return Source(
        kind=request.kind,
        classes=_NAMES,
        domains=(),
        samples=Samples.collect(rows),
        payload=payload,
        one_size=(SIZE_PX, SIZE_PX),
    )


def _read(root: Path, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    pixels, labels = root / f"{split}_X.bin", root / f"{split}_y.bin"
    for file in (pixels, labels):
        if not file.is_file():
            raise PrepError(f"{file} is missing. Unpack stl10_binary.tar.gz and give its folder as stl10:PATH.")
    labels_S = np.fromfile(labels, np.uint8)
    expected = len(labels_S) * 3 * SIZE_PX * SIZE_PX
    if pixels.stat().st_size != expected or not len(labels_S):
        raise PrepError(
            f"{pixels} has {pixels.stat().st_size} bytes, but its {len(labels_S)} labels need {expected}. "
            "Download STL-10 again."
        )
    if labels_S.min() < 1 or labels_S.max() > len(_NAMES):
        raise PrepError(f"{labels} holds a label outside 1 to {len(_NAMES)}. Download STL-10 again.")
    return np.memmap(pixels, np.uint8, mode="r").reshape(-1, 3, SIZE_PX, SIZE_PX), labels_S
