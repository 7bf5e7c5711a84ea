"""Lists folders of images, one folder per class, in the order of torchvision's ImageFolder."""

import os
from collections.abc import Iterator
from pathlib import Path

from dataprep.errors import PrepError

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)


def is_image(name: str) -> bool:
    """Returns whether a file is an image, judging by its name."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def subfolders(folder: Path) -> list[str]:
    """Returns the sorted names of the folders in a folder, without hidden ones."""
    return sorted(entry.name for entry in listed(folder) if is_folder(entry))


def listed(folder: Path) -> list["os.DirEntry[str]"]:
    """Returns the entries of a folder, without hidden ones."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise PrepError(f"{folder} cannot be listed ({error.strerror}). Change its permissions, or move it.") from None


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Returns whether an entry is a folder, or a link to one. A link that leads nowhere is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def images_below(folder: Path, root: Path | None = None) -> list[str]:
    """Returns the images below `folder`, sorted by folder and name, as relative paths with forward slashes.

    Links are followed. Raises PrepError if one leads to a folder that contains it: `root`, which is by default
    `folder`, or one below it. What is named like an image but cannot be read is listed; the encoder says what is wrong.
    """
    root = root or folder
    above: frozenset[tuple[int, int]] = frozenset()
    for parent in reversed(folder.relative_to(root).parents):
        above |= {_entered(root / parent, above)}
    found: list[str] = []
    # Folders to list: their path below `folder`, and the identities of the folders that contain them.
    waiting = [("", above)]
    while waiting:
        prefix, containing = waiting.pop()
        here = folder / prefix
        containing |= {_entered(here, containing)}
        entries = sorted(listed(here), key=lambda entry: entry.name)
        folders = [entry.name for entry in entries if is_folder(entry)]
        names = {entry.name for entry in entries} - set(folders)
        found.extend(prefix + name for name in sorted(names) if is_image(name))
        waiting.extend((f"{prefix}{name}/", containing) for name in reversed(folders))
    return found


def _entered(folder: Path, containing: frozenset[tuple[int, int]]) -> tuple[int, int]:
    """Returns the identity of a folder, which must not be one of those that contain it."""
    try:
        status = folder.stat()
    except OSError as error:
        raise PrepError(f"{folder} cannot be read ({error.strerror}). Change its permissions, or move it.") from None
    if (status.st_dev, status.st_ino) in containing:
        raise PrepError(
            f"{folder} leads back to {folder.resolve()}, a folder that contains it, so its images would be listed "
            "again and again. Remove this link."
        )
    return status.st_dev, status.st_ino


def class_images(root: Path, split: str, classes: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yields (key, label) for every image in root/split/class, with the classes in the given order."""
    for label, name in enumerate(classes):
        folder = root / split / name if split else root / name
        if folder.is_dir():
            prefix = f"{split}/{name}/" if split else f"{name}/"
            yield from ((prefix + image, label) for image in images_below(folder, root))


def read_class_list(file: Path) -> tuple[str, ...]:
    """Returns the sorted class names of a file. Only the first word of each line counts.

    As in ImageFolder, the label is the position in the sorted list.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PrepError(f"The class list {file} cannot be read ({error}). Give --classes a text file.") from None
    names = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise PrepError(f"The class list {file} names no class. Write the name of one class folder per line.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PrepError(f"The class list {file} names {twice[0]} twice. Remove the repetition.")
    return tuple(sorted(names))


def choose_classes(available: list[str], wanted: tuple[str, ...], *, where: Path, listed_in: str) -> tuple[str, ...]:
    """Returns `wanted`. Raises PrepError if some of these classes are not available."""
    missing = sorted(set(wanted) - set(available))
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise PrepError(
            f"{where} lacks {len(missing)} of the {len(wanted)} classes of {listed_in}: {shown}. "
            "Complete the folder, or give the list of the classes you have with --classes FILE."
        )
    return wanted
