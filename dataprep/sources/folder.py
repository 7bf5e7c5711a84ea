"""Reads any folder of images: {split}/{class}/image, {domain}/{class}/image or {class}/image.

If there is no validation folder, a tenth of the images of every class and domain, chosen by a fixed seed, is held out.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.scenario import randperm
from dataprep.sources import SMALL_PX, Source, SourceRequest
from dataprep.sources.tree import choose_classes, class_images, is_folder, is_image, listed, read_class_list, subfolders

KINDS = ("folder",)
HELD_OUT_FRACTION = 0.1
HELD_OUT_SEED = 0
_TRAIN = ("train", "training")
_VAL = ("val", "valid", "validation", "test", "testing")  # the first one present is used


def open_source(request: SourceRequest) -> Source:
    root = request.root()
    top = subfolders(root)
    if not top:
        raise PrepError(f"{root} has no class folders. Arrange it as {{class}}/image or {{split}}/{{class}}/image.")
    notes: list[str] = []
    split_of = {name: name.lower() for name in top}
    train = next((n for n in top if split_of[n] in _TRAIN), None)
    if train is not None and subfolders(root / train):
        request.refuse(domains=True)
        val = next((n for word in _VAL for n in top if split_of[n] == word), None)
        unused = [n for n in top if n not in (train, val)]
        if unused:
            notes.append(f"Folders beside {train}{' and ' + val if val else ''} are not used: {', '.join(unused)}.")
        classes = _classes(request, subfolders(root / train), root / train)
        rows = [(key, label, NO_DOMAIN, False) for key, label in class_images(root, train, classes)]
        if val is not None:
            strange = sorted(set(subfolders(root / val)) - set(subfolders(root / train)))
            if strange:
                raise PrepError(
                    f"{root / val} has classes that {train} does not have, such as {strange[0]}. Make them agree."
                )
            rows += [(key, label, NO_DOMAIN, True) for key, label in class_images(root, val, classes)]
        domains: tuple[str, ...] = ()
    elif any(_holds_images(root / name) for name in top):
        request.refuse(domains=True)
        classes = _classes(request, top, root)
        rows = [(key, label, NO_DOMAIN, False) for key, label in class_images(root, "", classes)]
        domains = ()
    else:
        missing = [name for name in request.domains if name not in top]
        if missing:
            raise PrepError(f"{root} has no domain '{missing[0]}'. It has {', '.join(top)}.")
        domains = tuple(name for name in top if name in (request.domains or top))
        classes = _classes(request, sorted({c for d in domains for c in subfolders(root / d)}), root)
        rows = [
            (key, label, domain, False)
            for domain, name in enumerate(domains)
            for key, label in class_images(root, name, classes)
        ]
    if not any(is_val for *_, is_val in rows):
        rows, num_held_out = _hold_out(rows)
        notes.append(
            f"There is no validation folder: {num_held_out} images, chosen with a fixed seed, are held out for it."
            if num_held_out
            else "There are no validation images, because no class has a second image that could be held out."
        )
    empty = sorted({classes[label] for label in range(len(classes))} - {classes[label] for _, label, _, _ in rows})
    if empty:
        raise PrepError(
            f"{root} has no images for the class {empty[0]} ({len(empty)} empty classes in all). Fill or remove it."
        )
    samples = Samples.collect(rows)
    return Source(
        kind=request.kind,
        classes=classes,
        domains=domains,
        samples=samples,
        payload=lambda sample: f"{root}/{sample.key}",
        one_size=_one_size(root, samples),
        notes=tuple(notes),
    )


def _classes(request: SourceRequest, available: list[str], where: Path) -> tuple[str, ...]:
    if request.classes_file is None:
        return tuple(available)
    wanted = read_class_list(request.classes_file)
    return choose_classes(available, wanted, where=where, listed_in=str(request.classes_file))


def _holds_images(folder: Path) -> bool:
    return any(is_image(entry.name) and not is_folder(entry) for entry in listed(folder))


def _hold_out(rows: list[tuple[str, int, int, bool]]) -> tuple[list[tuple[str, int, int, bool]], int]:
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (_, label, domain, _) in enumerate(rows):
        groups.setdefault((domain, label), []).append(row)
    held: set[int] = set()
    for number, members in enumerate(groups[group] for group in sorted(groups)):
        if len(members) < 2:
            continue
        count = max(1, round(len(members) * HELD_OUT_FRACTION))
        order = randperm(len(members), HELD_OUT_SEED + number)
        held.update(members[i] for i in order[:count])
    kept = [row for i, row in enumerate(rows) if i not in held]
    # Training samples come first, as in every source.
    return kept + [(*rows[i][:3], True) for i in sorted(held)], len(held)


def _one_size(root: Path, samples: Samples) -> tuple[int, int] | None:
    """Returns the size that all images share if it is small. It checks a few first, so that photos take little time."""
    if not len(samples):
        return None
    few = np.unique(np.linspace(0, len(samples) - 1, 64).astype(int)).tolist()
    size = _shared_size(root / samples.key(row) for row in few)
    if size is None or max(size) > SMALL_PX:
        return None
    return _shared_size(root / samples.key(row) for row in range(len(samples)))


def _shared_size(files: Iterable[Path]) -> tuple[int, int] | None:
    from dataprep.imagefile import ImageFault, image_size  # imported here, because most sources need no Pillow

    sizes: set[tuple[int, int]] = set()
    for file in files:
        try:
            sizes.add(image_size(file))
        except ImageFault:
            continue  # the encoder will report what is wrong with the file
        if len(sizes) > 1:
            return None
    return sizes.pop() if sizes else None
