"""Who may write into a run's folder, and what is said if the operating system refuses.

One process holds the folder's lock. Every file of a run is written inside `writing`, which first checks that the lock
held is still the one in the folder, and turns an error of the operating system into one sentence.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError
from fastcssl.runs.layout import RunFolder, set_aside

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class RunFolderError(UserError):
    """A folder is not that of a run, or a file in it cannot be written or read."""

    everywhere = True


class FolderLost(RunFolderError):
    """The folder was moved, deleted or replaced while this process trained in it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an error of the operating system inside a `with` block into a sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"Cannot read {path} ({reason_of(error)}). Check its permissions and the disk, then run the same command "
            "again."
        ) from None


def reason_of(error: OSError) -> str:
    """Returns the operating system's words for an error."""
    return error.strerror or str(error) or type(error).__name__


def remedy_for(error: OSError) -> str:
    """Returns what the user can do about an error of the operating system while writing."""
    if error.errno in _NO_SPACE:
        return "Free some space or use another --out"
    if error.errno in _NO_PERMISSION:
        return "Make it writable or use another --out"
    return "Check the disk or use another --out"


class FileGuard:
    """Guards files that need no lock, such as results of an evaluation."""

    def check(self) -> None:
        """Raises FolderLost if this process may no longer write."""

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Checks the lock, then turns an error of the operating system inside a `with` block into a sentence."""
        self.check()
        try:
            yield
        except OSError as error:
            raise RunFolderError(
                f"Cannot write {path} ({reason_of(error)}). {remedy_for(error)}, then run the same command again. "
                "Files that were already saved are intact."
            ) from None


UNLOCKED = FileGuard()


class FolderLock(FileGuard):
    """The lock of a run's folder, held until `close`. A second process is refused: the two would overwrite files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, RunFolder(folder).lock
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = self._is_held()  # another process may have renamed the folder after it was opened
        except BlockingIOError:
            is_held = False
        except OSError:
            os.close(self._descriptor)
            raise
        if not is_held:
            os.close(self._descriptor)
            raise UserError(f"Another process is training in {folder}. Wait for it, or choose another --out.")

    def _is_held(self) -> bool:
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        held = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def check(self) -> None:
        with reading(self._path):
            is_held = self._is_held()
        if not is_held:
            raise FolderLost(
                f"{self._folder} was moved, deleted or replaced while this run trained in it, so nothing more is "
                "written. Move it back and run the same command to resume."
            )

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own(folder: Path, *, start_over: bool = False) -> FolderLock:
    """Creates a run's folder if necessary, locks it and returns the lock.

    start_over: an older run in the folder is renamed first. Its own lock is held meanwhile, so that the folder of a
    run that is training is never renamed.
    """
    try:
        if start_over and folder.is_dir():
            with FolderLock(folder):
                set_aside(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder)
    except OSError as error:
        raise UserError(f"Cannot write into {folder} ({reason_of(error)}). Choose another --out.") from None


def write_config(folder: RunFolder, described: dict[str, Any], guard: FileGuard) -> None:
    """Writes RUN/config.json atomically."""
    with guard.writing(folder.config):
        write_atomically(folder.config, json.dumps(described, indent=1).encode())


def adopt_encoders(start: Path, new: RunFolder, guard: FileGuard) -> None:
    """Copies the encoders up to a checkpoint's task from its run into the run that starts from it."""
    old = RunFolder(start.parent.parent)
    for index in range(int(start.stem.removeprefix("task-")) + 1):
        path = old.encoder([index])
        with reading(path):
            content = path.read_bytes() if path.is_file() else None
        if content is not None:
            with guard.writing(new.encoder([index])):
                new.encoders.mkdir(parents=True, exist_ok=True)
                write_atomically(new.encoder([index]), content)
