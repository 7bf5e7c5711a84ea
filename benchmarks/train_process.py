"""Runs in the process of one contender of train.py: the settings of both sides, our training, and the measurement.

lightly's training is in train_lightly.py. Packages are imported where they are used, because the parent needs none of
them.

Memory is the largest resident size of the process (VmHWM) plus the private pages of DataLoader workers (the size of the
process includes the shared pages). On a GPU, it is the most that torch had allocated there.
"""

import importlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from loader_process import die_with_parent
from timing import peak_rss_mb

Side = Literal["ours", "lightly"]
Mode = Literal["step", "held", "networks", "loader"]  # held: always the same batch


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender in one work load."""

    side: Side
    mode: Mode
    strategy: str
    task: int  # the task whose images are used
    policy: str
    size_px: int
    stem: str
    encoder: str
    bank_size: int
    batch_size: int
    num_threads: int  # for torch, and as many for the loader (or worker processes of a DataLoader)
    num_warm_up: int  # steps
    device: str
    seed: int
    packages: tuple[str, ...] = ()  # additional folders to search for lightly
    manifest: Path = Path()  # this field and the next are set when images are prepared
    jpegs: Path | None = None  # a folder with the task's images as single files; None if there is only the array


def config_of(job: Job) -> Any:
    """Returns the configuration of both sides: the recipe's values with other sizes."""
    from fastcssl.config.config import ExpectConfig, RunConfig, ViewsConfig
    from fastcssl.config.recipes import recipe
    from fastcssl.learn.encoders import EncoderConfig

    found: Any = recipe(f"{'cifar' if job.stem == 'cifar' else 'imagenet'}100-class5", "moco", job.strategy).config
    bank = replace(found.method.bank, size=job.bank_size, initial="random")  # full from the first step, like lightly's
    optim = found.optim
    if job.strategy == "finetune":  # compared with lightly, whose example uses SGD; the learning rate is MoCo v2's
        optim = replace(optim, name="sgd", lr=0.03, schedule="cosine", exclude_bias_and_norm=False)
    return replace(
        found,
        seed=job.seed,
        batch_size=job.batch_size,
        encoder=EncoderConfig(name=job.encoder, stem=job.stem),  # type: ignore[arg-type]
        views=ViewsConfig(policy=job.policy, size_px=job.size_px),
        expect=ExpectConfig(),
        method=replace(found.method, bank=bank),
        optim=optim,
        precision="fp32" if job.device == "cpu" else "auto",
        run=RunConfig(num_threads=job.num_threads),
    )


class Contender:
    """The training of one side, in separate parts."""

    # Imported before anything is timed and before memory is first measured.
    modules: ClassVar[tuple[str, ...]] = (
        "fastcssl.train.build",
        "fastcssl.config.recipes",
        "fastcssl.runs.timing",
        "torchvision.models",
    )

    def __init__(self, job: Job) -> None:
        import torch

        from fastcssl.learn.precision import amp_dtype

        self.job, self.config, self.device = job, config_of(job), torch.device(job.device)
        self.amp_dtype = amp_dtype(self.config.precision, self.device)
        self.scaler = torch.amp.GradScaler(job.device, enabled=self.amp_dtype is torch.float16)

    def batches(self) -> Iterator[Any]:
        """Yields batches endlessly."""
        raise NotImplementedError

    def keep(self, batch: Any) -> Any:
        """Returns a copy of a batch that outlives the loader."""
        raise NotImplementedError

    def train(self, batch: Any) -> Any:
        """Makes one training step and returns the loss, on the device."""
        raise NotImplementedError

    def networks(self, batch: Any) -> Any:
        """Makes only the networks' passes, which every step needs, without loss, banks, optimiser or momentum."""
        raise NotImplementedError


class Ours(Contender):
    modules = (*Contender.modules, "fastcssl.learn.step", "fastcssl.learn.optim")

    def __init__(self, job: Job) -> None:
        from fastcssl.data.prepared import Selection
        from fastcssl.distributed.world import World
        from fastcssl.learn.optim import build_optimizer, lr_at, lr_peak, set_lr
        from fastcssl.learn.step import Step
        from fastcssl.train.build import Run

        super().__init__(job)
        config = self.config
        self.run = run = Run(config, job.manifest, World(), self.device)
        for index in range(job.task + 1):
            run.strategy.begin_task(run.task(index), run.method)
            if index < job.task:
                run.strategy.end_task(run.task(index), run.method)
        self.module = Step(run.method, run.strategy).train()
        self.optimizer = build_optimizer(self.module.groups(), config.optim)
        set_lr(self.optimizer, lr_at(config.optim, lr_peak(config.optim, config.batch_size), 0, config.epochs))
        self.stream = run.loader.open(Selection(tasks=run.tasks[job.task], order="endless"))
        self.num_steps = 0

    def batches(self) -> Iterator[Any]:
        from fastcssl.learn.methods import Inputs

        for batch in self.stream.epoch(0):
            yield Inputs(views=batch.views, label=batch.label, id=batch.id)

    def keep(self, batch: Any) -> Any:
        return replace(batch, views=tuple(view.clone() for view in batch.views))

    def train(self, batch: Any) -> Any:
        from fastcssl.learn.step import optimise

        terms = optimise(self.module, batch, self.optimizer, self.scaler, amp_dtype=self.amp_dtype)
        self.run.method.after_step(self.num_steps, 1_000_000)
        self.run.strategy.after_step(self.run.method)
        self.num_steps += 1
        return sum(terms.values())

    def networks(self, batch: Any) -> Any:
        import torch

        strategy: Any = self.run.strategy
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.job.device, self.amp_dtype, enabled=self.amp_dtype is not None):
            z = self.run.method(batch).z
            if self.job.strategy == "pnr":
                z = (*z, *strategy.predictions(z), *strategy.frozen_embeddings(batch))
        total = torch.stack([z_ND.float().mean() for z_ND in z]).sum()
        self.scaler.scale(total).backward()
        return total.detach()


def _contender(side: Side) -> type[Contender]:
    if side == "ours":
        return Ours
    found: type[Contender] = importlib.import_module("train_lightly").Lightly
    return found


# ---- By the clock ----------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    seconds: float
    wait_share: float  # share of the time spent waiting for data; on a GPU, share of the time idle between steps
    loss: float | None


class Peaks(NamedTuple):
    imports_mb: float  # of the process before anything is built
    process_mb: float
    workers_mb: float
    device_mb: float | None

    @property
    def total_mb(self) -> float:
        return self.process_mb + self.workers_mb if self.device_mb is None else self.device_mb

    @property
    def above_imports_mb(self) -> float:
        return self.total_mb - (self.imports_mb if self.device_mb is None else 0)


class _Running:
    """The state of this process between two calls."""

    contender: Contender
    batches: Iterator[Any]
    held: Any = None
    imports_mb: float


def settle_in(job: Job, number: int) -> int:
    """Takes its cores before any library counts them, and imports packages. Returns the process id.

    Processes import on different cores, chosen by their number, and are then measured on the same cores.
    """
    die_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[(number + i) % len(cores)] for i in range(job.num_threads)])
    sys.path.extend(job.packages)
    for name in _contender(job.side).modules:
        importlib.import_module(name)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[: job.num_threads])
    import torch

    torch.set_num_threads(job.num_threads)
    _Running.imports_mb = peak_rss_mb()
    return os.getpid()


def begin(job: Job) -> float:
    """Builds the contender and warms it up. Returns the approximate seconds per batch."""
    import torch

    torch.manual_seed(job.seed)
    _Running.contender = contender = _contender(job.side)(job)
    _Running.batches = contender.batches()
    if job.mode in ("held", "networks"):
        _Running.held = contender.keep(next(_Running.batches))
        del _Running.batches  # together with the work of its threads or its workers
    advance(job.num_warm_up)  # also uses up the batches that are ready; later ones take their full time
    return advance(2).seconds / 2


def advance(num_batches: int) -> Slice:
    """Runs some batches and returns their time, the share of waiting, and the last loss."""
    import torch

    from fastcssl.runs.timing import DeviceIdle

    contender, mode = _Running.contender, _Running.contender.job.mode
    idle = DeviceIdle(contender.device, window=num_batches)
    loss, waited, began = None, 0.0, time.perf_counter()
    for _ in range(num_batches):
        batch = _Running.held
        if batch is None:
            asked = time.perf_counter()
            batch = next(_Running.batches)
            waited += time.perf_counter() - asked
        idle.begin()
        if mode != "loader":
            loss = (contender.networks if mode == "networks" else contender.train)(batch)
        idle.end()
    if contender.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    value = None if loss is None else float(loss)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"the loss is {value} after {num_batches} more steps")
    return Slice(seconds, waited / seconds if idle.share is None else idle.share, value)


def peaks() -> Peaks:
    """Returns the peak memory so far."""
    import torch

    workers_mb = sum(_private_mb(worker.pid) for worker in multiprocessing.active_children() if worker.pid)
    on_gpu = _Running.contender.device.type == "cuda"
    device_mb = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
    return Peaks(_Running.imports_mb, peak_rss_mb(), workers_mb, device_mb)


def _private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6
