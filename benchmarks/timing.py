"""Code that all benchmarks share: interleaved rounds, child processes with a time limit, peak memory, JSON lines.

Contenders take turns in every round, so that a machine that slows down slows all of them. A ratio is the median of the
ratios of single rounds, whose two sides ran within seconds of each other.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import statistics
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastcssl.runs.git import git

_HERE = Path(__file__).parent
_CHANGES = ("status", "--porcelain", "--untracked-files=no", ":/", ":(top,exclude)benchmarks/results")


class Failed(Exception):
    """A contender could not be measured. The text says why."""


@dataclass(kw_only=True)
class Case:
    """One contender in one setting. `run` does one round and returns the seconds that count."""

    name: str
    workers: int
    num_items: int  # per round
    num_bytes: int  # read per round
    run: Callable[[], float]
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def rate(self, *, megabytes: bool = False, best: bool = False) -> float | None:
        """Returns the items or megabytes read per second, in the median round or the best."""
        if not self.seconds:
            return None
        amount = self.num_bytes / 1e6 if megabytes else self.num_items
        return amount / (min(self.seconds) if best else statistics.median(self.seconds))

    def record(self, item: str) -> dict[str, Any]:
        """Returns the line of this case in a results file. `item` is the singular word for an item."""
        rates = {
            f"{unit}_per_s_{which}": self.rate(megabytes=unit == "mb", best=which == "best")
            for unit in (f"{item}s", "mb")
            for which in ("best", "median")
        }
        counts = {f"num_{item}s": self.num_items, f"bytes_per_{item}_read": self.num_bytes / self.num_items}
        rest = {"round_seconds": self.seconds, "failure": self.failure or None}
        return {"name": self.name, "workers": self.workers, **counts, **rates, **rest}


def interleave(cases: Sequence[Case], rounds: int, on_round: Callable[[int, Case], None]) -> None:
    """Runs every case once per round. Each round begins with another case. A case that fails is then left out."""
    for number in range(rounds):
        for step in range(len(cases)):
            case = cases[(step + number) % len(cases)]
            if case.failure:
                continue
            on_round(number, case)
            try:
                case.seconds.append(case.run())
            except Failed as failure:
                case.failure, case.seconds = str(failure), []


def speedup(case: Case, other: Case, *, megabytes: bool = False, best: bool = False) -> float | None:
    """Returns the rate of a case divided by the other's, the median over rounds, or None if either was not measured."""
    if not case.seconds or not other.seconds:
        return None
    amounts = case.num_bytes / other.num_bytes if megabytes else case.num_items / other.num_items
    if best:
        return amounts * min(other.seconds) / min(case.seconds)
    return amounts * statistics.median(b / a for a, b in zip(case.seconds, other.seconds, strict=True))


class Child:
    """A process that runs one function after another.

    It is started once, so that no measurement includes imports and warm-up, and it can be killed with all its
    descendants if it hangs. Functions and arguments are pickled, so they must be importable.
    """

    def __init__(self, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, log))
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any, limit_seconds: float) -> Any:
        """Returns the function's result. Raises Failed if it raises, takes too long, or its process ends."""
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(limit_seconds):
                self.close(patience_seconds=0)
                raise Failed(f"no answer within {limit_seconds:.0f} s. {self._last_words()}")
            failure, result = self._pipe.recv()
        except (EOFError, OSError):
            raise Failed(f"its process ended. {self._last_words()}") from None
        if failure:
            raise Failed(failure)
        return result

    def close(self, patience_seconds: float = 10) -> None:
        """Waits for the process to end and free its semaphores. Kills it and its descendants if that takes too long."""
        self._pipe.close()
        self._process.join(patience_seconds)
        if self._process.is_alive() and self._process.pid:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not created its process group yet
                self._process.kill()
            self._process.join()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1].rpartition("\r")[2][:200] if lines else ""


def _serve(pipe: Any, log: Path) -> None:
    os.setsid()
    # A spawned process would also spawn its children, but contenders should use the platform's default.
    multiprocessing.set_start_method(None, force=True)
    # Progress bars of contenders go to a file, which also keeps the last output of one that dies.
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("", function(*args))
        except Exception as error:
            traceback.print_exc()
            answer = (f"{type(error).__name__}: {error}", None)
        pipe.send(answer)


def peak_rss_mb() -> float:
    """Returns the peak memory of this process since it began. Call it inside a Child.

    It does not use getrusage, whose ru_maxrss on Linux includes the parent's memory from before the child's exec.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise Failed("/proc/self/status has no VmHWM")


def environment(packages: Iterable[str], **more: Any) -> dict[str, Any]:
    """Returns where the numbers come from: commit, versions, processor and the load of the machine."""
    return {
        "commit": git(_HERE, "rev-parse", "HEAD"),
        # Only files that git tracks count, without those that benchmarks write.
        "is_modified": None if (changes := git(_HERE, *_CHANGES)) is None else bool(changes),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")
