"""Where a run stands, and what a task has while it is trained."""

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
    """The next step to make. `ended`: all steps of the task were made, and the strategy has closed it."""

    task: int = 0
    epoch: int = 0  # of the task
    batch: int = 0  # of the epoch
    step: int = 0  # of the run
    ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class TaskState:
    """Everything that a task has while it is trained, beside what outlives it."""

    index: int
    start: Position  # its first step, or the step at which it is resumed
    module: nn.Module  # what computes the loss terms; DDP's wrapper on several ranks
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    stream: Stream
    meter: "Meter"
    parity: ParityProbe | None = None
    num_replaced: int = 0  # samples that could not be decoded, as last told
    labelled: Iterator[Batch] | None = None  # the parity probe's batches of this epoch

    def first_batch(self, epoch: int) -> int:
        """Returns the number of the batch with which an epoch begins here: 0, unless it is resumed inside."""
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
