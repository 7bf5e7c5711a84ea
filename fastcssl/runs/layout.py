"""The folder of a run: every path in it, its configuration, and how to find runs.

RUN/config.json       the configuration, where each value comes from, and the data
RUN/status.json       the progress of the run
RUN/metrics.jsonl     one line per report
RUN/checkpoints/      step-00001200.pt, and task-0.pt after each task
RUN/encoders/         task0.safetensors after each task, or joint.safetensors
RUN/evaluations/      one JSON file per probe and scope
RUN/tensorboard/      with --tensorboard
RUN/profile/          with --profile
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def folders_of(given: Folders) -> list[Path]:
    """Returns one folder or several as a list."""
    return [Path(given)] if isinstance(given, Path | str) else [Path(folder) for folder in given]


def runs_in(folder: Path) -> list[Path]:
    """Returns the runs directly inside a folder, such as those of several seeds, sorted by name."""
    return sorted(path.parent for path in folder.glob(f"*/{RunFolder(folder).config.name}"))


def set_aside(folder: Path) -> Path | None:
    """Renames a folder, so that a run can start over there, and returns its new path.

    Returns None, and renames nothing, if the folder does not exist or holds nothing but its lock.
    """
    lock = RunFolder(folder).lock
    if not folder.is_dir() or all(path == lock for path in folder.iterdir()):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def start_of(text: str) -> Path:
    """Returns the path of the checkpoint that "RUN@k" names: that of run RUN at the end of its task k."""
    folder, at, task = text.rpartition("@")
    path = RunFolder(Path(folder)).task_end(task)
    if not at or not task.isdecimal() or not path.is_file():
        there = sorted(p.stem.removeprefix("task-") for p in path.parent.glob("task-*.pt")) if at else []
        known = f"that run has finished tasks {', '.join(there)}" if there else "no finished task was found there"
        raise UserError(f"--from {text}: give RUN@k, a run's folder and a task it has finished; {known}.")
    return path
