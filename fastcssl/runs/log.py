"""Logs a run while it trains: metrics as JSON lines and, on request, TensorBoard and Weights & Biases.

RUN/metrics.jsonl holds one object per line, with "kind" first and "step" (optimiser steps done) second. Floats are
written so that reading them gives the same bits. Values that are not finite are written as "nan", "inf" or "-inf",
which float() accepts. Tasks, epochs and batches are counted from 0, as in file names. Shares and accuracies are 0..1.
"""

import importlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

from dataprep.manifest import write_atomically
from fastcssl.errors import UserError
from fastcssl.runs.json_file import all_finite, fits, parsed_object, record_of
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.ownership import UNLOCKED, FileGuard, RunFolderError, reading

_NON_FINITE = ("nan", "inf", "-inf")
_WORDS = ("kind", "name", "what")  # fields that are always text, even if they read "nan"


class RunLogError(UserError):
    """The log of a run cannot be written or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Measurements of one optimiser step."""

    kind: ClassVar[str] = "step"
    step: int
    task: int
    epoch: int  # counted within this task
    batch: int
    lr: float
    loss: float
    terms: Mapping[str, float]
    images_per_s: float
    data_wait_share: float
    device_idle_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """Measurements of one epoch."""

    kind: ClassVar[str] = "epoch"
    step: int
    task: int
    epoch: int
    lr: float
    loss: float  # mean over the epoch, like the terms
    terms: Mapping[str, float]
    images_per_s: float
    data_wait_share: float
    seconds: float
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of the task so far; fastcssl.runs.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Accuracies of the encoder, as probed during training."""

    kind: ClassVar[str] = "probe"
    step: int
    task: int  # the task that was being trained
    accuracy: Mapping[str, float]  # by probe: "knn", "linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """A summary of one finished task."""

    kind: ClassVar[str] = "task"
    step: int
    task: int
    name: str
    num_images: int
    num_epochs: int
    loss: float  # mean over the last epoch
    images_per_s: float
    data_wait_share: float
    seconds: float
    accuracy: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


LogReport = StepReport | EpochReport | ProbeReport | TaskReport
SomeReport = TypeVar("SomeReport", StepReport, EpochReport, ProbeReport, TaskReport)


class RunLog:
    """Appends lines to RUN/metrics.jsonl and flushes each. Only rank 0 has one; other ranks use `RunLog.silent()`.

    `resume_step`: the step of the checkpoint that the run resumes from. Lines that were logged after that step are
    removed first, so that the file reads like one uninterrupted run. None starts a new run with an empty file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        tensorboard: bool = False,
        wandb: bool = False,
        wandb_project: str = "fastcssl",
        config: Mapping[str, Any] | None = None,
        guard: FileGuard = UNLOCKED,
    ) -> None:
        self._path, self._guard = RunFolder(folder).metrics, guard
        self._resume_step = resume_step
        self._repeatable: set[tuple[Any, ...]] = set()
        self._sinks: list[_Tracker] = []
        with guard.writing(RunFolder(folder).tensorboard if tensorboard else folder):
            folder.mkdir(parents=True, exist_ok=True)
            if tensorboard:
                self._sinks.append(_TensorBoard(folder, resume_step))
        if wandb:
            with guard.writing(RunFolder(folder).wandb_id):
                self._sinks.append(_Wandb(folder, wandb_project, config or {}))
        with guard.writing(self._path):
            self._cut(-1 if resume_step is None else resume_step)
            self._file = self._path.open("a", encoding="utf-8")

    @staticmethod
    def silent() -> "RunLog":
        """Returns a log that writes nothing."""
        return _SilentLog()

    def _cut(self, last_step: int) -> None:
        """Rewrites the file without lines of steps after `last_step` and without lines that a crash truncated."""
        if not self._path.exists():
            return
        content, kept = self._path.read_bytes(), bytearray()
        for line in content.split(b"\n"):
            try:
                record = _parsed(line)
            except ValueError:  # cut short by a crash, or damaged
                continue
            if record["step"] > last_step:
                continue
            kept += line + b"\n"
            if record["step"] == last_step and record["kind"] != StepReport.kind:
                self._repeatable.add(_identity(record))
        if bytes(kept) != content:
            write_atomically(self._path, bytes(kept))

    def write(self, report: LogReport) -> None:
        self._write({"kind": report.kind, **{entry.name: getattr(report, entry.name) for entry in fields(report)}})

    def event(self, what: str, *, step: int, **details: Any) -> None:
        """Writes a line about an event, such as event("checkpoint", step=1200, stall_s=0.04)."""
        self._write({"kind": "event", "step": step, "what": what, **details})

    def _write(self, record: dict[str, Any]) -> None:
        record = {key: _plain(value) for key, value in record.items() if value is not None}
        # A checkpoint at the end of an epoch or a task may be older than the lines about that end. After resuming
        # from it, those lines are written a second time, and are dropped here.
        if record["step"] == self._resume_step and _identity(record) in self._repeatable:
            return
        with self._guard.writing(self._path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        scalars = dict(_scalars(record))
        for sink in self._sinks:
            with self._guard.writing(self._path.with_name(sink.name)):
                sink.write(scalars, record["step"])

    def sync(self) -> None:
        """Flushes the file to the disk. Called before a checkpoint, so that a checkpoint is never ahead of the log."""
        with self._guard.writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes all files. Raises the first error only after every file is closed."""
        with ExitStack() as stack:
            for name, close in (
                (self._path.name, self._file.close),
                *((sink.name, sink.close) for sink in self._sinks),
            ):
                stack.enter_context(UNLOCKED.writing(self._path.with_name(name)))
                stack.callback(close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UserError:
            if kind is None:  # otherwise the run ends with the first error
                raise


class _SilentLog(RunLog):
    def __init__(self) -> None:
        pass

    def _write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_reports(folder: Path, kind: type[SomeReport], *, strict: bool = False) -> list[SomeReport]:
    """Returns the reports of one kind, in order. Skips damaged lines: the last one may still be being written.

    strict: raises RunFolderError for a damaged line instead.
    """
    path = RunFolder(folder).metrics
    begin = f'{{"kind": "{kind.kind}",'.encode()
    found: list[SomeReport] = []
    with reading(path):
        content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.startswith(begin):
            continue
        try:
            found.append(_report(kind, _parsed(line)))
        except ValueError as error:
            if strict and not content.endswith(line):
                raise RunFolderError(
                    f"Line {number} of {path} is damaged or of another version ({error}). Delete that line to use the "
                    "rest, or resume the run, which drops it."
                ) from None
    return found


def _report(kind: type[SomeReport], record: dict[str, Any]) -> SomeReport:
    return record_of(kind, {entry.name: record[entry.name] for entry in fields(kind) if entry.name in record})


_KINDS: dict[str, type[LogReport]] = {kind.kind: kind for kind in (StepReport, EpochReport, ProbeReport, TaskReport)}


def _parsed(line: bytes) -> dict[str, Any]:
    """Returns the record in a line. Raises ValueError if the line is damaged."""
    found = parsed_object(line)
    record = {key: value if key in _WORDS else _numbers(value) for key, value in found.items()}
    if not fits(int, record.get("step")) or not all(fits(str, record[word]) for word in _WORDS if word in record):
        raise ValueError("it has no step")
    if record.get("kind") in _KINDS:
        _report(_KINDS[record["kind"]], record)  # type: ignore[type-var]
        if not all_finite([record.get("seconds")]):  # a loss may be infinite, a time never is
            raise ValueError("its seconds are not finite")
    elif record.get("kind") != "event":
        raise ValueError("its kind is unknown")
    return record


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) and value in _NON_FINITE else value


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold. A tensor or NumPy scalar becomes a plain number."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _identity(record: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the fields that distinguish a line from others of its step: all but the measurements."""
    return tuple(sorted((key, value) for key, value in record.items() if isinstance(value, int) or key in _WORDS))


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    prefix = prefix or f"{record['kind']}/"
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif key != "step" and key not in _WORDS and (isinstance(value, int | float) or value in _NON_FINITE):
            yield f"{prefix}{key}", float(value)


class _Tracker(Protocol):
    name: str  # of its folder

    def write(self, scalars: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def _optional(module: str, package: str, option: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RunLogError(f"{option} needs {package}. Run pip install {package}, or omit the option.") from None


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        module = _optional("torch.utils.tensorboard", "tensorboard", "Logging to TensorBoard")
        # Hides what an earlier process logged after its last checkpoint.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(str(RunFolder(folder).tensorboard), purge_step=purge_step)

    def write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Logs to Weights & Biases. WANDB_MODE=offline and wandb's other variables work as usual."""

    name = "wandb"

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        module = _optional("wandb", "wandb", "Logging to Weights & Biases")
        id_path = RunFolder(folder).wandb_id
        if not id_path.exists():
            write_atomically(id_path, secrets.token_hex(4).encode())
        try:
            self._run = module.init(
                project=project,
                name=folder.resolve().name,
                id=id_path.read_text().strip(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=module.Settings(silent=True, console="off"),
            )
        except module.Error as error:
            raise RunLogError(
                f"Weights & Biases did not start ({error}). Run wandb login, or set WANDB_MODE=offline."
            ) from None
        # An axis of our own, because wandb's own step cannot go back to that of a checkpoint.
        self._run.define_metric("*", step_metric="steps_done")

    def write(self, scalars: dict[str, float], step: int) -> None:
        self._run.log({**scalars, "steps_done": step})

    def close(self) -> None:
        self._run.finish()
