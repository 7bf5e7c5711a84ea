"""Records what a build has finished, so that the next start continues from there.

DIR/.build/job.json     what is being built; a different job in the same folder is refused, naming the differences
DIR/.build/journal      one JSON line per sealed part, appended after its files are complete and synced
DIR/.build/rows/        the sample-table rows of every part
DIR/.build/spool/       temporary tar parts from which a derived format is made
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dataprep.errors import PrepError
from dataprep.manifest import SplitName, make_folder, sha256_of, sync_folder, write_atomically

FOLDER = ".build"
_DERIVED = -1  # the part number that marks a derived file in a line of the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """A complete file of a sealed part."""

    path: str  # relative to the output folder
    format: str
    bytes: int
    sha256: str
    count: int
    index: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedPart:
    """A run of consecutive samples of one task and split, or a derived file over all of them."""

    task: int
    split: SplitName
    number: int | None  # counts the parts of a task and split from 0; None for a derived file
    num_consumed: int  # samples, including quarantined ones
    num_passed_through: int
    num_warnings: int
    seconds: float
    files: list[SealedFile]
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Any] | None = None  # the file of the table's rows; None in journals of version 0.1, and if derived

    @property
    def is_derived(self) -> bool:
        return self.number is None

    @property
    def order(self) -> tuple[int, str, int]:
        """Returns the sort key of the manifest's order: a derived file comes before the parts it was made from."""
        return self.task, self.split, _DERIVED if self.number is None else self.number

    def to_line(self) -> bytes:
        """Returns this part as a line of the journal."""
        content = {"part" if key == "number" else key: value for key, value in asdict(self).items()}
        if self.number is None:
            content["part"] = _DERIVED
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "SealedPart":
        """Returns the part that a line of the journal describes. Raises an exception if the line is damaged."""
        content = json.loads(line)
        files = [SealedFile(**file) for file in content.pop("files")]
        number = content.pop("part")
        return cls(**content, number=None if number == _DERIVED else number, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """The settings that may not change when a build is started again in the same folder."""

    source: str
    fingerprint: str
    scenario: str
    num_tasks: int
    order: str
    formats: tuple[str, ...]
    resize: str
    quality: int
    check: str
    shard_mb: int
    limit_per_class: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns the values under the names that users know, for job.json and for messages."""
        return {
            "source": self.source,
            "source fingerprint": self.fingerprint,
            "--scenario": self.scenario,
            "--tasks": self.num_tasks,
            "order": self.order,
            "--formats": list(self.formats),
            "--resize": self.resize,
            "--quality": self.quality,
            "--check": self.check,
            "--shard-mb": self.shard_mb,
            "--limit-per-class": self.limit_per_class,
        }


def part_name(task: int, split: SplitName, number: int | None) -> str:
    """Returns a part's path without its suffix. `number` is None for a file over all parts of the task and split."""
    return f"task-{task:02d}/{split}" + ("" if number is None else f"-{number:05d}")


class Journal:
    """The record of the sealed parts. It holds the folder's lock while it is open."""

    def __init__(self, out: Path, job: JobIdentity, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Opens the journal of a folder. What is not as the journal says, byte for byte, does not count as sealed."""
        self.out = out
        self.folder = out / FOLDER
        self.parts: list[SealedPart] = []
        self._should_stop = should_stop
        make_folder(out)
        lock = _locked(out)
        if lock is None:
            raise PrepError(
                f"Another fastcssl-prep is writing into {out}. Wait until it ends, or choose another --out."
            )
        self._lock = lock
        try:
            self._open(job)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, job: JobIdentity) -> None:
        self._refuse_strangers()
        make_folder(self.folder / "rows")
        job_file = self.folder / "job.json"
        if job_file.exists():
            refuse_other_job(self.out, _load_json(job_file), job)
        else:
            write_atomically(job_file, json.dumps(job.to_json(), indent=1).encode())
        self._path = self.folder / "journal"
        self._path.touch()
        sync_folder(self.folder)
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                part = SealedPart.from_line(line)
            except (ValueError, TypeError, KeyError, AttributeError):
                break  # the line was cut off while it was written: that part is written again
            if not line.endswith(b"\n") or not self._is_whole(part):
                break
            self.parts.append(part)
            whole += len(line)
        self._file = self._path.open("r+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        self._remove_unsealed()

    def _refuse_strangers(self) -> None:
        if self.folder.exists():
            return
        strange = sorted(entry.name for entry in os.scandir(self.out) if entry.name != ".lock")
        if strange:
            raise PrepError(
                f"{self.out} already holds other files, such as {strange[0]}. Choose an empty folder with --out."
            )

    def _is_whole(self, part: SealedPart) -> bool:
        """Returns whether all files of a part have the size and checksum that the journal says."""
        entries = [asdict(file) for file in part.files]
        entries += [file.index for file in part.files if file.index]
        if part.rows is not None:
            entries.append(part.rows)
        elif not part.is_derived and not self._has_rows(part):
            return False
        for entry in entries:
            path = self.out / entry["path"]
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return False
            if sha256_of(path, self._should_stop) != entry["sha256"]:
                return False
        return True

    def _has_rows(self, part: SealedPart) -> bool:
        """Returns whether the rows of a part can be read, for journals that do not say their checksum."""
        try:
            rows = np.load(self.rows_path(part.task, part.split, part.number), allow_pickle=False)
        except (OSError, EOFError, ValueError):
            return False
        return bool(rows.shape == (part.num_consumed - len(part.quarantine),))

    def _remove_unsealed(self) -> None:
        sealed = {file.path for part in self.parts for file in part.files}
        sealed |= {file.index["path"] for part in self.parts for file in part.files if file.index}
        for root in (self.out, self.folder / "spool"):
            for path in root.glob("task-*/*"):
                if path.relative_to(self.out).as_posix() not in sealed:
                    path.unlink()

    def seal(self, part: SealedPart) -> None:
        """Appends a part whose files are complete. From then on the next start skips it."""
        self._file.write(part.to_line())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.parts.append(part)

    def rows_path(self, task: int, split: SplitName, number: int | None) -> Path:
        """Returns the path of the sample-table rows of a part."""
        return self.folder / "rows" / (part_name(task, split, number).replace("/", "-") + ".npy")

    def of(self, task: int, split: SplitName) -> list[SealedPart]:
        """Returns the parts of a task and split in order, without derived files."""
        return [part for part in self.parts if (part.task, part.split) == (task, split) and not part.is_derived]

    def rows(self, sealed: SealedPart) -> npt.NDArray[np.void]:
        """Returns the sample-table rows of a part, or of all the parts that a derived file was made from."""
        parts = self.of(sealed.task, sealed.split) if sealed.is_derived else [sealed]
        paths = [self.rows_path(part.task, part.split, part.number) for part in parts]
        rows: npt.NDArray[np.void] = np.concatenate([np.load(path, allow_pickle=False) for path in paths])
        return rows

    def derived(self, task: int, split: SplitName, format: str) -> SealedFile | None:
        """Returns the derived file of a task and split, or None if it is not sealed yet."""
        for part in self.parts:
            if part.is_derived and (part.task, part.split, part.files[0].format) == (task, split, format):
                return part.files[0]
        return None

    def remove(self) -> None:
        """Removes the journal, which is not needed after the manifest is written."""
        self._file.close()
        self._path.unlink()  # removed first: a build killed after this line leaves a finished folder
        shutil.rmtree(self.folder)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.close()


def _locked(out: Path) -> IO[str] | None:
    """Returns the folder's lock, or None if another process holds it.

    A record lock ends with this process, even if it is killed, and child processes do not inherit it.
    """
    lock = (out / ".lock").open("a+")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        raise
    return lock


def finish_removal(out: Path) -> None:
    """Removes what a build that was killed after its last step has left of its journal. The folder is complete."""
    if not (out / FOLDER).exists():
        return
    lock = _locked(out)
    if lock is not None:  # otherwise the other process is removing it
        with lock:
            shutil.rmtree(out / FOLDER)


def refuse_other_job(out: Path, there: dict[str, Any], job: JobIdentity) -> None:
    """Raises PrepError, naming every difference, if `there` is not the identity of `job`."""
    asked = job.to_json()
    differences = [
        f"{key} is {there.get(key)!r} there and {asked.get(key)!r} now"
        for key in sorted(set(there) | set(asked))
        if there.get(key) != asked.get(key)
    ]
    if differences:
        raise PrepError(
            f"{out} was started with another configuration: {'; '.join(differences)}. "
            "Use the same configuration to continue, or another --out."
        )


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PrepError(f"{path} cannot be read ({error}). Remove the folder and build again.") from None
    return content if isinstance(content, dict) else {}
