"""Measures and reports one task, so that the loop contains only training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastcssl.data.loader import Stream
from fastcssl.learn.optim import lr_at, lr_peak
from fastcssl.runs.log import EpochReport, StepReport, TaskReport
from fastcssl.runs.timing import DeviceIdle, Rates, StageTimes
from fastcssl.train.build import Run
from fastcssl.train.state import Position


class Meter:
    """Counts, times and reports the steps of a task. `epoch`, `batch` and `step` are those of the next step."""

    def __init__(self, run: Run, index: int, stream: Stream, start: Position) -> None:
        self._run, self._index, self._stream = run, index, stream
        self._config = run.config
        self._peak = lr_peak(run.config.optim, run.config.batch_size)
        self.epoch, self.batch, self.step = start.epoch, start.batch, start.step
        self.num_epochs = run.num_epochs(index)
        self.num_steps = self.num_epochs * len(stream)  # of the task
        self.rates, self.stages = Rates(), StageTimes()
        self._idle = DeviceIdle(run.device)
        self._sums: dict[str, Tensor] = {}  # sum of each term over the steps of this epoch
        self._terms: dict[str, Tensor] = {}  # terms of the last step
        self._probe_s = self._began = self._epoch_began = self._waited = self._augmented = 0.0

    # ---- Position ----------------------------------------------------------------------------------------------------

    @property
    def task_step(self) -> int:
        """Returns how many steps of the task have been completed."""
        return self.epoch * len(self._stream) + self.batch

    @property
    def epoch_of_task(self) -> float:
        """Returns the progress within the task, in epochs."""
        return self.task_step / len(self._stream)

    @property
    def lr(self) -> float:
        return lr_at(self._config.optim, self._peak, self.epoch_of_task, self.num_epochs)

    @property
    def epoch_is_over(self) -> bool:
        return self.batch == len(self._stream)

    def position(self, *, ended: bool = False) -> Position:
        if ended:
            return Position(task=self._index, epoch=self.num_epochs, step=self.step, ended=True)
        return Position(task=self._index, epoch=self.epoch, batch=self.batch, step=self.step)

    # ---- Clocks ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, first_batch: int) -> None:
        self.epoch, self.batch = epoch, first_batch
        if not first_batch:
            self._sums.clear()
        self._began = self._epoch_began = time.perf_counter()
        self._waited, self._augmented = self._stream.wait_seconds, self._stream.augment_seconds

    def begin_step(self) -> None:
        self._probe_s = 0.0
        self._idle.begin()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Times the parity probe's part of a step separately."""
        began = time.perf_counter()
        yield
        self._probe_s += time.perf_counter() - began

    def end_step(self, terms: dict[str, Tensor]) -> None:
        self._idle.end()
        for name, term in terms.items():
            zero = torch.zeros((), device=self._run.device, dtype=torch.float64)
            self._sums[name] = self._sums.get(name, zero) + term
        self._terms = terms
        stream, now = self._stream, time.perf_counter()
        wait_s, augment_s = stream.wait_seconds - self._waited, stream.augment_seconds - self._augmented
        self.rates.step(self._config.batch_size, wait_s, now - self._began)
        self.stages.step(now - self._began, {"wait": wait_s, "augment": augment_s, "probe": self._probe_s})
        self._waited, self._augmented, self._began = stream.wait_seconds, stream.augment_seconds, now
        self.batch += 1
        self.step += 1

    @contextmanager
    def paused(self, stage: str) -> Iterator[None]:
        """Times an interruption between steps, such as a checkpoint, as a stage of its own."""
        with self.stages.timed(stage):
            yield
        self._idle.pause()
        self._began = time.perf_counter()

    def follow(self) -> None:
        """Reads the clocks that run outside the loop: those of the loader and of the device."""
        self.stages.follow("loader", self._run.loader.stage_seconds())
        if self._run.device.type == "cuda":
            own = {"idle": self._idle.seconds, "launch": self._idle.launch_seconds, "transfer": 0.0, "augment": 0.0}
            own |= self._stream.device_seconds
            self.stages.follow("device", own)

    # ---- Reports -----------------------------------------------------------------------------------------------------

    @property
    def report_is_due(self) -> bool:
        return self.step % self._config.run.log_every == 0 or self.epoch_is_over

    def step_report(self) -> StepReport:
        """Returns the report of the last step. Every rank must call it, because the terms are means over ranks."""
        mean = self._means(self._terms)
        lr = lr_at(self._config.optim, self._peak, (self.task_step - 1) / len(self._stream), self.num_epochs)
        return StepReport(
            step=self.step,
            task=self._index,
            epoch=self.epoch,
            batch=self.batch - 1,
            lr=lr,
            loss=sum(mean.values()),
            terms=mean,
            images_per_s=self.rates.images_per_s,
            data_wait_share=self.rates.wait_share,
            device_idle_share=self._idle.share,
        )

    def epoch_report(self) -> EpochReport:
        """Returns the report of the epoch that just ended. Every rank must call it."""
        mean = self._epoch_means()
        return EpochReport(
            step=self.step,
            task=self._index,
            epoch=self.epoch,
            lr=lr_at(self._config.optim, self._peak, self.epoch, self.num_epochs),
            loss=sum(mean.values()),
            terms=mean,
            images_per_s=self.rates.mean_images_per_s,
            data_wait_share=self.rates.mean_wait_share,
            seconds=time.perf_counter() - self._epoch_began,
            stages=self.stages.state(),
        )

    def task_report(self, accuracy: dict[str, float]) -> TaskReport:
        """Returns the report of the whole task. Every rank must call it."""
        return TaskReport(
            step=self.step,
            task=self._index,
            name=self._run.task_name(self._index),
            num_images=self._stream.num_samples,
            num_epochs=self.num_epochs,
            loss=sum(self._epoch_means().values()),
            images_per_s=self.rates.mean_images_per_s,
            data_wait_share=self.rates.mean_wait_share,
            seconds=self.rates.seconds,
            accuracy=accuracy,
            stages=self.stages.state(),
        )

    def _epoch_means(self) -> dict[str, float]:
        return self._means({name: value / len(self._stream) for name, value in self._sums.items()})

    def _means(self, terms: dict[str, Tensor]) -> dict[str, float]:
        """Returns the means over all ranks as Python numbers."""
        if not terms:
            return {}
        stacked = torch.stack([term.detach().double() for term in terms.values()])
        mean = replace(self._run.world, scope="global").total(stacked) / self._run.world.size
        return dict(zip(terms, mean.tolist(), strict=True))

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "rates": [self.rates.num_images, self.rates.wait_seconds, self.rates.seconds],
            "stages": self.stages.state(),
            "sums": self._sums_of_ranks(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.rates.num_images, self.rates.wait_seconds, self.rates.seconds = state["rates"]
        self.stages.load(state["stages"])
        world = self._run.world
        for name, sums_R in state["sums"].items():
            # With another number of ranks, or a scalar from an earlier version, every rank continues with the mean.
            is_own = sums_R.ndim == 1 and len(sums_R) == world.size
            self._sums[name] = sums_R[world.rank] if is_own else sums_R.mean()

    def _sums_of_ranks(self) -> dict[str, Tensor]:
        """Returns the sums of all R ranks, because every rank sees other images. Every rank must call it."""
        if not self._sums:
            return {}
        sums_RT = torch.stack(self._run.world.collect(torch.stack(list(self._sums.values()))))
        return {name: sums_R.clone() for name, sums_R in zip(self._sums, sums_RT.unbind(1), strict=True)}
