"""The folder of a run, as the process that trains in it sees it."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError

ENCODERS = "encoders"
Folders = Path | str | Sequence[Path | str]  # one, or several


def folders_of(given: Folders) -> list[Path]:
    return [Path(given)] if isinstance(given, Path | str) else [Path(folder) for folder in given]


def set_aside(folder: Path) -> Path | None:
    """For a run that starts over in a used place. Renames, and so loses nothing."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


class locked:
    """Two processes in one run's folder would overwrite each other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UserError(
                f"Another process is training in {self._path.parent}. Wait for it, or choose another --out."
            ) from None

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def shared(identity: dict[str, Any]) -> dict[str, Any]:
    """What a run has in common with one of another strategy that starts from it."""
    return {key: value for key, value in identity.items() if key not in ("strategy", "online_probe", "probe_lr")}


def start_of(text: str) -> Path:
    """ "RUN@k" -> the checkpoint at the end of task k."""
    folder, at, task = text.rpartition("@")
    path = Path(folder) / "checkpoints" / f"task-{task}.pt"
    if not at or not task.isdecimal() or not path.is_file():
        there = sorted(p.stem.removeprefix("task-") for p in path.parent.glob("task-*.pt")) if at else []
        known = f"that run has finished tasks {', '.join(there)}" if there else "no finished task was found there"
        raise UserError(f"--from {text}: give RUN@k, a run's folder and a task it has finished; {known}.")
    return path


def adopt_encoders(start: Path, out: Path) -> None:
    """The encoders up to the task of a checkpoint, from its run into the one that starts there: it has learnt them."""
    task = int(start.stem.removeprefix("task-"))
    for index in range(task + 1):
        path = start.parent.parent / ENCODERS / f"task{index}.safetensors"
        if path.is_file():
            (out / ENCODERS).mkdir(parents=True, exist_ok=True)
            write_atomically(out / ENCODERS / path.name, path.read_bytes())
