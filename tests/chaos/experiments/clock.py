"""Lets the clock of the machine jump by hours under prep, training, evaluation and the status."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.experiment import Fault, Outcome
from chaos.small_training import (
    SmallTraining,
    differences,
    made_once,
    metrics,
    prep_command,
    prepare_data,
    reached_step,
)

_LIBRARIES = (Path("/usr/lib"), Path("/usr/local/lib"))
_DEADLINE_S = 240.0
_JUMPS = ("+5h", "-5h", "+400d", "-400d", "+1h", "-1h", "+20y", "-20y")
_ROUNDS = 5
_TRAIN, _EVAL = "fastcssl.cli.train", "fastcssl.cli.eval"


@dataclass(frozen=True)
class ClockFault(Fault):
    """Says by how much the clock is wrong at the start, and to what it jumps after which step or time."""

    action: str = "train"
    first: str = "+0"
    then: str = "+5h"
    step: int = 3
    delay_s: float = 0.0
    epochs: int = 2


_KINDS = {
    "train": "the clock jumps during training",
    "resume": "the clock jumps between a run and its resume",
    "prep": "the clock jumps during prep",
    "eval": "the clock jumps during an evaluation",
    "status": "the clock is wrong when the status is read",
}


class ClockExperiment:
    """Compares with the same commands under the right time. libfaketime tells the processes another one."""

    name = "clock"

    def missing(self) -> str | None:
        if _library() is None:
            return "The clock cannot jump: libfaketime is not installed (run .ci/packages python3 chaos)."
        return None

    def faults(self, seed: int) -> Iterator[ClockFault]:
        yield ClockFault(_KINDS["train"], "quick: back by 5 hours after step 2", True, then="-5h", step=2, epochs=1)
        draw = random.Random(f"clock {seed}")
        for number in range(_ROUNDS):
            for action in _KINDS:
                for then in _JUMPS:
                    first, step = draw.choice(("+0", *_JUMPS)), draw.randrange(1, 11)
                    delay_s = round(draw.uniform(0.0, 0.4), 3)
                    name = f"{action} {number}: {first}, then {then} after step {step} or {delay_s} s"
                    yield ClockFault(
                        _KINDS[action], name, action=action, first=first, then=then, step=step, delay_s=delay_s
                    )

    def prepare(self, folder: Path) -> None:
        prepare_data(folder / "data")

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        assert isinstance(fault, ClockFault)
        (scratch / "logs").mkdir()
        broken, seen = _ACTIONS[fault.action](fault, folder, scratch)
        if "Traceback" in seen:
            broken.append(f"A traceback was printed: {seen.strip().splitlines()[-1]}")
        lines = seen.strip().splitlines()
        return Outcome(tuple(broken), lines[-1].strip() if lines else "")


def _library() -> Path | None:
    return next((path for root in _LIBRARIES for path in root.glob("**/faketime/libfaketimeMT.so.1")), None)


class _Process:
    """Runs a command under a clock that can be set while it runs. Only the time of day jumps, as it does in reality."""

    def __init__(self, command: Sequence[str], scratch: Path, offset: str) -> None:
        self._clock, self._log = scratch / "clock", scratch / "logs" / "printed.txt"
        self.set_clock(offset)
        clock = {"LD_PRELOAD": str(_library()), "FAKETIME_TIMESTAMP_FILE": str(self._clock)}
        clock |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._began = log.tell()
            self._process = subprocess.Popen(
                command, env={**os.environ, **clock}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def set_clock(self, offset: str) -> None:
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(f"{offset}\n")
        fresh.rename(self._clock)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def await_step(self, out: Path, step: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while self._process.poll() is None and reached_step(out) < step and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self, expected: Sequence[int] = (0,)) -> tuple[list[str], str]:
        """Waits, and returns what is wrong with how it ended, and what it printed."""
        try:
            status = self._process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return ["The command did not end."], self._printed()
        wanted = " or ".join(map(str, expected))
        broken = [] if status in expected else [f"The command ended with {status} instead of {wanted}."]
        return broken, self._printed()

    def _printed(self) -> str:
        return self._log.read_bytes()[self._began :].decode(errors="replace")


# ---- Commands under a clock that jumps -------------------------------------------------------------------------------


def _train(fault: ClockFault, folder: Path, scratch: Path) -> tuple[list[str], str]:
    training = SmallTraining(folder / "data", epochs=fault.epochs, checkpoint_minutes=10)
    out = scratch / "run"
    process = _Process(_trains(training, out), scratch, fault.first)
    process.await_step(out, fault.step)
    process.set_clock(fault.then)
    broken, seen = process.end()
    broken += differences(out, _reference(folder, training)) if not broken else []
    return broken + _bad_times(out) + _bad_status(out, scratch, fault.then), seen


def _resume(fault: ClockFault, folder: Path, scratch: Path) -> tuple[list[str], str]:
    training = SmallTraining(folder / "data", epochs=fault.epochs)
    out = scratch / "run"
    process = _Process(_trains(training, out), scratch, fault.first)
    process.await_step(out, fault.step)
    process.signal(signal.SIGTERM)
    broken, _ = process.end((128 + signal.SIGTERM, 0))
    again, seen = _Process(_trains(training, out), scratch, fault.then).end()
    broken += again
    broken += differences(out, _reference(folder, training)) if not broken else []
    return broken + _bad_status(out, scratch, "+0"), seen


def _prep(fault: ClockFault, folder: Path, scratch: Path) -> tuple[list[str], str]:
    process = _Process(prep_command(scratch / "data"), scratch, fault.first)
    time.sleep(fault.delay_s)
    process.set_clock(fault.then)
    broken, seen = process.end()
    reference = folder / "data"
    if not broken and _files(scratch / "data") != _files(reference):
        broken.append("The prepared folder differs from the one that was built under the right time.")
    return broken, seen


def _eval(fault: ClockFault, folder: Path, scratch: Path) -> tuple[list[str], str]:
    run, out = _reference(folder, SmallTraining(folder / "data")), scratch / "run"

    def command(run: Path) -> list[str]:
        return [sys.executable, "-m", _EVAL, str(run), "--probe", "knn", "--device", "cpu"]

    def evaluate(fresh: Path) -> None:
        shutil.copytree(run, fresh)
        subprocess.run(command(fresh), check=True, stdout=subprocess.DEVNULL)

    reference = made_once(folder / "evaluated", evaluate)
    shutil.copytree(run, out)
    process = _Process(command(out), scratch, fault.first)
    time.sleep(10 * fault.delay_s)
    process.set_clock(fault.then)
    broken, seen = process.end()
    if not broken and _results(out) != _results(reference):
        broken.append("The results differ from those under the right time.")
    return broken, seen


def _status(fault: ClockFault, folder: Path, scratch: Path) -> tuple[list[str], str]:
    """Reads the status of a run under a clock that differs from the one it was trained under."""
    out = _reference(folder, SmallTraining(folder / "data"))
    process = _Process([sys.executable, "-m", _TRAIN, "status", str(out)], scratch, fault.then)
    broken, seen = process.end()
    return broken + _negative(seen), seen


_ACTIONS: dict[str, Callable[[ClockFault, Path, Path], tuple[list[str], str]]] = {
    "train": _train,
    "resume": _resume,
    "prep": _prep,
    "eval": _eval,
    "status": _status,
}


# ---- What must hold --------------------------------------------------------------------------------------------------


def _trains(training: SmallTraining, out: Path) -> list[str]:
    return [sys.executable, "-m", _TRAIN, *training.words(out)]


def _reference(folder: Path, training: SmallTraining) -> Path:
    def train(fresh: Path) -> None:
        subprocess.run(_trains(training, fresh), check=True, stdout=subprocess.DEVNULL)

    return made_once(folder / f"run-{training.epochs}-{training.checkpoint_minutes:g}", train)


def _bad_times(out: Path) -> list[str]:
    """Returns negative or absurd durations in the metrics, and checkpoints that only a wrong clock asks for."""
    lines = list(metrics(out))
    timed = [(line["step"], line[key]) for line in lines for key in ("seconds", "stall_s") if key in line]
    broken = [f"A duration of step {step} is {value:.1f} s." for step, value in timed if not 0 <= value < _DEADLINE_S]
    saved = [line["step"] for line in lines if line["kind"] == "event" and line["what"] == "checkpoint"]
    ended = [line["step"] for line in lines if line["kind"] == "task"]
    if saved != ended:
        broken.append(f"There are checkpoints of the steps {saved}, but the tasks ended at {ended}.")
    return broken


def _bad_status(out: Path, scratch: Path, offset: str) -> list[str]:
    broken, seen = _Process([sys.executable, "-m", _TRAIN, "status", str(out)], scratch, offset).end()
    if not broken and "finished" not in seen:
        broken.append("The status does not say that the run is finished.")
    return broken + _negative(seen)


def _negative(seen: str) -> list[str]:
    return [f"The status shows {found!r}." for found in re.findall(r"-\d+ (?:s|min|h|d)\b", seen)]


def _files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def _results(root: Path) -> dict[str, str]:
    """Returns the text of all results, without how long they took, the command and the commit of the code."""
    ours = re.compile(r'^ *"(?:seconds|command|commit)": .*$', re.MULTILINE)
    return {path.name: ours.sub("", path.read_text()) for path in sorted((root / "evaluations").glob("*.json"))}


EXPERIMENT = ClockExperiment()
