"""Prepares the images for loader.py: photos at a short side of 256 px, and an array of 32-px images."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep import find_photos
from rich.console import Console

from dataprep.build import BuildJob, build
from dataprep.encode import Encoding, Resize
from dataprep.errors import PrepError
from dataprep.manifest import DEFAULT_NAME, load_manifest
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.scenario import Scenario
from dataprep.sources import Source, open_source
from dataprep.splits import resplit
from dataprep.table import load_table

SIDE_PX = 256
NUM_TASKS = 4


@dataclass(frozen=True, kw_only=True)
class Images:
    """A prepared set of images."""

    manifest: Path
    jpegs: Path | None  # the same images as single files, for peers that read those
    num_images: int
    mean_bytes: float  # per stored image


def prepare_photos(folder: Path, photos: Path, num_workers: int) -> Images:
    """Writes the photos in every format and splits them into tasks, so that every contender reads the same samples."""
    files, _ = find_photos(photos)
    samples = Samples.collect((f"{i:07d}/{Path(file).name}", 0, NO_DOMAIN, False) for i, file in enumerate(files))
    described: dict[str, Any] = {"classes": ("photo",), "domains": (), "samples": samples}
    source = Source(kind="folder", payload=lambda sample: files[sample.id], **described)
    formats = ("tar", "ffcv") if importlib.util.find_spec("ffcv") else ("tar",)
    _build(folder, source, formats, f"short:{SIDE_PX}", num_workers)
    _extract(folder, folder / "jpegs")
    return _images(resplit_evenly(folder), folder / "jpegs", "tar")


def prepare_small(folder: Path, cifar: Path | None, num_drawn: int, num_workers: int) -> Images:
    """Prepares the small images.

    `cifar` is CIFAR-100 as distributed or as folders, or a folder that was prepared with the array format.
    """
    if cifar is not None and (cifar / f"{DEFAULT_NAME}.json").is_file():
        return _images(cifar / f"{DEFAULT_NAME}.json", None, "array")
    drawn = f"synthetic:size=32,classes=20,train={num_drawn // 20},val=0"
    try:
        source = open_source(f"cifar100:{cifar}" if cifar else drawn)
    except PrepError as error:
        raise SystemExit(str(error)) from None
    _build(folder, source, ("array",), "none", num_workers)
    return _images(resplit_evenly(folder), None, "array")


def resplit_evenly(folder: Path) -> Path:
    return folder / f"{resplit(folder, Scenario(kind='data', num_tasks=NUM_TASKS), 'tasks').name}.json"


def _build(folder: Path, source: Source, formats: Sequence[str], resize: str, num_workers: int) -> None:
    job = BuildJob(
        source=source,
        scenario=Scenario(kind="joint", num_tasks=1),
        encoding=Encoding(resize=Resize.parse(resize)),
        formats=tuple(formats),
        out=folder,
        num_workers=num_workers,
    )
    try:
        build(job, Console(quiet=True))
    except PrepError as error:
        raise SystemExit(str(error)) from None


def _extract(folder: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    manifest = load_manifest(folder)
    table = load_table(manifest, folder)
    for row in table[table["is_stored"]]:
        path = target / f"{row['id']:07d}.jpg"
        if path.exists():
            continue
        with (folder / manifest.shards[row["tar_shard"]].path).open("rb") as shard:
            shard.seek(row["tar_place"])
            path.write_bytes(shard.read(row["tar_bytes"]))


def _images(path: Path, jpegs: Path | None, format: str) -> Images:
    manifest = load_manifest(path)
    if format not in manifest.formats:
        raise SystemExit(f"{path} was not prepared with --formats {format}. Prepare it again, or leave out --cifar.")
    table = load_table(manifest, path.parent)
    table = table[table["is_stored"] & ~table["is_val"]]
    mean_bytes = float(table[f"{format}_bytes"].mean())
    return Images(manifest=path, jpegs=jpegs, num_images=len(table), mean_bytes=mean_bytes)
