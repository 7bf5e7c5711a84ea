"""Runs in the process of one contender of loader.py: opens a feed and times its batches.

This module has our back ends and the ceilings; loader_peers.py has the peers. "Geometry" means decoding and cropping to
uint8, without flips. The full policy ends in normalised float32. Packages are imported where they are used, so that the
table can say that a contender is not installed.
"""

import ctypes
import functools
import importlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fastcssl.data.policies import policy
from fastcssl.data.views import Policy


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender in one setting."""

    contender: str
    policy: str
    bilinear: bool
    photometry: bool
    num_threads: int
    batch_size: int
    manifest: Path = Path()  # with a few tasks; set when the images are prepared
    jpegs: Path | None = None  # a folder with the same images as files named by id; None if there is only the array

    def views(self) -> Policy:
        chosen = policy(self.policy)
        return tuple(replace(view, interpolation="bilinear") for view in chosen) if self.bilinear else chosen


class Feed:
    """A source of batches. `stream` yields batches endlessly, of one task or of all (None)."""

    ahead: ClassVar[int] = 4  # the most batches that may be ready before one is requested
    modules: ClassVar[tuple[str, ...]] = ()  # imported before any clock starts

    def __init__(self, job: Job) -> None:
        self.job = job

    def stream(self, task: int | None) -> Iterator[Any]:
        raise NotImplementedError

    def close(self) -> None: ...


@functools.cache
def prepared(manifest: Path) -> Any:
    """Returns the prepared data, opened once per process and before a loader is timed."""
    from fastcssl.data.prepared import Prepared

    return Prepared.open(manifest)


def selection_of(data: Any, task: int | None) -> Any:
    from fastcssl.data.prepared import Selection

    tasks = tuple(range(len(data.manifest.tasks))) if task is None else (task,)
    return Selection(tasks=tasks, order="endless")


def table_rows(job: Job, task: int | None) -> tuple[Any, npt.NDArray[np.void]]:
    data = prepared(job.manifest)
    return data, data.table[data.rows(selection_of(data, task))]


def files_of(job: Job, task: int | None) -> list[str]:
    assert job.jpegs is not None
    return [f"{job.jpegs}/{int(row['id']):07d}.jpg" for row in table_rows(job, task)[1]]


# ---- Ours ------------------------------------------------------------------------------------------------------------


class _Ours(Feed):
    """Our loader. The full policy uses the Loader; geometry alone uses the back end directly, with the same plan."""

    modules: ClassVar[tuple[str, ...]] = ("fastcssl.data.loader",)
    loader: ClassVar[str]
    augment: ClassVar[Any] = "fused"

    def __init__(self, job: Job) -> None:
        import torch

        from fastcssl.data.backends import BackendConfig, choose
        from fastcssl.data.loader import Loader, LoaderConfig

        super().__init__(job)
        torch.set_num_threads(job.num_threads)
        self.data = prepared(job.manifest)
        self.views, self.epoch = job.views(), 0
        if job.photometry:
            config = LoaderConfig(
                policy=self.views,
                batch_size=job.batch_size,
                loader=self.loader,
                augment=self.augment,
                num_threads=job.num_threads,
            )
            self.opened: Any = Loader(self.data, config)
        else:
            self.opened = choose(self.data, self.loader)(
                self.data,
                BackendConfig(
                    policy=self.views,
                    local_batch_size=job.batch_size,
                    num_threads=job.num_threads,
                    device=torch.device("cpu"),
                    dtype=torch.float32,
                    augment="torch",  # not called, because uint8 crops are measured
                ),
            )

    def stream(self, task: int | None) -> Iterator[Any]:
        from fastcssl.data.order import EpochPlan
        from fastcssl.distributed.world import World

        selection = selection_of(self.data, task)
        self.epoch += 1
        if self.job.photometry:
            return self.opened.open(selection).epoch(self.epoch)  # type: ignore[no-any-return]
        plan = EpochPlan(
            self.data,
            self.data.rows(selection),
            policy=self.views,
            batch_size=self.job.batch_size,
            world=World(),
            seed=0,
            epoch=self.epoch,
            order="endless",
            last="drop",
        )
        return self.opened.run(plan, 0)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.opened.close()


class Native(_Ours):
    loader = "native"


class Resident(_Ours):
    loader = "resident"


class OurTorchvision(_Ours):
    loader = "torchvision"
    ahead = 0


class OurFfcv(_Ours):
    loader = "ffcv"
    modules = (*_Ours.modules, "ffcv")


class OurDali(_Ours):
    loader = "dali"
    modules = (*_Ours.modules, "nvidia.dali.plugin.pytorch")


class OurDaliInside(OurDali):
    augment = "dali"


# ---- Ceilings --------------------------------------------------------------------------------------------------------


class Decode(Feed):
    """Decodes each whole image once with libjpeg, from the same bytes in memory, and does nothing else."""

    ahead = 0

    def stream(self, task: int | None) -> Iterator[Any]:
        from dataprep import _codec

        jpegs = itertools.cycle([Path(file).read_bytes() for file in files_of(self.job, task)])

        def decode(work: Iterator[bytes]) -> None:
            for jpeg in work:
                _codec.decode(jpeg)

        with ThreadPoolExecutor(self.job.num_threads) as pool:
            while True:
                shared = iter(list(itertools.islice(jpegs, self.job.batch_size)))
                yield list(pool.map(decode, [shared] * self.job.num_threads))


class Copy(Feed):
    """Copies as many bytes as the views have from memory to memory."""

    ahead = 0

    def stream(self, task: int | None) -> Iterator[Any]:
        del task
        views = self.job.views()
        num_bytes = sum(view.size_px**2 * 3 for view in views) * (4 if self.job.photometry else 1)
        source = np.ones((self.job.batch_size, num_bytes), np.uint8)
        target = np.empty_like(source)
        parts = np.array_split(np.arange(len(source)), self.job.num_threads)

        def copy(part: npt.NDArray[np.intp]) -> None:
            np.copyto(target[part[0] : part[-1] + 1], source[part[0] : part[-1] + 1])

        with ThreadPoolExecutor(self.job.num_threads) as pool:
            while True:
                yield list(pool.map(copy, parts))


CONTENDERS: dict[str, type[Feed]] = {
    "native": Native,
    "resident": Resident,
    "our-torchvision": OurTorchvision,
    "our-dali": OurDali,
    "our-dali-inside": OurDaliInside,
    "our-ffcv": OurFfcv,
    "decode": Decode,
    "copy": Copy,
}
PEERS = {"pil": "Pil", "tensors": "Tensors", "dali": "Dali", "ffcv": "Ffcv"}  # in loader_peers.py


def _contender(name: str) -> type[Feed]:
    if name in CONTENDERS:
        return CONTENDERS[name]
    found: type[Feed] = getattr(importlib.import_module("loader_peers"), PEERS[name])
    return found


# ---- By the clock ----------------------------------------------------------------------------------------------------


class Begun(NamedTuple):
    first_batch_seconds: float  # from creating the loader to its first batch, the first time in this process
    batch_seconds: float  # approximately, for a later batch
    imports_mb: float  # before the loader is created
    peak_mb: float


class Waits(NamedTuple):
    """Seconds, one value per repetition."""

    first_batch: list[float]  # from creating the loader to its first batch
    other_task: list[float]  # from requesting another task to its first batch; peers create a new loader
    batch: list[float]  # a later batch of that task


class _Running:
    """The state of this process between two calls."""

    feed: Feed
    batches: Iterator[Any]


def die_with_parent(*_: Any) -> None:
    """Makes the kernel kill this process when its parent dies.

    The parent stops this process while others are measured. If the parent died then, nothing would wake it up.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def settle_in(contender: str, num_threads: int, number: int) -> int:
    """Takes as many cores as threads, before any library counts them, and imports packages. Returns the process id.

    Processes import on different cores, chosen by their number, and are then measured on the same cores.
    """
    die_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[(number + i) % len(cores)] for i in range(num_threads)])
    for name in _contender(contender).modules:
        importlib.import_module(name)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[:num_threads])
    return os.getpid()


def begin(job: Job) -> Begun:
    """Opens the feed and warms it up."""
    prepared(job.manifest)
    imports_mb = _group_peak_mb()
    first_batch_seconds = _open(job, None)
    for _ in range(_Running.feed.ahead):  # uses up the batches that are ready; later ones take their full time
        next(_Running.batches)
    return Begun(first_batch_seconds, advance(2) / 2, imports_mb, _group_peak_mb())


def advance(num_batches: int) -> float:
    """Returns the seconds for the next batches."""
    began = time.perf_counter()
    for _ in range(num_batches):
        next(_Running.batches)
    return time.perf_counter() - began


def measure_waits(job: Job, repetitions: int) -> Waits:
    """Measures the waits for the first batch and for another task."""
    waits = Waits([], [], [])
    for _ in range(repetitions):
        _close()
        waits.first_batch.append(_open(job, 0))
        _end_stream()
        began = time.perf_counter()
        _Running.batches = _Running.feed.stream(1)
        next(_Running.batches)
        waits.other_task.append(time.perf_counter() - began)
        advance(_Running.feed.ahead)
        waits.batch.append(advance(2) / 2)
    _close()
    return waits


def _open(job: Job, task: int | None) -> float:
    began = time.perf_counter()
    _Running.feed = _contender(job.contender)(job)
    _Running.batches = _Running.feed.stream(task)
    next(_Running.batches)
    return time.perf_counter() - began


def _end_stream() -> None:
    batches: Any = _Running.batches
    del _Running.batches
    batches.close()


def _close() -> None:
    _end_stream()
    _Running.feed.close()
    del _Running.feed


def _group_peak_mb() -> float:
    """Returns the peak memory of this process and its workers. Pages that they share are counted in each."""
    total_kb = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) != os.getpgid(0):
                continue
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total_kb * 1024 / 1e6
