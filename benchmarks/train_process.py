"""What runs in the process of one contender of train.py: what both sides are told, our training, and the clock.

lightly's training is in train_lightly.py. Packages are imported where they are used: the parent needs none of them.

Memory: the largest resident size of the process (VmHWM) and, of DataLoader workers, the pages that are theirs alone
(those that they share with the process are in its size); on a GPU, what torch had allocated there at most.
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
Mode = Literal["step", "held", "networks", "loader"]  # held: on the same batch again and again


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender in one work load."""

    side: Side
    mode: Mode
    strategy: str
    task: int  # whose images are trained on
    policy: str
    size_px: int
    stem: str
    encoder: str
    bank_size: int
    batch_size: int
    num_threads: int  # of torch, and as many of the loader; of a DataLoader: worker processes
    num_warm_up: int  # steps
    device: str
    seed: int
    packages: tuple[str, ...] = ()  # where else to look for lightly
    manifest: Path = Path()  # this and the next are set when images are prepared
    jpegs: Path | None = None  # a folder with the task's images as loose files; None: there is but the array


def config_of(job: Job) -> Any:
    """The recipe's values, but for the size of everything. Both sides take theirs from here."""
    from fastcssl.config.config import ExpectConfig, RunConfig, ViewsConfig
    from fastcssl.config.recipes import recipe
    from fastcssl.learn.encoders import EncoderConfig

    found: Any = recipe(f"{'cifar' if job.stem == 'cifar' else 'imagenet'}100-class5", "moco", job.strategy).config
    bank = replace(found.method.bank, size=job.bank_size, initial="random")  # full from the first step, as lightly's
    optim = found.optim
    if job.strategy == "finetune":  # to be compared with lightly, whose example has SGD; the rate is MoCo v2's
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
    """A side's training, cut into its parts."""

    # Imported before any clock starts, and before memory is first looked at.
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
        """Without end."""
        raise NotImplementedError

    def keep(self, batch: Any) -> Any:
        """A copy that outlives the loader."""
        raise NotImplementedError

    def train(self, batch: Any) -> Any:
        """One step; the loss, on the device."""
        raise NotImplementedError

    def networks(self, batch: Any) -> Any:
        """What no step can do without: the networks' passes. No loss, banks, optimiser or momentum."""
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
    wait_share: float  # of the time, for data; on a GPU: that it had nothing to do between two steps
    loss: float | None


class Peaks(NamedTuple):
    imports_mb: float  # of the process, before anything is built
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
    """What lives in this process between two calls."""

    contender: Contender
    batches: Iterator[Any]
    held: Any = None
    imports_mb: float


def settle_in(job: Job, number: int) -> int:
    """Takes its cores before any library counts them, and imports. Returns the process's id.

    Processes import on different cores, by their number, and are then measured on the same.
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
    """Roughly the seconds of a batch."""
    import torch

    torch.manual_seed(job.seed)
    _Running.contender = contender = _contender(job.side)(job)
    _Running.batches = contender.batches()
    if job.mode in ("held", "networks"):
        _Running.held = contender.keep(next(_Running.batches))
        del _Running.batches  # and its threads' work, or its workers
    advance(job.num_warm_up)  # also what lay ready: from here on batches cost what they cost
    return advance(2).seconds / 2


def advance(num_batches: int) -> Slice:
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
    import torch

    workers_mb = sum(_private_mb(worker.pid) for worker in multiprocessing.active_children() if worker.pid)
    on_gpu = _Running.contender.device.type == "cuda"
    device_mb = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
    return Peaks(_Running.imports_mb, peak_rss_mb(), workers_mb, device_mb)


def _private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6
