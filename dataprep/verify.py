"""Checks every checksum, count and image of a prepared folder, without changing it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console

from dataprep.contract import num_samples
from dataprep.encode import Encoding, Resize, encode_all
from dataprep.manifest import (
    DEFAULT_NAME,
    SPLITS,
    FileEntry,
    Manifest,
    ManifestError,
    load_manifest,
    manifest_path,
    sha256_of,
)
from dataprep.progress import ImageMeter
from dataprep.samples import NO_DOMAIN, Sample
from dataprep.table import Table, load_table, rows_of_ids
from dataprep.writers import Record, ShardDamage, formats


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a check: one sentence per problem, and how much was checked."""

    problems: tuple[str, ...]
    num_files: int
    num_images: int
    manifests: tuple[str, ...]


def verify(where: Path, *, quick: bool, num_workers: int, console: Console) -> Verification:
    """Checks a folder and returns all problems, so that one does not hide another. `quick` checks sizes and counts."""
    path = manifest_path(where)
    folder = path.parent
    manifest = load_manifest(path, check_sizes=False)
    problems: list[str] = []
    files = {entry.path: entry for entry in manifest.files()}
    others = _other_manifests(folder, path, manifest, problems)
    whole = {entry.path for entry in files.values() if _has_its_size(folder, entry, problems)}
    num_images = 0
    table: Table | None = None
    if manifest.samples.path in whole:
        try:
            table = load_table(manifest, folder)
        except ManifestError as error:
            problems.append(str(error))
    if table is not None:
        _check_quarantine(manifest, table, problems)
        for one in (manifest, *others):
            _check_tasks(one, table, problems)
    if not quick:
        with ImageMeter(console, sum(shard.count for shard in manifest.shards)) as meter:
            for entry in files.values():
                if entry.path in whole and not _has_its_checksum(folder, entry, problems):
                    whole.discard(entry.path)
            if manifest.keys.path in whole:
                _check_keys(manifest, folder, problems)
            if table is not None:
                for number, shard in enumerate(manifest.shards):
                    if shard.path not in whole:
                        continue
                    meter.label(f"{shard.path}")
                    num_images += _check_shard(manifest, number, table, folder, num_workers, meter, problems)
    return Verification(
        problems=tuple(problems),
        num_files=len(files),
        num_images=num_images,
        manifests=(manifest.name, *(other.name for other in others)),
    )


def _other_manifests(folder: Path, path: Path, manifest: Manifest, problems: list[str]) -> list[Manifest]:
    """Returns the other manifests of the folder, or none if the user named a single manifest."""
    if path.name != f"{DEFAULT_NAME}.json":
        return []
    found: list[Manifest] = []
    for other in sorted(folder.glob("*.json")):
        if other != path:
            try:
                loaded = load_manifest(other, check_sizes=False)
            except ManifestError as error:
                problems.append(str(error))
                continue
            if _contents(loaded) == _contents(manifest):
                found.append(loaded)
            else:
                problems.append(f"{other} describes other samples or shards than {path.name}. Run split again.")
    return found


def _contents(manifest: Manifest) -> tuple[object, ...]:
    """Returns what all manifests of a folder share."""
    names = (manifest.classes, manifest.domains, manifest.formats, manifest.source, manifest.quarantine)
    return (*names, manifest.samples, manifest.keys, manifest.shards)


def _check_quarantine(manifest: Manifest, table: Table, problems: list[str]) -> None:
    missing = sorted(table["id"][~table["is_stored"]].tolist())
    if missing != sorted(entry.id for entry in manifest.quarantine):
        problems.append(f"{manifest.name}.json: its quarantine does not name the samples that are not stored.")


def _check_keys(manifest: Manifest, folder: Path, problems: list[str]) -> None:
    path = manifest.keys.path_in(folder)
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    if count != num_samples(manifest):
        problems.append(f"{path} names {count} samples, not {num_samples(manifest)}.")


def _has_its_size(folder: Path, entry: FileEntry, problems: list[str]) -> bool:
    file, size = entry.path_in(folder), entry.size_in(folder)
    if size == entry.bytes:
        return True
    problems.append(f"{file} is missing." if size is None else f"{file} has {size} bytes instead of {entry.bytes}.")
    return False


def _has_its_checksum(folder: Path, entry: FileEntry, problems: list[str]) -> bool:
    file = entry.path_in(folder)
    try:
        if sha256_of(file) == entry.sha256:
            return True
        problems.append(f"{file} has changed: its checksum differs from the manifest's.")
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror}).")
    return False


def _check_tasks(manifest: Manifest, table: Table, problems: list[str]) -> None:
    """Checks that the tasks partition the stored samples, with the splits and shards that the manifest lists."""
    seen = np.zeros(len(table), np.int64)
    for number, task in enumerate(manifest.tasks):
        for name in SPLITS:
            part = task.part(name)
            ids: npt.NDArray[np.int64] = np.fromiter(part.iter_ids(), np.int64, part.count)
            try:
                rows = rows_of_ids(table, ids)
            except ManifestError as error:
                problems.append(f"{manifest.name}.json, task {number}, {name}: {error}")
                continue
            seen[rows] += 1
            if (table["is_val"][rows] != (name == "val")).any():
                problems.append(f"{manifest.name}.json, task {number}: {name} holds samples of the other split.")
            for what, members in (("label", task.classes), ("domain", task.domains)):
                strange = np.setdiff1d(table[what][rows], [*members, NO_DOMAIN] if what == "domain" else members)
                if len(strange):
                    problems.append(
                        f"{manifest.name}.json, task {number}, {name}: it holds samples with the {what} {strange[0]}, "
                        "which it does not name."
                    )
            for format, shards in part.shards.items():
                if np.unique(table[f"{format}_shard"][rows]).tolist() != sorted(shards):
                    problems.append(
                        f"{manifest.name}.json, task {number}, {name}: {format} shards differ from the table."
                    )
    if not np.array_equal(seen, table["is_stored"].astype(np.int64)):
        problems.append(f"{manifest.name}.json: its tasks do not hold every stored sample exactly once.")


def _check_shard(
    manifest: Manifest,
    number: int,
    table: Table,
    folder: Path,
    num_workers: int,
    meter: ImageMeter,
    problems: list[str],
) -> int:
    """Decodes the images of a shard and returns how many were read."""
    shard = manifest.shards[number]
    format = formats()[shard.format]
    rows = table[table[f"{shard.format}_shard"] == number]
    rows = rows[np.argsort(rows[f"{shard.format}_place"])]
    path = shard.path_in(folder)
    if len(rows) != shard.count:
        problems.append(f"{path}: the table places {len(rows)} samples in it, not {shard.count}.")
        return 0
    row_of = {int(row["id"]): row for row in rows}
    contents: dict[int, Record] = {}
    count = 0

    def samples() -> Iterator[Sample]:
        for record in format.read(path, rows):
            if record.label != (label := int(row_of[record.id]["label"])):
                problems.append(f"{path}: sample {record.id} is labelled {record.label}, not {label}.")
            contents[record.id] = record
            yield Sample(record.id, f"{path}, sample {record.id}", record.label, -1, shard.split == "val")

    try:
        decoded = encode_all(
            samples(),
            lambda sample: contents.pop(sample.id).content,
            Encoding(resize=Resize(), check="full"),
            want_jpeg=format.stores == "jpeg",
            want_pixels=format.stores == "pixels",
            num_threads=num_workers,
        )
        for image in decoded:
            count += 1
            meter.advance(1, len(image.jpeg))
            if image.fault:
                problems.append(f"{image.sample.key} does not decode: {image.fault}.")
            elif (image.width, image.height) != tuple(row_of[image.sample.id][["width", "height"]]):
                problems.append(f"{image.sample.key} is {image.width} x {image.height} pixels, unlike in the table.")
    except ShardDamage as damage:
        problems.append(f"{damage}.")
    return count
