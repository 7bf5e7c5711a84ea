"""Reads CIFAR-10 and CIFAR-100: the original python batches, without executing them, or train/test folders of PNGs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Sample, Samples
from dataprep.sources import Source, SourceRequest
from dataprep.sources.plain_pickle import PlainPickleError, read_plain_pickle
from dataprep.sources.tree import class_images, subfolders

SIZE_PX = 32
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Layout:
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    names_key: str
    labels_key: str
    num_classes: int


_LAYOUTS = {
    "cifar10": _Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        "batches.meta",
        "label_names",
        "labels",
        10,
    ),
    "cifar100": _Layout("cifar-100-python", ("train",), ("test",), "meta", "fine_label_names", "fine_labels", 100),
}
KINDS = tuple(_LAYOUTS)


def open_source(request: SourceRequest) -> Source:
    request.refuse(classes=True, domains=True)
    root = request.root()
    layout = _LAYOUTS[request.kind]
    for folder in (root, root / layout.folder):
        if all((folder / name).is_file() for name in (*layout.train, *layout.test, layout.meta)):
            return _from_batches(request.kind, folder, layout)
    for folder in (root, root / request.kind):
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return _from_folders(request.kind, folder, layout)
    raise PrepError(
        f"{root} holds neither {layout.folder} (with {', '.join((*layout.train, *layout.test, layout.meta))}) "
        "nor train/<class>/*.png and test/<class>/*.png. Unpack the python version of the data set there."
    )


def _from_batches(kind: str, folder: Path, layout: _Layout) -> Source:
    meta = folder / layout.meta
    names: list[Any] = _field(_read(meta), layout.names_key, list, meta)
    if len(names) != layout.num_classes:
        raise PrepError(f"{meta} names {len(names)} classes, not {layout.num_classes}. Unpack it again.")
    pixels: dict[bool, npt.NDArray[np.uint8]] = {}
    rows: list[tuple[str, int, int, bool]] = []
    for is_val, files in ((False, layout.train), (True, layout.test)):
        parts: list[npt.NDArray[np.uint8]] = []
        labels: list[int] = []
        for name in files:
            content = _read(folder / name)
            part: npt.NDArray[np.uint8] = _field(content, "data", np.ndarray, folder / name)
            part_labels: list[Any] = _field(content, layout.labels_key, list, folder / name)
            if part.shape != (len(part_labels), 3 * SIZE_PX * SIZE_PX) or part.dtype != np.uint8:
                raise PrepError(
                    f"{folder / name} holds pixels of shape {part.shape} for {len(part_labels)} labels. "
                    "Unpack it again."
                )
            parts.append(part)
            labels.extend(part_labels)
        if any(not isinstance(label, int) or not 0 <= label < layout.num_classes for label in labels):
            raise PrepError(f"{folder} holds a label outside 0 to {layout.num_classes - 1}. Unpack it again.")
        pixels[is_val] = np.concatenate(parts).reshape(-1, 3, SIZE_PX, SIZE_PX)
        split = "test" if is_val else "train"
        rows.extend((f"{split}/{i:05d}", label, NO_DOMAIN, is_val) for i, label in enumerate(labels))

    def payload(sample: Sample) -> npt.NDArray[np.uint8]:
        index = int(sample.key.rpartition("/")[2])
        return np.ascontiguousarray(pixels[sample.is_val][index].transpose(1, 2, 0))

    return Source(
        kind=kind,
        classes=tuple(map(str, names)),
        domains=(),
        samples=Samples.collect(rows),
        payload=payload,
        one_size=(SIZE_PX, SIZE_PX),
    )


def _from_folders(kind: str, folder: Path, layout: _Layout) -> Source:
    # The official names are in alphabetical order, so a folder's position in the sorted list is the official label.
    classes = tuple(subfolders(folder / "train"))
    if len(classes) != layout.num_classes or subfolders(folder / "test") != list(classes):
        raise PrepError(
            f"{folder} must have the same {layout.num_classes} class folders in train and test; it has "
            f"{len(classes)} and {len(subfolders(folder / 'test'))}. For another set of classes use folder:{folder}."
        )
    rows = [
        (key, label, NO_DOMAIN, split == "test")
        for split in ("train", "test")
        for key, label in class_images(folder, split, classes)
    ]
    return Source(
        kind=kind,
        classes=classes,
        domains=(),
        samples=Samples.collect(rows),
        payload=lambda sample: f"{folder}/{sample.key}",
        one_size=(SIZE_PX, SIZE_PX),
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_plain_pickle(file)
    except PlainPickleError as error:
        raise PrepError(f"{file} is not a CIFAR batch: {error}. Unpack the data set again.") from None
    return content if isinstance(content, dict) else {}


def _field(content: dict[str, Any], key: str, kind: type[T], file: Path) -> T:
    value = content.get(key)
    if not isinstance(value, kind):
        raise PrepError(f"{file} has no '{key}'. Unpack the python version of the data set again.")
    return value
