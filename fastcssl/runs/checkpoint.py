"""Writes checkpoints atomically in the background, and finds the newest intact one to resume from.

A file holds what `torch.save` writes, followed by 64 bytes: a mark, the format version, the step, the length, and a
digest of everything before it. torch can still open such a file. `load` checks the digest first, and never unpickles
code.
"""

import hashlib
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from dataprep.manifest import sync_folder
from fastcssl.errors import UserError
from fastcssl.runs.ownership import UNLOCKED, FileGuard, FolderLost, reading, reason_of, remedy_for

SavedState = dict[str, Any]  # dicts, lists and tuples of tensors, numbers, strings, booleans and None

_FORMAT_VERSION = 1
_MARK = b"fastcssl"
_HEAD = struct.Struct("<8sIQQ")  # the mark, the version, the step, and the number of bytes before it
_DIGEST_BYTES = 36
_FOOTER_BYTES = _HEAD.size + _DIGEST_BYTES  # 64
_CHUNK_BYTES = 1 << 20
_PLAIN = (int, float, str, bool, type(None))  # exactly these: NumPy's float64 is a float, but pickled as code

_ROLLING = re.compile(r"step-(\d+)\.pt")
_TASK_END = re.compile(r"task-(\d+)\.pt")
_PARTIAL = re.compile(r".+\.(\d+)\.partial")


class CheckpointError(UserError):
    """A checkpoint could not be written, or cannot be resumed from."""

    everywhere = True


class TornError(CheckpointError):
    """A checkpoint is damaged: truncated, altered or unreadable. An older one may still be usable."""


def snapshot(state: SavedState) -> SavedState:
    """Returns a copy in host memory. Training may change the original tensors as soon as this returns."""
    devices: set[torch.device] = set()
    copied = cast(SavedState, _copied(state, "", devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copied


def _copied(value: Any, path: str, devices: set[torch.device]) -> Any:
    def inner(key: object, item: Any) -> Any:
        return _copied(item, f"{path}.{key}" if path else str(key), devices)

    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{path or 'the state'} has the key {key!r}; keys must be strings or integers.")
        return {key: inner(key, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(inner(index, item) for index, item in enumerate(value))
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        return _host_copy(value.detach(), devices)
    kind = type(value).__qualname__ if not isinstance(value, Tensor) else f"{type(value).__qualname__} ({value.layout})"
    raise TypeError(f"{path or 'the state'} is a {kind}; a checkpoint takes plain tensors, numbers, strings and None.")


def _host_copy(tensor: Tensor, devices: set[torch.device]) -> Tensor:
    """Returns a copy with the same strides. Without the copy, saving a view would save its entire storage."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    devices.add(tensor.device)  # the caller waits once for all copies of a device
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(_num_bytes(item) for item in items)


class Checkpoints:
    """The checkpoints of one run, written one at a time by a thread while training continues.

    If a periodic write fails, `check` returns the error, so a full disk does not end the run: the earlier checkpoints
    stay. A write that the caller waits for (`task_end`, `failed`, `save(wait=True)`) raises its error.

    guard: checked before each file is written, and again before it gets its name.
    """

    def __init__(self, folder: Path | str, keep: int = 2, guard: FileGuard = UNLOCKED) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint.")
        self.folder, self._keep, self._guard = Path(folder), keep, guard
        with guard.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self._last_is_whole = True

    def save(self, step: int, state: SavedState, *, wait: bool = False) -> float:
        """Writes a rolling checkpoint and returns the seconds for which training stopped."""
        return self._save(self.folder / f"step-{step:08d}.pt", step, state, wait=wait)

    def task_end(self, task: int, step: int, state: SavedState) -> float:
        """Writes the checkpoint of a task's end, which is never deleted, and returns the seconds it took."""
        return self._save(self.folder / f"task-{task}.pt", step, state, wait=True)

    def failed(self, step: int, state: SavedState) -> Path:
        """Writes a state for inspection, such as after a loss that is not finite. `latest` never returns it."""
        path = self.folder / f"failed-step-{step:08d}.pt"
        self._save(path, step, state, wait=True)
        return path

    def check(self) -> UserError | None:
        """Returns the error of a write that has ended, or None. Each error is returned once.

        Raises FolderLost if the folder is no longer this process's.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        error, self._error = self._error, None
        if isinstance(error, FolderLost):
            raise error
        return error

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(self, path: Path, step: int, state: SavedState, *, wait: bool) -> float:
        began = time.perf_counter()
        self.wait()
        self._guard.check()
        # Not a daemon thread: a process that exits in the middle of a write still finishes it.
        self._thread = threading.Thread(target=self._write, args=(path, step, snapshot(state)), name="checkpoint")
        self._thread.start()
        if wait:
            self.wait()
            if not self._last_is_whole and (error := self.check()) is not None:
                raise error
        return time.perf_counter() - began

    def _write(self, path: Path, step: int, state: SavedState) -> None:
        self._last_is_whole = False
        try:
            self._guard.check()
            self._delete_stale()
            _write_file(path, step, state, self._guard.check)
            self._last_is_whole = True
            self._delete_oldest(step)
        except FolderLost as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(self._explained(error, path, state))

    def _delete_stale(self) -> None:
        """Deletes the partial files of processes that were killed while writing.

        A file with our own process number was left by an earlier process of that number.
        """
        for path in self.folder.iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
                path.unlink(missing_ok=True)

    def _delete_oldest(self, step: int) -> None:
        """Deletes all but the last rolling checkpoints up to `step`.

        Files of later steps are not part of this run's past, so they neither count nor are they deleted.
        """
        steps = {path: int(match[1]) for path in self.folder.iterdir() if (match := _ROLLING.fullmatch(path.name))}
        past = sorted((path for path in steps if steps[path] <= step), key=steps.__getitem__)
        for path in past[: -self._keep]:
            path.unlink(missing_ok=True)

    def _explained(self, error: Exception, path: Path, state: SavedState) -> str:
        reason = reason_of(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        if self._last_is_whole:
            return f"{path} was written, but an older file could not be deleted: {reason}. Look into {self.folder}."
        try:
            free = f"{shutil.disk_usage(self.folder).free / 1e6:,.1f} MB are free"
            found = _footers(self.folder, [])
        except OSError:
            free, found = "the free space is unknown", []
        remedy = remedy_for(error) if isinstance(error, OSError) else "Use another --out"
        left = f"{found[0].path.name} is still intact" if found else "there is no earlier checkpoint"
        return (
            f"The checkpoint {path.name} could not be written to {self.folder}: {reason}. "
            f"It needs {_num_bytes(state) / 1e6:,.1f} MB, {free}; {left}. {remedy}."
        )


class _DigestingFile:
    """A file that torch writes to, which computes a digest of everything written.

    torch would report an exception from here as a wrong position in its archive. So this class keeps the first error,
    drops the bytes that follow, and raises the error in `finish`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._num_bytes = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        self._digest.update(data)
        self._num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Does nothing. torch calls this; `finish` flushes."""

    def finish(self, step: int) -> None:
        """Writes the footer and flushes the file to the disk. Raises the first error of a write, if there was one."""
        self.write(_HEAD.pack(_MARK, _FORMAT_VERSION, step, self._num_bytes))
        self.write(self._digest.digest())
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())


def _write_file(path: Path, step: int, state: SavedState, check: Callable[[], None]) -> None:
    """Writes a checkpoint under a temporary name and then renames it, so that `path` never names a partial file.

    check: called before the file is renamed.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    file = partial.open("wb")
    try:
        sink = _DigestingFile(file)
        torch.save(state, cast(IO[bytes], sink))
        sink.finish(step)
        file.close()
        check()
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException:
        # Whatever fails here is not the cause.
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that can be resumed from."""

    path: Path
    step: int
    state: SavedState
    warnings: tuple[str, ...]  # one sentence for each newer file that is damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    path: Path
    task: int  # -1 for a rolling checkpoint
    version: int
    step: int


def latest(folder: Path | str) -> Found | None:
    """Returns the intact checkpoint of the latest step, or None if there are no checkpoints.

    Raises CheckpointError if there are checkpoints, but all of them are damaged.
    """
    warnings: list[str] = []
    for footer in _footers(Path(folder), warnings):
        try:
            state = load(footer.path)
        except TornError as error:
            warnings.append(str(error))
            continue
        return Found(path=footer.path, step=footer.step, state=state, warnings=tuple(warnings))
    if warnings:
        raise CheckpointError(
            f"All checkpoints in {folder} are damaged. {' '.join(warnings)} Start over with --resume never."
        )
    return None


def _footers(folder: Path, warnings: list[str]) -> list[_Footer]:
    """Returns the footers of the files that can be resumed from, latest first.

    At the same step, the checkpoint of a task's end counts as later than a rolling one.
    """
    found = []
    with reading(folder):
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if _ROLLING.fullmatch(path.name) or _TASK_END.fullmatch(path.name):
            try:
                found.append(_footer(path))
            except TornError as error:
                warnings.append(str(error))
    return sorted(found, key=lambda footer: (footer.step, footer.task), reverse=True)


def _footer(path: Path, *, verify: bool = False) -> _Footer:
    """Returns the footer of a file. With `verify`, reads the entire file and compares its digest."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, num_bytes - _FOOTER_BYTES))
            footer = file.read()
            file.seek(0)
            left = num_bytes - _DIGEST_BYTES if verify else 0
            while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise TornError(f"{path} cannot be read ({reason_of(error)}).") from error
    if len(footer) < _FOOTER_BYTES or not footer.startswith(_MARK):
        raise TornError(f"{path} is damaged: its {num_bytes:,} bytes end without the closing mark.")
    _, version, step, length = _HEAD.unpack_from(footer)
    if length + _FOOTER_BYTES != num_bytes:
        raise TornError(f"{path} is damaged: it has {num_bytes:,} bytes, not {length + _FOOTER_BYTES:,}.")
    if verify and digest.digest() != footer[_HEAD.size :]:
        raise TornError(f"{path} is damaged: its content does not match its checksum.")
    task = _TASK_END.fullmatch(path.name)
    return _Footer(path=path, task=int(task[1]) if task else -1, version=version, step=step)


def load(path: Path | str) -> SavedState:
    """Returns the state in a checkpoint file, after checking its digest."""
    # Read, not memory-mapped: an optimiser keeps the tensors it is given, and the file may be deleted before them.
    path = Path(path)
    footer = _footer(path, verify=True)
    if footer.version != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {footer.version}, this fastcssl reads {_FORMAT_VERSION}. "
            "Resume with the fastcssl that wrote it."
        )
    try:
        return cast(SavedState, torch.load(path, map_location="cpu", weights_only=True))
    except OSError as error:
        raise TornError(f"{path} cannot be read ({reason_of(error)}).") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} holds something other than tensors, numbers and text, which fastcssl never unpickles "
            f"({type(error).__name__}). Use a checkpoint that fastcssl wrote."
        ) from error
