"""Defines the commands that faults are injected into: tiny, but with every format and every strategy."""

import fcntl
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chaos.commands import CommandServer, Ended, server
from chaos.shim.plan import Plan, counted

STRATEGIES = ("pnr", "cassle", "der", "ewc", "lessforget", "lump", "finetune", "joint")
FORMATS = {"array": "array", "tar": "tar", "ffcv": "tar,ffcv"}
OUT = "out"  # every command writes to this folder of its scratch folder
_PX = 16

_TRAIN_FLAGS = (
    "--encoder.name resnet18-w8 --encoder.stem cifar --views.size-px 16 --batch-size 4 --online-probe off "
    "--log-every 1 --num-threads 1 --device cpu --checkpoint-minutes 0 --precision fp32 --method.hidden 16 "
    "--method.dim 8 --method.bank.size 16 --optim.schedule constant"
).split()
_EVAL_FLAGS = (
    "--probe linear knn --epochs 2 --batch-size 4 --k 2 --checkpoint-minutes 0 --num-threads 1 --device cpu"
).split()


@dataclass(frozen=True)
class Subject:
    """A command, what it reads and what it starts from."""

    name: str
    words: tuple[str, ...]  # {folder} stands for the folder of the references
    reads: str  # below the folder of the references
    starts_from: str | None = None  # the subject whose result is copied before the command is run
    cost: int = 1  # about how many times longer than the others it takes

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-")


def _prep(name: str) -> Subject:
    words = f"fastcssl-prep build folder:{{folder}}/source --scenario class --tasks 2 --workers 1 --out {OUT}"
    return Subject(
        f"prep {name}", (*words.split(), "--formats", FORMATS[name]), "source", cost=6 if name == "ffcv" else 1
    )


def _train(strategy: str) -> Subject:
    words = f"fastcssl-train own-small moco {strategy} --data {{folder}}/data --out {OUT}"
    epochs = "2" if strategy == "joint" else "2,1"  # joint training has a single task
    return Subject(f"train {strategy}", (*words.split(), *_TRAIN_FLAGS, "--epochs", epochs), "data")


PREPARATIONS = tuple(map(_prep, FORMATS))
TRAININGS = tuple(map(_train, STRATEGIES))
STOPPED = Subject("train pnr stopped", (*TRAININGS[0].words, "--stop-after-task", "0"), "data")
EVALUATION = Subject("eval", ("fastcssl-eval", OUT, *_EVAL_FLAGS), "data", starts_from="train pnr")
REPORT = Subject("report", ("fastcssl-report", OUT), "data", starts_from="eval")
SUBJECTS = (*PREPARATIONS, *TRAININGS, EVALUATION, REPORT)
_BY_NAME = {subject.name: subject for subject in SUBJECTS}


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run of a subject."""

    out: Path
    counts: dict[str, int]  # of file operations
    seconds: float
    peak_mb: float
    num_threads: int
    num_files: int


class ReferenceFailed(Exception):
    """A command failed without any fault."""


class Bench:
    """The folder of references: source images, prepared data, and an uninterrupted run of each subject on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    @cached_property
    def server(self) -> CommandServer:
        return server()

    def prepare(self) -> None:
        """Write the source images and the data for training, unless they are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked("images"):
            if not (self.folder / "source").exists():
                write_images(self.folder / "source.part")
                (self.folder / "source.part").rename(self.folder / "source")
        with self._locked("data"):
            if not (self.folder / "data").exists():
                shutil.copytree(self.reference(PREPARATIONS[0]).out, self.folder / "data.part")
                (self.folder / "data.part").rename(self.folder / "data")

    def words(self, subject: Subject) -> list[str]:
        """Return the command of a subject. It is run in a scratch folder."""
        return [word.replace("{folder}", str(self.folder)) for word in subject.words]

    def watched(self, subject: Subject, scratch: Path) -> tuple[Path, ...]:
        """Return the folders in which file operations are counted."""
        return scratch / OUT, self.folder / subject.reads

    def begin(self, subject: Subject, scratch: Path) -> None:
        """Copy what the subject starts from into its scratch folder."""
        scratch.mkdir(parents=True, exist_ok=True)
        if subject.starts_from is not None:
            shutil.copytree(self.reference(_BY_NAME[subject.starts_from]).out, scratch / OUT)

    def reference(self, subject: Subject) -> Reference:
        """Return the uninterrupted run of a subject, which is made on first use."""
        home = self.folder / "references" / subject.file_name
        home.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(subject.file_name):
            if not (home / "counts.json").exists():
                shutil.rmtree(home, ignore_errors=True)
                self._make(subject, home)
            return Reference(home / OUT, **json.loads((home / "counts.json").read_text()))

    def _make(self, subject: Subject, home: Path) -> None:
        self.begin(subject, home)
        plan = home / "plan"
        Plan().write(plan, self.watched(subject, home))
        ended = self.server.run(self.words(subject), home, plan=plan, logs=home / "logs")
        if ended.status != 0:
            raise ReferenceFailed(f"{subject.name} fails without any fault: {ended.last_line}")
        numbers = {
            "counts": counted(plan).counts,
            "seconds": ended.seconds,
            "peak_mb": ended.peak_mb,
            "num_threads": ended.num_threads,
            "num_files": ended.num_files,
        }
        (home / "counts.part").write_text(json.dumps(numbers))
        (home / "counts.part").rename(home / "counts.json")

    def _locked(self, name: str) -> "_Locked":
        return _Locked(self.folder / f".{name}.lock")


class _Locked:
    """Keeps the other workers of a campaign out while a reference is made."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._file = self._path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_images(root: Path) -> None:
    """Write two classes of small JPEGs, eight for training and two for validation each."""
    from conftest import jpeg_of, picture

    shutil.rmtree(root, ignore_errors=True)
    for s, (split, count) in enumerate((("train", 8), ("val", 2))):
        for c in range(2):
            folder = root / split / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.jpg").write_bytes(jpeg_of(picture(100 * s + 10 * c + i, _PX, _PX)))


def run_again(bench: Bench, subject: Subject, scratch: Path) -> Ended:
    """Run the same command again, without any fault."""
    return bench.server.run(bench.words(subject), scratch, logs=scratch / "logs")
