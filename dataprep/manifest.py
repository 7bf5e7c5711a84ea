"""The manifest: the contract between preparing and training. It lists the files, their order and their checksums.

A manifest is a JSON file beside the shards. It is written last and atomically, so its presence means that the data set
is complete. Several manifests may describe the same shards, each with a different split into tasks. This module needs
only the standard library, and nothing in a manifest is ever executed.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dataprep.contract import faults
from dataprep.errors import Interrupted, PrepError, unreadable
from dataprep.id_ranges import parse_ids

SCHEMA_VERSION = 1
_MAX_BYTES = 1 << 28  # ids take 9 bytes each if their order is random: 29 million images
DEFAULT_NAME = "manifest"
_BLOCK_BYTES = 1 << 22
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

    def size_in(self, folder: Path) -> int | None:
        """Returns the size that the file has, or None if there is no such file."""
        try:
            status = self.path_in(folder).stat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None


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

    Raises ManifestError if the version is unknown, a file is missing or has another size, a path leaves the folder, or
    the entries contradict each other.
    """
    path = manifest_path(where)
    try:
        if (num_bytes := path.stat().st_size) > _MAX_BYTES:
            raise ManifestError(f"{path} has {num_bytes} bytes, more than {_MAX_BYTES}; it is not a manifest.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(unreadable(path, error, "Check its permissions.")) from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not valid JSON ({error}). Restore it or run fastcssl-prep again.") from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"{path} has schema version {version!r:.40}; this version of fastcssl reads {SCHEMA_VERSION}. "
            "Prepare the data again, or use the version that wrote it."
        )
    try:
        manifest: Manifest = typed(Manifest, content, str(path))
        for fault in faults(manifest, path.parent):
            raise ManifestError(f"{path}: {fault}.")
    except ManifestError as error:
        raise ManifestError(f"{error} Restore it from a copy, or run fastcssl-prep again.") from None
    if check_sizes:
        for entry in manifest.files():
            check_size(entry, path.parent)
    return manifest


def check_size(entry: FileEntry, folder: Path) -> None:
    """Raises ManifestError if a file is missing or does not have the size that the manifest says."""
    file, size = entry.path_in(folder), entry.size_in(folder)
    if size != entry.bytes:
        found = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
        raise ManifestError(f"{file} {found}. Restore it from a copy, or build the data set again.")


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
            is_known = strange not in value
            raise ManifestError(f"{where}: the key {strange!r:.80} is {'missing' if is_known else 'unknown'}.")
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
    if isinstance(kind, type) and origin is None and type(value) is kind:
        return value
    raise ManifestError(f"{where}: {value!r:.60} is not a valid value.")


def sha256_of(path: Path, should_stop: Callable[[], bool] = lambda: False) -> str:
    """Returns the checksum of a file. Raises Interrupted when `should_stop`, called between blocks, returns true."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            if should_stop():
                raise Interrupted
    return digest.hexdigest()


def entry_of(path: Path, folder: Path) -> FileEntry:
    """Returns the entry of a file below `folder`, with its size and checksum."""
    return FileEntry(path=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))


# ---- Durable files ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that after a crash it has either its old or its complete new content.

    If it fails, the error is that of the first call that failed, and no partial file is left.
    """
    with replacing(path) as part:
        part.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a partial file to write, and then gives it the name `path`, durably.

    If anything fails, the file at `path` stays as it was, and no partial file is left.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        settle(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def settle(part: Path, path: Path) -> None:
    """Gives a complete file its final name. When this returns, the content and the name outlast a power loss."""
    descriptor = os.open(part, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(part, path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder and the folders that contain it, so that they outlast a power loss."""
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in made:
        with contextlib.suppress(PermissionError):  # a folder may be writable and not readable
            sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Makes new names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
