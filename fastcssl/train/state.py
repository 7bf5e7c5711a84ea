"""The position of a run, and the state of a task while it is trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastcssl.data.loader import Batch, Stream
from fastcssl.evaluate.online_probe import ParityProbe

if TYPE_CHECKING:  # the meter reports positions
    from fastcssl.train.meter import Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next step of a run. `ended`: all steps of the task are done, and the strategy's `end_task` has run."""

    task: int = 0
    epoch: int = 0  # within the task
    batch: int = 0  # within the epoch
    step: int = 0  # within the run
    ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class TaskState:
    """The state that exists only while a task is trained."""

    index: int
    start: Position  # its first step, or the step at which it resumes
    module: nn.Module  # computes the loss terms; wrapped by DDP on several ranks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    stream: Stream
    meter: "Meter"
    parity: ParityProbe | None = None
    num_replaced: int = 0  # samples that could not be decoded, as last reported
    labelled: Iterator[Batch] | None = None  # the parity probe's batches of this epoch

    def first_batch(self, epoch: int) -> int:
        """Returns the first batch of an epoch: 0, unless the run resumes inside this epoch."""
        return self.start.batch if epoch == self.start.epoch else 0

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "stream": self.stream.state_dict(),
            "parity": self.parity.state_dict() if self.parity else {},
            **self.meter.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.stream.load_state_dict(state["stream"])
        if self.parity:
            self.parity.load_state_dict(state["parity"])
        self.meter.load(state)
