"""Offers the embedded data set as a source: synthetic[:key=value,...]."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from dataprep import _codec, synthetic
from dataprep.errors import PrepError
from dataprep.samples import Sample, Samples
from dataprep.sources import Payload, Source, SourceRequest
from dataprep.suggest import nearest

KINDS = ("synthetic",)
_JPEG_QUALITY = 92
_MIXED_PX = (96, 256)
# For each set, the usual number of classes and the possible ones.
_CLASSES: dict[str, tuple[int, Collection[int]]] = {
    "factors": (30, synthetic.FACTORS),
    "forms": (20, synthetic.FORMS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The settings of the source. `size` is the side in pixels, or "mixed" for JPEGs of different sizes."""

    set: str = "factors"  # or "forms"; see dataprep.synthetic
    size: str = "32"
    classes: int = 0  # 0: 30 for factors, 20 for forms
    train: int = 160  # images per class, spread evenly over the styles
    val: int = 40
    seed: int = 0
    format: str = "pixels"  # or "jpeg"


def open_source(request: SourceRequest) -> Source:
    request.refuse(classes=True)
    drawing = _parse(request.where)
    unknown = [name for name in request.domains if name not in synthetic.STYLES]
    if unknown:
        raise PrepError(
            f"'{unknown[0]}' is not a style of the embedded set. Choose from {', '.join(synthetic.STYLES)}."
        )
    mixed, forms = drawing.size == "mixed", drawing.set == "forms"
    styles = tuple(name for name in synthetic.STYLES if name in (request.domains or synthetic.STYLES))
    rows = [
        (f"{'val' if is_val else 'train'}/{label:03d}/{index:05d}", label, index % len(styles), is_val)
        for is_val, count in ((False, drawing.train), (True, drawing.val))
        for label in range(drawing.classes)
        for index in range(count)
    ]

    def payload(sample: Sample) -> Payload:
        pixels = draw(sample)
        return _codec.encode(pixels, _JPEG_QUALITY) if mixed or drawing.format == "jpeg" else pixels

    def draw(sample: Sample) -> npt.NDArray[np.uint8]:
        # Validation images continue the numbering of the training images, so that none is drawn twice.
        index = int(sample.key.rpartition("/")[2]) + (drawing.train if sample.is_val else 0)
        size_px = _mixed_size(drawing.seed, sample.id) if mixed else (int(drawing.size), int(drawing.size))
        return synthetic.draw(
            label=sample.label,
            num_classes=drawing.classes,
            style=synthetic.STYLES.index(styles[sample.domain]),
            size_px=size_px,
            seed=drawing.seed,
            index=index,
            forms=forms,
        )

    return Source(
        kind=request.kind,
        classes=tuple(synthetic.class_names(drawing.classes, forms)),
        domains=styles,
        samples=Samples.collect(rows),
        payload=payload,
        one_size=None if mixed else (int(drawing.size), int(drawing.size)),
    )


def _mixed_size(seed: int, sample_id: int) -> tuple[int, int]:
    low, high = _MIXED_PX
    height, width = np.random.Generator(np.random.Philox(key=[seed, sample_id])).integers(low, high + 1, 2).tolist()
    return height, width


def _parse(where: str) -> Drawing:
    known = {f.name: f.type for f in fields(Drawing)}
    values: dict[str, str | int] = {}
    for setting in filter(None, where.split(",")):
        key, _, text = setting.partition("=")
        if key not in known:
            raise PrepError(f"synthetic:{where}: '{key}' is not a setting. {nearest(key, known)}")
        if known[key] is int and not text.isdigit():
            raise PrepError(f"synthetic:{where}: {key} takes a number, not '{text}'.")
        values[key] = int(text) if known[key] is int else text
    drawing = Drawing(**values)  # type: ignore[arg-type]
    if drawing.set not in _CLASSES:
        raise PrepError(f"synthetic:{where}: set is '{drawing.set}'; use factors or forms.")
    default, known_classes = _CLASSES[drawing.set]
    drawing = drawing if drawing.classes else replace(drawing, classes=default)
    low, high = synthetic.SIZE_RANGE_PX
    if drawing.size != "mixed" and not (drawing.size.isdigit() and low <= int(drawing.size) <= high):
        raise PrepError(f"synthetic:{where}: size is '{drawing.size}'; use {low} to {high}, or mixed.")
    if drawing.format not in ("pixels", "jpeg"):
        raise PrepError(f"synthetic:{where}: format is '{drawing.format}'; use pixels or jpeg.")
    if drawing.classes not in known_classes:
        choices = ", ".join(map(str, sorted(known_classes)))
        raise PrepError(f"synthetic:{where}: classes is {drawing.classes}; use one of {choices}.")
    if drawing.train < 1:
        raise PrepError(f"synthetic:{where}: train is {drawing.train}; draw at least one image per class.")
    return drawing
