"""Turns a data set on disk into ordered samples. Each family has a module; `open_source` finds it by the kind.

A source of another package is a function like a family's `open_source`, named by an entry point of `fastcssl.sources`
(docs/plugins.md).
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from dataprep.errors import PrepError
from dataprep.extensions import extension_names, load_extension
from dataprep.samples import Sample, Samples
from dataprep.suggest import nearest

GROUP = "fastcssl.sources"
SMALL_PX = 128  # images of one size up to this are stored as an array
Payload = str | bytes | npt.NDArray[np.uint8]  # the path of a file, its bytes, or pixels [height, width, 3]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """An opened data set: its classes, its domains and its samples."""

    kind: str
    classes: tuple[str, ...]  # the name of every label
    domains: tuple[str, ...]  # the name of every domain; empty if there are none
    samples: Samples
    payload: Callable[[Sample], Payload]
    one_size: tuple[int, int] | None = None  # (height, width) if all images have the same size
    notes: tuple[str, ...] = ()  # decisions that the user should see


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """The source and the selection that the user asked for."""

    kind: str
    where: str  # the text after the colon
    classes_file: Path | None = None
    domains: tuple[str, ...] = ()

    def root(self) -> Path:
        """Returns the folder after the colon, which must exist."""
        if not self.where:
            raise PrepError(f"The source '{self.kind}' needs a folder: {self.kind}:PATH.")
        root = Path(self.where).expanduser()
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "does not exist"
            raise PrepError(f"{root} {what}. Give the data set's folder as {self.kind}:PATH.")
        return root

    def refuse(self, *, classes: bool = False, domains: bool = False) -> None:
        """Raises PrepError if the user asked for a selection that this source does not support."""
        if classes and self.classes_file is not None:
            raise PrepError(f"--classes does not apply to the source '{self.kind}'. Leave it out.")
        if domains and self.domains:
            raise PrepError(f"--domains does not apply to the source '{self.kind}'. Leave it out.")


def families() -> dict[str, ModuleType]:
    """Returns the module that opens each of our own kinds of source."""
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        found.update({kind: module for kind in getattr(module, "KINDS", ())})
    return found


def _opener(spec: str, kind: str) -> Callable[[SourceRequest], Source]:
    """Returns the function that opens a kind of source: one of ours, or that of another package."""
    own = families()
    if kind in own:
        opener: Callable[[SourceRequest], Source] = own[kind].open_source
        return opener
    others = extension_names(GROUP)
    if kind not in others:
        is_path = Path(spec).expanduser().exists()
        known = sorted({*own, *others})
        hint = f"For any folder of images write folder:{spec}." if is_path else nearest(kind, known)
        raise PrepError(f"'{spec}' is not a source. {hint}")
    found: Callable[[SourceRequest], Source] = load_extension("source", kind, GROUP)
    return found


def open_source(spec: str, *, classes_file: Path | None = None, domains: tuple[str, ...] = ()) -> Source:
    """Returns the opened source. `spec` is KIND or KIND:WHERE, such as imagenet100:/data/imagenet."""
    kind, _, where = spec.partition(":")
    request = SourceRequest(kind=kind, where=where, classes_file=classes_file, domains=domains)
    try:
        source = _opener(spec, kind)(request)
    except OSError as error:
        raise PrepError(f"{spec} cannot be read ({error}). Check its permissions and the disk.") from error
    if not isinstance(source, Source):  # someone else's code
        raise PrepError(
            f"The source '{kind}' returned {type(source).__name__}, not a dataprep.sources.Source. Repair its package."
        )
    if not len(source.samples):
        raise PrepError(f"{spec} holds no images. Check the path, or use another source.")
    if not (~source.samples.is_val_S).any():
        raise PrepError(f"{spec} holds validation images but no training images. Add some to its training part.")
    for column, low, names in (
        (source.samples.label_S, 0, source.classes),
        (source.samples.domain_S, -1, source.domains),
    ):
        if column.min() < low or column.max() >= len(names):  # someone else's code
            raise PrepError(
                f"The source '{kind}' numbers a sample's class or domain {column.min()} to {column.max()}, but names "
                f"{len(names)}. Repair its package."
            )
    return source
