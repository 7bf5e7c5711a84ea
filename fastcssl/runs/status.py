"""The progress of a run, for other processes to read: RUN/status.json, and the summary of `fastcssl-train status`."""

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from dataprep.manifest import write_atomically
from fastcssl.runs.display import bar_grid, bar_row, duration, fact_grid, framed, number, probe_rows, share, wait_style
from fastcssl.runs.json_file import all_finite, read_object, record_of
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.log import ProbeReport, StepReport, read_reports
from fastcssl.runs.ownership import UNLOCKED, FileGuard, RunFolderError, reading

_SILENT_SECONDS = 600
_SPARKS = "▁▂▃▄▅▆▇█"
_MAX_SPARKS = 32
_RESUME = "run the same command to resume"

RunState = Literal["running", "stopped", "finished", "failed"]


def _birth(pid: int) -> str | None:
    """Returns when a process of this machine started, in ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in ("Z", "X") else stat[19]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The content of RUN/status.json."""

    state: RunState
    title: str
    task: int  # counted from 0, like the epoch
    num_tasks: int
    epoch: int
    num_epochs: int
    step: int  # steps done
    num_steps: int
    seconds_left: float | None = None
    message: str = ""
    started: float = field(default_factory=time.time)  # seconds since 1970
    updated: float = field(default_factory=time.time)
    seconds: float | None = None  # since the process began to train, by a clock that never jumps; None: not measured
    pid: int = field(default_factory=os.getpid)
    born: str | None = field(default_factory=lambda: _birth(os.getpid()))  # tells it from a later process with this pid
    host: str = field(default_factory=socket.gethostname)

    @property
    def is_alive(self) -> bool | None:
        """Returns whether the process that wrote this is still running, or None if it ran on another machine."""
        if self.host != socket.gethostname():
            return None
        born = _birth(self.pid)
        return born is not None and born == self.born


def write_status(folder: Path, status: Status, guard: FileGuard = UNLOCKED) -> None:
    """Writes RUN/status.json atomically, with the current time as `updated`."""
    content, path = asdict(replace(status, updated=time.time())), RunFolder(folder).status
    with guard.writing(path):
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def read_status(folder: Path) -> Status:
    """Returns the content of RUN/status.json. Raises RunFolderError if the folder is not a run's."""
    path = RunFolder(folder).status
    with reading(path):
        is_there, is_folder = path.exists(), folder.is_dir()
    if not is_there:
        seen = "has no status.json" if is_folder else "does not exist"
        raise RunFolderError(f"{folder} is not a run: it {seen}. Give the folder that fastcssl-train wrote.")
    remedy = "Resuming the run writes it again."
    try:
        status = record_of(Status, read_object(path, remedy))
        if not all_finite([status.started, status.updated, status.seconds_left, status.seconds]):
            raise ValueError("a time is not finite")
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read ({error}). {remedy}") from None
    return status


def summary(folder: Path, *, now: float | None = None) -> RenderableType:
    """Returns the panel that `fastcssl-train status RUN` prints."""
    status = read_status(folder)
    age = max((time.time() if now is None else now) - status.updated, 0)
    style, words = _state(status, age)
    state = Text.assemble(("● ", style), (words, f"bold {style}"))
    parts: list[RenderableType] = [Text(status.title, "bold"), Text(str(folder), "dim", overflow="fold"), "", state]
    if status.message:
        parts.append(Text(status.message))
    bars = bar_grid()
    left = status.seconds_left
    if left is not None and status.state == "running" and status.is_alive is not False:
        left = max(left - age, 0)
    bar_row(bars, "run", status.step, status.num_steps, None if status.state == "finished" else left)
    parts += ["", bars, "", fact_grid(_facts(folder, status))]
    probes = read_reports(folder, ProbeReport)
    if probes:
        parts += ["", probe_rows(probes)]
    return framed(parts)


def _state(status: Status, age: float) -> tuple[str, str]:
    if status.state == "finished":
        # The clock of the machine may have been set back in between.
        seconds = max(status.updated - status.started, 0) if status.seconds is None else status.seconds
        return "green", f"finished after {duration(seconds)}"
    if status.state == "failed":
        return "red", f"failed {duration(age)} ago"
    if status.state == "stopped":
        return "yellow", f"stopped {duration(age)} ago" + ("" if status.message else f"; {_RESUME}")
    if status.is_alive is False:
        return "red", f"was killed; {_RESUME}"
    if age > _SILENT_SECONDS:
        return "yellow", f"running on {status.host}, but no sign of life for {duration(age)}"
    return "green", f"running on {status.host}, process {status.pid}, seen {duration(age)} ago"


def _facts(folder: Path, status: Status) -> list[tuple[str, str, str]]:
    facts = [
        ("task", f"{min(status.task + 1, status.num_tasks)}/{status.num_tasks}", ""),
        ("epoch", f"{min(status.epoch + 1, status.num_epochs)}/{status.num_epochs}", ""),
        ("step", f"{status.step:,}/{status.num_steps:,}", ""),
    ]
    steps = read_reports(folder, StepReport)
    if steps:
        last = steps[-1]
        losses = [report.loss for report in steps if report.task == last.task]
        facts += [
            ("loss", f"{number(last.loss)}  {sparkline(losses)}", "" if math.isfinite(last.loss) else "bold red"),
            ("speed", f"{last.images_per_s:,.0f} images/s", "cyan"),
            ("waited", f"{share(last.data_wait_share)} for data", wait_style(last.data_wait_share)),
        ]
    return facts


def sparkline(values: Sequence[float]) -> str:
    """Returns at most 32 bars, each the mean of some consecutive values. A mean that is not finite shows as a cross."""
    count = min(len(values), _MAX_SPARKS)
    edges = [len(values) * at // count for at in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    heights = [(mean - low) / span if span else 0.0 for mean in means]
    return "".join(_SPARKS[round(7 * height)] if math.isfinite(height) else "×" for height in heights)
