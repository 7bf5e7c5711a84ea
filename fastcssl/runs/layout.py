"""The folder of a run: every path in it, its lock, its configuration, and how to find runs.

RUN/config.json       the configuration, where each value comes from, and the data
RUN/status.json       the progress of the run
RUN/metrics.jsonl     one line per report
RUN/checkpoints/      step-00001200.pt, and task-0.pt after each task
RUN/encoders/         task0.safetensors after each task, or joint.safetensors
RUN/evaluations/      one JSON file per probe and scope
RUN/tensorboard/      with --tensorboard
RUN/profile/          with --profile
"""

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError

Folders = Path | str | Sequence[Path | str]  # one, or several


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths in a run's folder. Creating one of these objects does not touch any file."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def encoders(self) -> Path:
        return self.root / "encoders"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def profile(self) -> Path:
        return self.root / "profile"

    @property
    def wandb_id(self) -> Path:
        return self.root / "wandb-id"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def task_end(self, task: int | str) -> Path:
        """Returns the path of the checkpoint at the end of a task."""
        return self.checkpoints / f"task-{task}.pt"

    def encoder(self, tasks: Sequence[int]) -> Path:
        """Returns the path of the encoder that was trained last on these tasks of the manifest."""
        name = f"task{tasks[0]}" if len(tasks) == 1 else "joint"
        return self.encoders / f"{name}.safetensors"

    def is_run(self) -> bool:
        return self.config.is_file()

    def write_config(self, described: dict[str, Any]) -> None:
        write_atomically(self.config, json.dumps(described, indent=1).encode())


def folders_of(given: Folders) -> list[Path]:
    """Returns one folder or several as a list."""
    return [Path(given)] if isinstance(given, Path | str) else [Path(folder) for folder in given]


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs directly inside a folder, such as those of several seeds, sorted by name."""
    return sorted(path.parent for path in folder.glob(f"*/{RunFolder(folder).config.name}"))


def set_aside(folder: Path) -> Path | None:
    """Renames a folder, so that a run can start over there, and returns its new path.

    Returns None, and renames nothing, if the folder is empty or does not exist.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


class locked:
    """Keeps a second process out of a run's folder, because the two would overwrite each other's files."""

    def __init__(self, folder: Path) -> None:
        self._path = RunFolder(folder).lock

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


def start_of(text: str) -> Path:
    """Returns the path of the checkpoint that "RUN@k" names: that of run RUN at the end of its task k."""
    folder, at, task = text.rpartition("@")
    path = RunFolder(Path(folder)).task_end(task)
    if not at or not task.isdecimal() or not path.is_file():
        there = sorted(p.stem.removeprefix("task-") for p in path.parent.glob("task-*.pt")) if at else []
        known = f"that run has finished tasks {', '.join(there)}" if there else "no finished task was found there"
        raise UserError(f"--from {text}: give RUN@k, a run's folder and a task it has finished; {known}.")
    return path


def adopt_encoders(start: Path, out: Path) -> None:
    """Copies the encoders up to a checkpoint's task from its run into the run that starts from it."""
    old, new = RunFolder(start.parent.parent), RunFolder(out)
    for index in range(int(start.stem.removeprefix("task-")) + 1):
        path = old.encoder([index])
        if path.is_file():
            new.encoders.mkdir(parents=True, exist_ok=True)
            write_atomically(new.encoder([index]), path.read_bytes())
