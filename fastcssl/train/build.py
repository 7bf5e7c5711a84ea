"""Builds a run: data, encoder, method, strategy and loader. Also defines what a checkpoint of it holds."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dataprep.cores import usable_cores
from dataprep.manifest import manifest_path
from dataprep.suggest import nearest
from fastcssl.config.config import Config, plain
from fastcssl.config.recipes import Recipe
from fastcssl.data.backends import usual_threads
from fastcssl.data.draws import Reserved
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies
from fastcssl.learn.encoder_file import save_encoder
from fastcssl.learn.memory import fill
from fastcssl.learn.methods import Setting
from fastcssl.learn.nets import build_encoder
from fastcssl.learn.precision import amp_dtype, strides_over_a_pixel
from fastcssl.learn.strategies import CurrentTask
from fastcssl.runs.bottleneck import Machine

if TYPE_CHECKING:  # the meter imports Run and reports positions
    from fastcssl.train.state import Position

FORMAT = 1


class Run:
    """Everything that is built once and used by all tasks: data, encoder, method, strategy and loader."""

    def __init__(self, config: Config, data: Path, world: World, device: torch.device) -> None:
        self.config, self.device = config, device
        self.world = replace(world, scope=config.scope)
        self.data = Prepared.open(data)
        self.manifest_sha256 = hashlib.sha256(manifest_path(data).read_bytes()).hexdigest()
        self.tasks = _tasks(config, self.data)
        check(config, self.data, self.tasks, self.world)
        size_px = config.views.views()[0].size_px
        self.encoder: nn.Module = build_encoder(config.encoder, config.seed, size_px)
        self.amp_dtype = amp_dtype(config.precision, device)
        small_px = min(view.size_px for view in config.views.views())
        if device.type == "cpu" and self.amp_dtype is torch.bfloat16 and strides_over_a_pixel(self.encoder, small_px):
            if config.precision == "bf16":
                raise UserError(
                    f"{config.encoder.name} shrinks images of {small_px} px to a single pixel before its last stride; "
                    "there torch's bfloat16 convolutions return wrong gradients on CPUs. Use --precision fp32 or a "
                    "larger --views.size-px."
                )
            self.amp_dtype = None
        setting = Setting(
            world=self.world,
            seed=config.seed,
            device=device,
            amp_dtype=self.amp_dtype,
            accumulate=config.accumulate,
        )
        self.method = methods.build(config.method, self.encoder, setting)
        self.strategy = strategies.build(config.strategy, setting)
        self.loader_config = LoaderConfig(
            policy=config.views.views(),
            batch_size=config.batch_size,
            seed=config.seed,
            loader=config.loader,
            augment=config.augment,
            num_threads=config.run.num_threads,
            prefetch=config.run.prefetch,
            device=str(device),
            dtype=self.amp_dtype or torch.float32,
        )
        self.loader = Loader(self.data, self.loader_config, self.world)

    def task(self, index: int) -> CurrentTask:
        """Returns the task as the strategy sees it, with the numbers of all earlier tasks."""
        earlier = tuple(number for tasks in self.tasks[:index] for number in tasks)
        return CurrentTask(index=index, tasks=self.tasks[index], earlier=earlier, open=self.loader.open)

    def task_name(self, index: int) -> str:
        names = [self.data.manifest.tasks[number].name for number in self.tasks[index]]
        return names[0] if len(names) == 1 else f"all {len(names)} tasks"

    def num_epochs(self, index: int) -> int:
        return self.config.epochs_of(self.tasks[index][0])

    def epochs_before(self, index: int) -> int:
        """Returns the number of epochs of all tasks before this one."""
        return sum(map(self.num_epochs, range(index)))

    def steps_per_epoch(self, index: int) -> int:
        return len(self.loader.open(Selection(tasks=self.tasks[index])))

    def machine(self) -> Machine:
        """Returns the facts about this machine and configuration that decide the speed."""
        return Machine(
            device=self.device.type,
            loader=self.loader.name,
            augment=self.config.augment,
            precision={torch.bfloat16: "bf16", torch.float16: "fp16", None: "fp32"}[self.amp_dtype],
            compile=self.config.compile,
            num_threads=self.config.run.num_threads or usual_threads(),
            num_cores=usable_cores(),
            num_ranks=self.world.size,
        )

    def described(self, recipe: Recipe, data: Path) -> dict[str, Any]:
        """Returns the content of RUN/config.json."""
        return {
            "config": plain(self.config),
            "sources": dict(recipe.sources),
            "settings": recipe.settings,
            "words": [self.config.recipe, self.method.name, self.strategy.name],
            "data": str(data.resolve()),
            "manifest_sha256": self.manifest_sha256,
            "tasks": [list(numbers) for numbers in self.tasks],
            "task_names": [self.task_name(index) for index in range(len(self.tasks))],
            "machine": asdict(self.machine()),
        }

    def state(self, position: "Position") -> dict[str, Any]:
        """Returns the part of a checkpoint that outlives a task."""
        return {
            "format": FORMAT,
            "config": self.config.identity(),
            "manifest": self.manifest_sha256,
            "position": asdict(position),
            "method": dict(self.method.state_dict()),
            "method_copies": {name: item.state_dict() for name, item in self.method.copies.items()},
            "strategy": dict(self.strategy.state_dict()),
            "strategy_copies": {name: item.state_dict() for name, item in self.strategy.copies.items()},
        }

    def export(self, path: Path, index: int) -> None:
        """Writes the encoder as it is after the task, with the metadata that other programs need."""
        config, view = self.config, self.config.views.probe_view()[0]
        path.parent.mkdir(exist_ok=True)
        metadata = {
            "recipe": config.recipe,
            "method": self.method.name,
            "strategy": self.strategy.name,
            "tasks": json.dumps(list(self.tasks[index])),
            "seed": str(config.seed),
            "mean": json.dumps(view.mean),
            "std": json.dumps(view.std),
            "size_px": str(view.size_px),
            "manifest_sha256": self.manifest_sha256,
        }
        save_encoder(path, self.encoder, config.encoder, metadata)

    def renew_banks(self, task: CurrentTask) -> None:
        """Keeps, drops or replaces the keys of the previous task in the banks, at the start of a task.

        With prefill, the banks of both models are filled by the network as the previous task left it. At this point
        both models are equal to that network.
        """
        banks = [*self.method.banks, *self.strategy.banks]
        config = self.config.method.bank
        if not banks or config is None or config.at_task_start == "keep":
            return
        for bank in banks:
            bank.reset()
        if config.at_task_start == "prefill":
            for bank in banks:
                bank.filled.zero_()
            stream = self.loader.open(Selection(tasks=task.tasks))
            network = self.method.online
            with torch.no_grad(), torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
                network.eval()
                batches = stream.epoch(Reserved.PREFILL_EPOCH + task.index)
                fill(banks, lambda view: network(view)[1], batches, self.world.gather_keys)
                network.train()

    def load_method(self, state: dict[str, Any]) -> None:
        """Loads the method and its copies from a checkpoint."""
        self.method.load_state_dict(state["method"])
        for name, item in self.method.copies.items():
            item.load_state_dict(state["method_copies"][name])

    def load_strategy(self, state: dict[str, Any]) -> None:
        """Loads the strategy and its copies from a checkpoint. `begin_task` must have given them that task's shapes."""
        self.strategy.load_state_dict(state["strategy"])
        for name, item in self.strategy.copies.items():
            item.load_state_dict(state["strategy_copies"][name])


def _tasks(config: Config, data: Prepared) -> list[tuple[int, ...]]:
    """Returns the manifest's tasks in the order of training; joint training has all of them as one."""
    count = len(data.manifest.tasks)
    if config.only_task is not None:
        if not 0 <= config.only_task < count:
            raise UserError(f"--only-task {config.only_task}: the data has tasks 0 to {count - 1}.")
        return [(config.only_task,)]
    if strategies.strategy_of(config.strategy).union:
        return [tuple(range(count))]
    return [(number,) for number in range(count)]


def check(config: Config, data: Prepared, tasks: list[tuple[int, ...]], world: World) -> None:
    """Raises a UserError for data or settings that would otherwise fail only after training has started."""
    manifest, expect = data.manifest, config.expect
    method, strategy = methods.method_of(config.method), strategies.strategy_of(config.strategy)
    strategy.check(config.strategy, method)
    config.probe.check(data)
    if config.compile != "off" and config.compile not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise UserError(f"There is no --compile {config.compile!r}. {nearest(config.compile, ('off', *known))}")
    if strategy.replays and config.loader == "dali":
        raise UserError(
            f"{strategy.name} reads earlier samples beside the task's own, but --loader dali supports only one stream. "
            "Use --loader auto."
        )
    if method.supervised and len(manifest.classes) < 2:
        raise UserError(
            f"{method.name} learns from labels, but {data.folder} has a single class. Prepare it with one folder per "
            "class, or choose another method."
        )
    if expect.source not in ("any", manifest.source.kind):
        raise UserError(
            f"The recipe {config.recipe} is made for {expect.source}, but {data.folder} was prepared from "
            f"{manifest.source.kind}. Give other data, or --expect.source any."
        )
    split = manifest.scenario
    # Joint training uses all tasks together, so the split does not matter.
    if not strategy.union and (
        expect.scenario not in ("any", split.kind) or expect.num_tasks not in (0, split.num_tasks)
    ):
        raise UserError(
            f"The recipe {config.recipe} is made for {expect.num_tasks} {expect.scenario} tasks, but {data.folder} is "
            f"split into {split.num_tasks} {split.kind} tasks. Split it again (seconds): fastcssl-prep split "
            f"{data.folder} --scenario {expect.scenario} --tasks {expect.num_tasks} --name {config.recipe}, then "
            f"train with --data {data.folder / f'{config.recipe}.json'}."
        )
    _check_epochs(config, data)
    last = config.run.stop_after_task
    if last is not None and last >= len(tasks):
        there = f"{len(tasks)} tasks, 0 to {len(tasks) - 1}" if len(tasks) > 1 else "a single task, 0"
        raise UserError(f"--stop-after-task {last}: this run has {there}. Name one of them, or leave the flag out.")
    if config.batch_size % (world.size * config.accumulate):
        raise UserError(
            f"The batch size {config.batch_size} counts all processes and micro-batches, and cannot be shared equally "
            f"by {world.size} x {config.accumulate}. Use a multiple of {world.size * config.accumulate}."
        )
    for index, numbers in enumerate(tasks):
        count = sum(manifest.tasks[number].train.count for number in numbers)
        if count < config.batch_size:
            raise UserError(
                f"Task {index} has {count} training images, fewer than one batch of {config.batch_size}. "
                f"Use --batch-size {max(2, count // 2)} or less."
            )
    bank = config.method.bank
    if bank is not None and bank.size < config.batch_size:
        raise UserError(
            f"The bank has {bank.size} rows, fewer than a batch of {config.batch_size}: keys would be lost before they "
            f"are used. Use --method.bank.size {config.batch_size} or more."
        )


def _check_epochs(config: Config, data: Prepared) -> None:
    """Raises a UserError unless a list of epochs has one number for each task."""
    count, given = len(data.manifest.tasks), config.epochs_listed
    if isinstance(config.epochs, int):
        return
    text = f"--epochs {','.join(map(str, given))}"
    strategy = strategies.strategy_of(config.strategy)
    if strategy.union:
        raise UserError(
            f"{text}: {strategy.name} trains all tasks as one. Give a single number, such as --epochs {given[0]}."
        )
    if len(given) != count:
        raise UserError(
            f"{text} has {len(given)} number{'s' * (len(given) != 1)}, but {data.folder} is split into {count} "
            f"task{'s' * (count != 1)}. Give one number for each task, or a single number for all of them."
        )
