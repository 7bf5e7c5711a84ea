"""Describes trainings of a few seconds, as commands, and compares what two of them left in their folders."""

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALL = {
    "--batch-size": "16",
    "--encoder.name": "resnet18-w8",
    "--encoder.stem": "cifar",
    "--views.size-px": "16",
    "--device": "cpu",
    "--num-threads": "1",
    "--precision": "fp32",
    "--log-every": "1",
    "--online-probe": "off",
    "--method.hidden": "16",
    "--method.dim": "8",
}
_TIMINGS = ("tasks", "rates", "stages")  # of a checkpoint: they differ between two equal runs


@dataclass(frozen=True)
class SmallTraining:
    """A command of two steps per epoch, in three tasks, if the data is that of `prepare_data`."""

    data: Path
    recipe: str = "demo"
    method: str = "moco"
    strategy: str = "pnr"
    epochs: int = 2
    checkpoint_minutes: float = 0.0  # after every step

    @property
    def num_steps(self) -> int:
        return 3 * 2 * self.epochs

    def words(self, out: Path) -> list[str]:
        """Returns the words after `fastcssl-train`."""
        flags = _SMALL | {"--epochs": str(self.epochs), "--checkpoint-minutes": str(self.checkpoint_minutes)}
        if self.method == "moco":
            flags["--method.bank.size"] = "32"
        given = {"--data": str(self.data), "--out": str(out), **flags}
        return [self.recipe, self.method, self.strategy, *(word for pair in given.items() for word in pair)]


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Returns the path. `make` is called with a new one, which is then renamed, unless a process did that before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            fresh = path.parent / f"new-{path.name}"
            shutil.rmtree(fresh, ignore_errors=True)
            make(fresh)
            fresh.rename(path)
    return path


def prepare_data(folder: Path) -> Path:
    """Prepares 120 images in three tasks of ten classes, if that was not done before, and returns the folder."""

    def build(fresh: Path) -> None:
        subprocess.run([*prep_command(fresh)], check=True, stdout=subprocess.DEVNULL)

    return made_once(folder, build)


def prep_command(out: Path) -> list[str]:
    """Returns the command that prepares the images."""
    words = ["build", "synthetic:classes=30,train=4,val=2", "--scenario", "class", "--tasks", "3"]
    return [sys.executable, "-m", "dataprep.cli", *words, "--out", str(out)]


def reached_step(out: Path) -> int:
    """Returns the last step of which RUN/metrics.jsonl has a whole line, or 0."""
    steps = [line["step"] for line in metrics(out) if line["kind"] == "step"]
    return steps[-1] if steps else 0


def metrics(out: Path) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of RUN/metrics.jsonl, if it exists."""
    try:
        text = (out / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def losses(out: Path) -> list[tuple[str, int, Any]]:
    """Returns the losses of all steps, epochs and tasks, in the order in which they were written."""
    kinds = ("step", "epoch", "task")
    return [
        (line["kind"], line["step"], line.get("terms", line["loss"])) for line in metrics(out) if line["kind"] in kinds
    ]


def differences(out: Path, reference: Path) -> list[str]:
    """Returns a sentence for everything in which a finished run differs from its reference, bit for bit."""
    found = [f"The file {path.name} was left behind." for path in sorted(out.rglob("*.partial"))]
    ours, theirs = losses(out), losses(reference)
    if ours != theirs:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        where = f"{len(ours)} lines instead of {len(theirs)}" if at is None else f"{ours[at]} instead of {theirs[at]}"
        found.append(f"The losses differ: {where}.")
    for path in sorted((reference / "encoders").iterdir()):
        own = out / "encoders" / path.name
        if not own.exists() or own.read_bytes() != path.read_bytes():
            found.append(f"The encoder {path.name} differs.")
    return found + [f"The last checkpoint differs in {key}." for key in _unequal(_last(out), _last(reference))]


def _last(out: Path) -> Any:
    from fastcssl.runs.checkpoint import latest  # here, as torch takes seconds to import

    found = latest(out / "checkpoints")
    return None if found is None else {key: value for key, value in found.state.items() if key not in _TIMINGS}


def _unequal(ours: Any, theirs: Any, name: str = "") -> Iterator[str]:
    import torch

    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        is_equal = torch.equal(ours, theirs)
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.keys() == theirs.keys():
        for key, value in ours.items():
            yield from _unequal(value, theirs[key], f"{name}.{key}".removeprefix("."))
        return
    elif isinstance(ours, Sequence) and not isinstance(ours, str | bytes) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _unequal(one, other, f"{name}[{number}]")
        return
    else:
        is_equal = ours == theirs
    if not is_equal:
        yield name or "everything"
