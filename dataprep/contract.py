"""Checks what a manifest says about itself: that its parts agree, and that no number in it is out of range.

A manifest may come from anywhere, so a check takes no more time and memory than the manifest's own size: ranges of ids
are counted and not made, and the number of samples is bounded by the bytes of the sample table.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dataprep.id_ranges import count_ids

if TYPE_CHECKING:
    from dataprep.manifest import Manifest, SplitName, TaskEntry

FORMATS = ("tar", "array", "ffcv")
SCENARIOS = ("class", "data", "domain", "joint")
_SMALLEST_ROW = 22  # bytes of a sample's row in the table, without its places
_LONGEST_PATH = 4096


def faults(manifest: "Manifest", folder: Path) -> Iterator[str]:
    """Yields what is wrong with a manifest in a folder, as the ends of sentences. The first is the one to show."""
    yield from _path_faults(manifest, folder)
    yield from _file_faults(manifest)
    yield from _number_faults(manifest)
    for number, task in enumerate(manifest.tasks):
        yield from (f"task {number} {fault}" for fault in _task_faults(manifest, task))
    yield from _sum_faults(manifest)


def _path_faults(manifest: "Manifest", folder: Path) -> Iterator[str]:
    inside = folder.resolve()
    seen: set[PurePosixPath] = set()
    for entry in manifest.files():
        path = PurePosixPath(entry.path)
        if not _is_usable(entry.path):
            yield f"{entry.path!r:.80} is not a usable path"
            continue
        leaves = path.is_absolute() or ".." in path.parts or "\\" in entry.path or not path.parts
        try:
            leaves = leaves or not entry.path_in(folder).resolve().is_relative_to(inside)
        except (OSError, RuntimeError):  # links that lead to each other
            leaves = True
        if leaves:
            yield f"it names {entry.path!r}, which leaves its folder"
        if path in seen:
            yield f"it names {entry.path!r} twice, but every shard, table and index is a file of its own"
        seen.add(path)


def _is_usable(path: str) -> bool:
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) < _LONGEST_PATH


def _file_faults(manifest: "Manifest") -> Iterator[str]:
    for entry in manifest.files():
        if entry.bytes < 1:
            yield f"{entry.path} has {entry.bytes} bytes"
        if len(entry.sha256) != 64 or not set(entry.sha256) <= set("0123456789abcdef"):
            yield f"{entry.path} has the checksum {entry.sha256!r:.80}, which is not a SHA-256"
    unknown = [name for name in manifest.formats if name not in FORMATS]
    if unknown:
        yield f"its format {unknown[0]!r:.80} is unknown; the known ones are {', '.join(FORMATS)}"
    if not manifest.formats or len(set(manifest.formats)) != len(manifest.formats):
        yield f"its list of formats, {manifest.formats!r:.80}, is empty or has a repetition"
    if not manifest.shards:
        yield "it lists no shards"
    for shard in manifest.shards:
        if shard.format not in manifest.formats:
            yield f"{shard.path} has the format {shard.format!r:.80}, which is not in the list of formats"
        if shard.count < 1:
            yield f"{shard.path} holds {shard.count} samples"


def _number_faults(manifest: "Manifest") -> Iterator[str]:
    source, scenario = manifest.source, manifest.scenario
    if scenario.kind not in SCENARIOS:
        yield f"its scenario {scenario.kind!r:.80} is unknown; the known ones are {', '.join(SCENARIOS)}"
    if scenario.num_tasks != len(manifest.tasks):
        yield f"it says {scenario.num_tasks} tasks but lists {len(manifest.tasks)}"
    if not manifest.tasks:
        yield "it lists no tasks"
    if not manifest.classes:
        yield "it names no classes"
    if min(source.num_train, source.num_val) < 0 or num_samples(manifest) * _SMALLEST_ROW > manifest.samples.bytes:
        yield (
            f"its {source.num_train} training and {source.num_val} validation samples do not fit into the "
            f"{manifest.samples.bytes} bytes of {manifest.samples.path}"
        )


def num_samples(manifest: "Manifest") -> int:
    """Returns the number of rows of the sample table: all samples of the source, stored or quarantined."""
    return manifest.source.num_train + manifest.source.num_val


def _task_faults(manifest: "Manifest", task: "TaskEntry") -> Iterator[str]:
    for what, members, names in (("class", task.classes, manifest.classes), ("domain", task.domains, manifest.domains)):
        strange = [member for member in members if not 0 <= member < len(names)]
        if strange:
            yield f"names {what} {strange[0]}, but the manifest names {len(names)}"
        if len(set(members)) != len(members):
            yield f"names a {what} twice"
    for split in ("train", "val"):
        yield from (f"({split}) {fault}" for fault in _part_faults(manifest, task, split))


def _part_faults(manifest: "Manifest", task: "TaskEntry", split: "SplitName") -> Iterator[str]:
    part = task.part(split)
    try:
        count = count_ids(part.ids)
    except ValueError as error:
        yield f"lists ids that cannot be read: {error}"
        return
    if count != part.count:
        yield f"lists {count} {split} ids but says {part.count}"
    if set(part.shards) != set(manifest.formats):
        yield f"lists the shards of {', '.join(sorted(part.shards)) or 'no format'}, not of the manifest's formats"
        return
    for format, numbers in part.shards.items():
        if any(not 0 <= number < len(manifest.shards) for number in numbers):
            yield "names a shard that the manifest does not list"
            return
        shards = [manifest.shards[number] for number in numbers]
        if any((shard.format, shard.split) != (format, split) for shard in shards) or len(set(numbers)) != len(numbers):
            yield f"names a shard twice, or one that is not of the format {format} and the split {split}"
        if sum(shard.count for shard in shards) < count:
            yield f"has {count} samples, more than its {format} shards hold"


def _sum_faults(manifest: "Manifest") -> Iterator[str]:
    """Yields disagreements of the totals: every sample of the source is stored once in each format, or quarantined."""
    stored = sum(task.part(split).count for task in manifest.tasks for split in ("train", "val"))
    for format in manifest.formats:
        held = sum(shard.count for shard in manifest.shards if shard.format == format)
        if held != stored:
            yield f"its tasks have {stored} samples, but its {format} shards hold {held}"
    if stored + len(manifest.quarantine) != num_samples(manifest):
        yield (
            f"its source has {num_samples(manifest)} samples, but {stored} are stored and "
            f"{len(manifest.quarantine)} are quarantined"
        )
