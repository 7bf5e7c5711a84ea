"""Trains 200 tasks in one process: memory, descriptors, threads and the work per task must not grow."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chaos.experiment import Fault, Outcome
from chaos.small_training import SmallTraining, made_once, metrics

NUM_TASKS = 200
_WARM_UP = 50  # tasks after which memory pools, caches and threads have their size
_MAX_KB_PER_TASK = 20.0  # 3 MB over the tasks after the warm-up: pages that the allocator keeps, not a leak
_MAX_GROWTH = 1.25  # of the processor time per task, from the first to the last tasks after the warm-up
_DEADLINE_S = 3600.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """What /proc said about the process when it had finished a task."""

    task: int
    memory_kb: int  # its own, without the pages of mapped shards, which the kernel can take back
    num_descriptors: int
    num_threads: int
    processor_s: float


@dataclass(frozen=True)
class SoakFault(Fault):
    """Names the strategy that is trained for a long time."""

    strategy: str = "pnr"


class SoakExperiment:
    """Compares the process with itself: late tasks with early ones."""

    name = "soak"

    def missing(self) -> str | None:
        return None if Path("/proc/self/status").exists() else "The soak reads /proc, which this system does not have."

    def faults(self, seed: int) -> Iterator[SoakFault]:
        others = ["ewc", "der", "lump", "cassle", "lessforget"]
        random.Random(f"soak {seed}").shuffle(others)
        for strategy in ("pnr", *others):
            yield SoakFault(f"soak of {NUM_TASKS} tasks", f"moco {strategy}", strategy=strategy)

    def prepare(self, folder: Path) -> None:
        def build(fresh: Path) -> None:
            words = ["build", "synthetic:classes=100,train=32,val=2", "--scenario", "data", "--tasks", str(NUM_TASKS)]
            subprocess.run(
                [sys.executable, "-m", "dataprep.cli", *words, "--out", str(fresh)],
                check=True,
                stdout=subprocess.DEVNULL,
            )

        made_once(folder / "data", build)

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        assert isinstance(fault, SoakFault)
        training = SmallTraining(folder / "data", recipe="own-small", strategy=fault.strategy, epochs=1)
        (scratch / "logs").mkdir()
        log = scratch / "logs" / "printed.txt"
        words = [sys.executable, "-m", "fastcssl.cli.train", *training.words(scratch / "run")]
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            samples = list(_samples(process, scratch / "run"))
            status = process.wait(60)
        finally:
            process.kill()
            process.wait()
        broken = [] if status == 0 else [f"The training ended with {status}."]
        if "Traceback" in log.read_text(errors="replace"):
            broken.append("A traceback was printed.")
        if len(samples) < NUM_TASKS // 2:
            return Outcome((*broken, f"Only {len(samples)} tasks were seen."), "")
        return Outcome((*broken, *grown(samples)), figures(samples))


def _samples(process: "subprocess.Popen[bytes]", out: Path) -> Iterator[Sample]:
    """Yields a sample whenever another task is done, until the process ends."""
    seen, deadline = 0, time.monotonic() + _DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        done = sum(line["kind"] == "task" for line in metrics(out))
        if done > seen:
            seen = done
            try:
                yield _sample(process.pid, done)
            except (OSError, KeyError, IndexError):
                return  # it has just ended
        time.sleep(0.02)


def _sample(pid: int, task: int) -> Sample:
    proc = Path(f"/proc/{pid}")
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in _lines(proc / "status"))}
    times = (proc / "stat").read_text().rpartition(")")[2].split()
    return Sample(
        task=task,
        memory_kb=int(fields["RssAnon"][0]),
        num_descriptors=len(os.listdir(proc / "fd")),
        num_threads=int(fields["Threads"][0]),
        processor_s=(int(times[11]) + int(times[12])) * _TICK_S,
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _slope(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """Returns the growth per task, of the line that fits best."""
    return float(np.polyfit([sample.task for sample in samples], values, 1)[0])


def _warm(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.task > _WARM_UP]


def _seconds_per_task(samples: Sequence[Sample]) -> float:
    return (samples[-1].processor_s - samples[0].processor_s) / (samples[-1].task - samples[0].task)


def _growth(warm: Sequence[Sample]) -> float:
    """Returns by which factor the processor time per task grew from the first third to the last third."""
    third = len(warm) // 3
    return _seconds_per_task(warm[-third:]) / _seconds_per_task(warm[:third])


def grown(samples: Sequence[Sample]) -> list[str]:
    """Returns a sentence for everything that grew from task to task after the warm-up."""
    warm = _warm(samples)
    broken = []
    if (kb := _slope(warm, [sample.memory_kb for sample in warm])) > _MAX_KB_PER_TASK:
        broken.append(f"Memory grows by {kb:.1f} kB per task.")
    for name in ("num_descriptors", "num_threads"):
        counts = [int(vars(sample)[name]) for sample in warm]
        third = len(counts) // 3
        if max(counts[-third:]) > max(counts[:third]):
            what = name.removeprefix("num_")
            broken.append(f"The number of {what} grows from {max(counts[:third])} to {max(counts[-third:])}.")
    if (growth := _growth(warm)) > _MAX_GROWTH:
        broken.append(f"The processor time per task grows by a factor of {growth:.2f}.")
    return broken


def figures(samples: Sequence[Sample]) -> str:
    """Returns the figures of a soak in one line."""
    warm = _warm(samples)
    slope = _slope(warm, [sample.memory_kb for sample in warm])
    descriptors = [sample.num_descriptors for sample in warm]
    threads = [sample.num_threads for sample in warm]
    first_mb, last_mb = warm[0].memory_kb / 1024, warm[-1].memory_kb / 1024
    return (
        f"{samples[-1].task} tasks; after {_WARM_UP}: memory {first_mb:.1f} to {last_mb:.1f} MB "
        f"({slope:+.2f} kB per task), descriptors {min(descriptors)} to {max(descriptors)}, threads {min(threads)} to "
        f"{max(threads)}, processor time {1e3 * _seconds_per_task(warm):.0f} ms per task (x {_growth(warm):.2f})"
    )


ALONE = True
EXPERIMENT = SoakExperiment()
