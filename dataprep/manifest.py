"""The manifest: the contract between preparing and training. It lists the files, their order and their checksums.

A manifest is a JSON file beside the shards. It is written last and atomically, so its presence means that the data set
is complete. Several manifests may describe the same shards, each with a different split into tasks. This module needs
only the standard library, and nothing in a manifest is ever executed.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_type_hints

from dataprep.errors import PrepError

SCHEMA_VERSION = 1
DEFAULT_NAME = "manifest"
SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")


class ManifestError(PrepError):
    """A faulty manifest or prepared file. The text names the file, what is wrong with it and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file beside the manifest."""

    path: str  # relative to the manifest's folder, with forward slashes
    bytes: int
    sha256: str

    def path_in(self, folder: Path) -> Path:
        """Returns where the file is, given the manifest's folder."""
        return folder / self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry(FileEntry):
    """A file that holds samples."""

    format: str
    split: SplitName
    count: int
    index: FileEntry | None = None  # tar: the index that DALI's WebDataset reader takes


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSplit:
    """The training or validation samples of a task."""

    count: int
    ids: str  # sorted sample ids as ranges, such as "0-499,612"
    shards: dict[str, list[int]]  # for each format, the numbers of the manifest's shards that hold them

    def iter_ids(self) -> Iterable[int]:
        """Yields the sample ids in rising order."""
        return parse_ids(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry:
    """A task of the manifest. Classes and domains are indices into the manifest's lists."""

    name: str
    classes: list[int]
    domains: list[int]
    train: TaskSplit
    val: TaskSplit

    def part(self, split: SplitName) -> TaskSplit:
        return self.train if split == "train" else self.val


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioEntry:
    """How the samples were split into tasks."""

    kind: str
    num_tasks: int
    order: str  # "reference", or "seed S"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """The data set that was prepared."""

    kind: str
    fingerprint: str
    num_train: int
    num_val: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingEntry:
    """How the images were encoded, and how many were passed through unchanged or gave warnings."""

    resize: str
    quality: int
    check: str
    shard_mb: int
    limit_per_class: int | None
    num_passed_through: int
    num_warnings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineEntry:
    """An image that could not be decoded and is not stored."""

    id: int
    path: str  # in the source
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a prepared folder: its tasks, its files and their checksums."""

    schema: int
    name: str
    source: SourceEntry
    scenario: ScenarioEntry
    encoding: EncodingEntry
    classes: list[str]
    domains: list[str]
    formats: list[str]
    samples: FileEntry  # the sample table, see dataprep.table
    keys: FileEntry  # the source's name of every sample, one per line, in the table's order
    shards: list[ShardEntry]
    tasks: list[TaskEntry]
    quarantine: list[QuarantineEntry]

    def files(self) -> list[FileEntry]:
        """Returns all files that belong to the manifest."""
        found = [self.samples, self.keys]
        for shard in self.shards:
            found.append(shard)
            if shard.index is not None:
                found.append(shard.index)
        return found

    def save(self, folder: Path) -> Path:
        """Writes the manifest into a folder and returns its path."""
        path = folder / f"{self.name}.json"
        text = json.dumps(asdict(self), indent=1)  # in ASCII: a file name need not be valid Unicode
        write_atomically(path, text.encode())
        return path


def manifest_path(where: Path) -> Path:
    """Returns the path of a manifest, given that path or a prepared folder."""
    if where.is_dir():
        path = where / f"{DEFAULT_NAME}.json"
        if not path.is_file():
            unfinished = (where / ".build").exists()
            raise ManifestError(
                f"{where} holds an unfinished build. Run the same fastcssl-prep build command again to complete it."
                if unfinished
                else f"{where} holds no {path.name}. Prepare data with fastcssl-prep build SOURCE --out {where}."
            )
        return path
    if not where.is_file():
        raise ManifestError(f"{where} does not exist. Give a prepared folder, or one of its manifests.")
    return where


def load_manifest(where: Path, *, check_sizes: bool = True) -> Manifest:
    """Reads a manifest and returns it.

    Raises ManifestError if the version is unknown, a file is missing or has another size, or a path leaves the folder.
    """
    path = manifest_path(where)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"{path} cannot be read ({error.strerror}). Check its permissions.") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not valid JSON ({error}). Restore it or run fastcssl-prep again.") from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {version!r}; this version of fastcssl reads {SCHEMA_VERSION}. "
            "Prepare the data again, or use the version that wrote it."
        )
    try:
        manifest: Manifest = typed(Manifest, content, str(path))
        _check(manifest, path)
    except ManifestError as error:
        raise ManifestError(f"{error} Restore it from a copy, or run fastcssl-prep again.") from None
    if check_sizes:
        for entry in manifest.files():
            file = entry.path_in(path.parent)
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                found = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
                raise ManifestError(f"{file} {found}. Restore it from a copy, or build the data set again.")
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    for entry in manifest.files():
        parts = PurePosixPath(entry.path)
        inside = not parts.is_absolute() and ".." not in parts.parts and "\\" not in entry.path and parts.parts
        if not inside or not entry.path_in(path.parent).resolve().is_relative_to(path.parent.resolve()):
            raise ManifestError(f"{path} names {entry.path!r}, which leaves its folder.")
    if manifest.scenario.num_tasks != len(manifest.tasks):
        raise ManifestError(f"{path} says {manifest.scenario.num_tasks} tasks but lists {len(manifest.tasks)}.")
    for number, task in enumerate(manifest.tasks):
        for split in SPLITS:
            part = task.part(split)
            if any(not 0 <= i < len(manifest.shards) for shards in part.shards.values() for i in shards):
                raise ManifestError(f"{path}: task {number} names a shard that the manifest does not list.")
            try:
                count = sum(last - first + 1 for first, last in _parse_ranges(part.ids))
            except ValueError as error:
                raise ManifestError(f"{path}: task {number}, {split}: {error}.") from None
            if count != part.count:
                raise ManifestError(f"{path}: task {number} lists {count} {split} ids but says {part.count}.")


def typed(kind: Any, value: Any, where: str) -> Any:
    """Returns a value read from JSON as `kind`. Every field must be present, known and of its declared type."""
    if kind is Any:
        return value
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: expected an object, found {type(value).__name__}.")
        if set(value) != set(hints):
            strange = sorted(set(value) ^ set(hints))[0]
            raise ManifestError(f"{where}: the key '{strange}' is {'unknown' if strange in value else 'missing'}.")
        return kind(**{name: typed(hint, value[name], f"{where}: {name}") for name, hint in hints.items()})
    origin, args = getattr(kind, "__origin__", None), get_args(kind)
    if origin is list and isinstance(value, list):
        return [typed(args[0], item, where) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: typed(args[1], item, where) for key, item in value.items()}
    if origin is Literal and value in args:
        return value
    if type(None) in args:  # optional
        return None if value is None else typed(args[0], value, where)
    if isinstance(kind, type) and origin is None and isinstance(value, kind) and not (kind is int and value is True):
        return value
    raise ManifestError(f"{where}: {value!r:.60} is not a valid value.")


def format_ids(sorted_ids: Iterable[int]) -> str:
    """Returns sorted ids as ranges, such as "0-499,612"."""
    ranges: list[list[int]] = []
    for i in sorted_ids:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def parse_ids(text: str) -> Iterable[int]:
    """Yields the ids of a text that `format_ids` wrote."""
    for first, last in _parse_ranges(text):
        yield from range(first, last + 1)


def _parse_ranges(text: str) -> Iterable[tuple[int, int]]:
    previous = -1
    for item in filter(None, text.split(",")):
        begin, _, end = item.partition("-")
        if not begin.isdecimal() or (end and not end.isdecimal()):
            raise ValueError(f"'{item[:40]}' is not a range of ids")
        first, last = int(begin), int(end or begin)
        if first <= previous or last < first:
            raise ValueError(f"'{item[:40]}' is out of order")
        previous = last
        yield first, last


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entry_of(path: Path, folder: Path) -> FileEntry:
    """Returns the entry of a file below `folder`, with its size and checksum."""
    return FileEntry(path=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that after a crash it has either its old or its complete new content.

    If it fails, the error is that of the first call that failed, and no partial file is left.
    """
    part = path.with_name(path.name + ".part")
    file = part.open("wb")
    try:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
