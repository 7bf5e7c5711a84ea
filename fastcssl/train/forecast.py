"""Estimates the steps, memory, disk space and time of a run before it starts, for `fastcssl-train --dry-run`.

Time is measured on this machine: a few steps on random images and a few real batches of the loader. The steps are those
of a second task, which includes the frozen network and its predictor.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from dataprep.progress import human_bytes
from fastcssl.config.config import Config
from fastcssl.data.prepared import Selection
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.learn.memory import Bank
from fastcssl.learn.methods import Inputs
from fastcssl.learn.nets import activation_bytes
from fastcssl.learn.optim import build_optimizer, describe, lr_peak
from fastcssl.learn.step import Step, optimise
from fastcssl.runs.display import duration
from fastcssl.train.build import Run, check

_REPEATS = 2
_ENOUGH_SECONDS = 1.5  # a step this long is measured as it is; a shorter one is measured with more images
_LOADER_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskForecast:
    """The size of one task."""

    name: str
    num_images: int
    num_epochs: int
    steps_per_epoch: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured times of a training step and of the loader."""

    seconds_per_step: float  # on one device, without loading
    num_measured: int  # images in the measured step
    num_wanted: int  # images in a real one
    images_per_s_loaded: float  # with all their views, on this machine's cores

    def seconds(self, num_steps: int, local_batch: int, device: torch.device) -> float:
        """Returns the time of `num_steps` steps. On a CPU, loading and training add up; with a GPU they overlap."""
        loading = local_batch / self.images_per_s_loaded
        each = max(self.seconds_per_step, loading) if device.type == "cuda" else self.seconds_per_step + loading
        return num_steps * each


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The estimate of a run."""

    config: Config
    world_size: int
    device: torch.device
    loader: str
    optimizer: str
    tasks: tuple[TaskForecast, ...]
    lr_peak: float
    local_batch: int
    num_parameters: int
    memory: dict[str, int]  # bytes per device, by purpose
    memory_total: int  # bytes of the device, or free bytes of the host
    disk: dict[str, int]  # bytes, by purpose
    disk_free: int
    data_bytes: int
    speed: Speed | None  # None if it was not measured

    @property
    def num_steps(self) -> int:
        return sum(task.num_steps for task in self.tasks)

    @property
    def seconds(self) -> float | None:
        return None if self.speed is None else self.speed.seconds(self.num_steps, self.local_batch, self.device)


def forecast(
    config: Config,
    data: Path,
    world_size: int,
    device: torch.device,
    measure: bool = True,
    *,
    out: Path = Path(),
) -> Forecast:
    """Returns the estimate of a run on `world_size` devices, measured on one of them.

    data: a prepared folder or one of its manifests. out: where the run would be written.
    """
    local_batch = config.batch_size // world_size
    if local_batch < 2:
        raise UserError(
            f"A batch of {config.batch_size} gives {world_size} processes less than 2 images each. Use a larger batch."
        )
    run = Run(replace(config, batch_size=local_batch), data, World(), device)
    try:
        check(config, run.data, run.tasks, World(0, world_size))
        tasks = tuple(_task(run, index, config) for index in range(len(run.tasks)))
        # All later tasks are like the second.
        for index in range(min(2, len(run.tasks))):
            run.strategy.begin_task(run.task(index), run.method)
        step = Step(run.method, run.strategy).train()
        optimizer = build_optimizer(step.groups(), config.optim)
        memory = _memory(run, step, local_batch // config.accumulate)
        speed = _speed(run, step, optimizer, local_batch) if measure else None
        return Forecast(
            config=config,
            world_size=world_size,
            device=device,
            loader=run.loader.name,
            optimizer=describe(optimizer),
            tasks=tasks,
            lr_peak=lr_peak(config.optim, config.batch_size),
            local_batch=local_batch,
            num_parameters=sum(p.numel() for p in step.parameters() if p.requires_grad),
            memory=memory,
            memory_total=_memory_total(device),
            disk=_disk(run, memory, len(tasks)),
            disk_free=shutil.disk_usage(_existing(out)).free,
            data_bytes=sum(shard.bytes for shard in run.data.manifest.shards),
            speed=speed,
        )
    finally:
        run.loader.close()


def _task(run: Run, index: int, config: Config) -> TaskForecast:
    num_images = sum(run.data.manifest.tasks[number].train.count for number in run.tasks[index])
    steps = num_images // config.batch_size
    return TaskForecast(
        name=run.task_name(index),
        num_images=num_images,
        num_epochs=run.num_epochs(index),
        steps_per_epoch=steps,
        num_steps=run.num_epochs(index) * steps,
    )


# ---- Memory and disk -------------------------------------------------------------------------------------------------


def _memory(run: Run, step: Step, micro_batch: int) -> dict[str, int]:
    views = run.config.views.views()
    dtype = run.amp_dtype or torch.float32
    weights = _num_bytes(step.parameters()) + _num_bytes(step.buffers())
    trained = _num_bytes(p for p in step.parameters() if p.requires_grad)
    states = {"adamw": 2, "sgd": 1, "lars": 1}[run.config.optim.name]
    copies = {**run.method.copies, **run.strategy.copies}
    sizes = {name: _num_bytes(_tensors(item.state_dict())) for name, item in copies.items()}
    banks = sum(sizes[name] for name, item in copies.items() if isinstance(item, Bank))
    memory = {
        "weights and gradients": weights + trained,
        "optimiser": states * trained,
        "slow and frozen copies": sum(sizes.values()) - banks,
        "banks": banks,
        "activations": sum(activation_bytes(run.method.online, view.size_px, micro_batch, dtype) for view in views),
        # One batch is used for training while the next is copied.
        "images": 2 * run.config.batch_size * sum(3 * view.size_px**2 for view in views) * dtype.itemsize,
    }
    if run.loader.name == "resident" and run.device.type == "cuda":
        bytes_S = run.data.table["array_bytes"]
        memory["resident images"] = max(int(bytes_S[run.data.rows(Selection(tasks=t))].sum()) for t in run.tasks)
    return {name: size for name, size in memory.items() if size}


def _disk(run: Run, memory: dict[str, int], num_tasks: int) -> dict[str, int]:
    kept = ("optimiser", "slow and frozen copies", "banks")
    weights = _num_bytes(run.method.state_dict().values()) + _num_bytes(run.strategy.state_dict().values())
    checkpoint = weights + sum(memory.get(name, 0) for name in kept)
    return {
        # One more exists while it is being written.
        "rolling checkpoints": (run.config.run.keep_checkpoints + 1) * checkpoint,
        "checkpoints at task ends": num_tasks * checkpoint,
        "encoders": num_tasks * _num_bytes(run.encoder.state_dict().values()),
    }


def _num_bytes(tensors: object) -> int:
    return sum(tensor.nbytes for tensor in tensors)  # type: ignore[attr-defined]


def _tensors(state: dict[str, object]) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)


def _memory_total(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


# ---- Time ------------------------------------------------------------------------------------------------------------


def _speed(run: Run, step: Step, optimizer: torch.optim.Optimizer, local_batch: int) -> Speed:
    micro_batch = local_batch // run.config.accumulate
    count = min(4, micro_batch)
    _seconds_of(run, step, optimizer, count)  # the first steps of a process are slow
    seconds = _seconds_of(run, step, optimizer, count)
    while count < micro_batch and seconds < _ENOUGH_SECONDS:
        count = min(4 * count, micro_batch)
        seconds = _seconds_of(run, step, optimizer, count)
    seconds = min(seconds, *(_seconds_of(run, step, optimizer, count) for _ in range(_REPEATS)))
    return Speed(
        seconds_per_step=seconds * local_batch / count,
        num_measured=count,
        num_wanted=micro_batch,
        images_per_s_loaded=_loader_rate(run),
    )


def _seconds_of(run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> float:
    """Returns the duration of one step with `count` random images."""
    device = run.device
    inputs = Inputs(
        views=tuple(
            torch.randn(count, 3, view.size_px, view.size_px, device=device, dtype=run.amp_dtype or torch.float32).to(
                memory_format=torch.channels_last
            )
            for view in run.config.views.views()
        ),
        label=torch.zeros(count, dtype=torch.int64, device=device),
        id=torch.arange(count, device=device),
    )
    scaler = torch.amp.GradScaler(device.type, enabled=run.amp_dtype is torch.float16)
    _wait(device)
    began = time.perf_counter()
    optimise(module, inputs, optimizer, scaler, amp_dtype=run.amp_dtype)
    run.method.after_step(0, 1)
    run.strategy.after_step(run.method)
    _wait(device)
    return time.perf_counter() - began


def _loader_rate(run: Run) -> float:
    """Returns how many images per second the loader delivers, from the second batch on."""
    stream = run.loader.open(Selection(tasks=run.tasks[0], order="endless"))
    batches = stream.epoch(0)
    next(batches)
    _wait(run.device)
    began, num_batches = time.perf_counter(), 0
    while time.perf_counter() - began < _LOADER_SECONDS and num_batches < 50:
        next(batches)
        num_batches += 1
    _wait(run.device)
    rate = num_batches * run.config.batch_size / (time.perf_counter() - began)
    batches.close()  # type: ignore[attr-defined]
    return rate


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- Display ---------------------------------------------------------------------------------------------------------


def shown(found: Forecast) -> RenderableType:
    """Returns the estimate as tables for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("task", justify="right")
    table.add_column("name", overflow="fold")
    for heading in ("images", "epochs", "steps per epoch", "steps"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, task in enumerate(found.tasks):
        table.add_row(
            str(number),
            Text(task.name),
            *(f"{count:,}" for count in (task.num_images, task.num_epochs, task.steps_per_epoch, task.num_steps)),
        )
    if len(found.tasks) > 1:
        table.add_section()
        table.add_row("", "all", f"{sum(task.num_images for task in found.tasks):,}", "", "", f"{found.num_steps:,}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value, style in _facts(found):
        facts.add_row(Text(label, "dim"), Text(value, style))
    return Group(table, facts)


def _facts(found: Forecast) -> list[tuple[str, str, str]]:
    config = found.config
    shares = [f"{found.world_size} processes x "] if found.world_size > 1 else []
    shares += [f"{config.accumulate} micro-batches x "] if config.accumulate > 1 else []
    batch = f" = {''.join(shares)}{found.local_batch // config.accumulate}" if shares else ""
    memory, disk = sum(found.memory.values()), sum(found.disk.values())
    place = "the GPU" if found.device.type == "cuda" else "the free memory"
    return [
        ("batch", f"{config.batch_size}{batch} images, {_views(found)}", ""),
        ("optimiser", f"{found.optimizer}, {_schedule(found)}", ""),
        ("network", f"{config.encoder.name}, {found.num_parameters / 1e6:.1f} million trained parameters", ""),
        (
            "memory",
            f"about {human_bytes(memory)} per process, {memory / found.memory_total:.0%} of {place}: "
            f"{_parts(found.memory)}",
            "bold yellow" if memory > 0.9 * found.memory_total else "",
        ),
        (
            "disk",
            f"about {human_bytes(disk)}, {human_bytes(found.disk_free)} free: {_parts(found.disk)}",
            "bold yellow" if disk > 0.9 * found.disk_free else "",
        ),
        ("data", f"{human_bytes(found.data_bytes)}, loader {found.loader}", ""),
        *_time(found),
    ]


def _views(found: Forecast) -> str:
    """Returns the number of views of an image, and their sizes."""
    sizes = [view.size_px for view in found.config.views.views()]
    if len(set(sizes)) == 1:
        return f"{len(sizes)} views of {sizes[0]} px each"
    return f"{len(sizes)} views each: {', '.join(f'{sizes.count(px)} of {px} px' for px in dict.fromkeys(sizes))}"


def _schedule(found: Forecast) -> str:
    optim = found.config.optim
    peak = f"learning rate {found.lr_peak:g}"
    if found.config.batch_size != 256:
        peak += f" ({optim.lr:g} x {found.config.batch_size} / 256)"
    if optim.schedule == "constant":
        return f"{peak}, constant"
    listed = dict.fromkeys(task.num_epochs for task in found.tasks)
    epochs = ", ".join(map(str, listed))
    rest = f"a cosine to {min(optim.min_lr, found.lr_peak):g} over {epochs} epochs"
    if optim.schedule == "warmup-cosine" and optim.warmup_epochs:
        if min(listed) <= optim.warmup_epochs:
            return (
                f"{peak}; the warm-up of {optim.warmup_epochs} epochs does not end within {min(listed)}: "
                "set --optim.warmup-epochs"
            )
        rest = f"from {min(optim.warmup_start_lr, found.lr_peak):g} in {optim.warmup_epochs} epochs, then {rest}"
    return f"{peak}, {rest}, restarted in each task"


def _parts(parts: dict[str, int]) -> str:
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in largest_first)


def _time(found: Forecast) -> list[tuple[str, str, str]]:
    speed, seconds = found.speed, found.seconds
    if speed is None or seconds is None:
        return [("time", "not measured", "")]
    how = (
        ""
        if speed.num_measured == speed.num_wanted
        else f", scaled from {speed.num_measured} to {speed.num_wanted} images"
    )
    compute = found.num_steps * speed.seconds_per_step
    return [
        (
            "step",
            f"{speed.seconds_per_step:.3g} s on this {found.device.type.upper()}, measured on random images{how}; "
            f"{duration(compute)} for all steps, without loading",
            "",
        ),
        ("loading", f"{speed.images_per_s_loaded:,.0f} images/s on this machine, measured", ""),
        ("time", f"about {duration(seconds)}", "bold cyan"),
    ]
