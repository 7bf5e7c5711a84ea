"""Decides what all ranks do after a step: continue, save, stop, or give up because the loss is not finite."""

import math
import time
from enum import IntEnum

import torch
from torch import Tensor

from fastcssl.runs.interrupt import Stop
from fastcssl.train.build import Run


class Decision(IntEnum):
    """The possible decisions after a step. The ranks agree on the largest."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2
    DIVERGED = 3


class Watch:
    """Watches the loss terms of recent steps, the clock and signals."""

    def __init__(self, run: Run, stop: Stop) -> None:
        self._world, self._stop = run.world, stop
        # Reading a value from a GPU stalls it; checking every few steps is enough to notice a loss that is not finite.
        self._check_every = 1 if run.device.type == "cpu" else run.config.run.log_every
        self._save_every_s = 60 * run.config.run.checkpoint_minutes
        self._last_save = time.monotonic()
        self._recent: list[tuple[int, dict[str, Tensor]]] = []
        self._bad: tuple[int, dict[str, float]] | None = None

    def saved(self) -> None:
        """Restarts the clock of periodic checkpoints."""
        self._last_save = time.monotonic()

    def decide(self, step: int, terms: dict[str, Tensor], *, last: bool) -> Decision:
        """Returns what all ranks do after this step. They communicate only at steps that check the loss.

        last: whether this is the last step of its epoch, which always checks.
        """
        self._recent.append((step, terms))
        if step % self._check_every and not last:
            return Decision.CONTINUE
        for number, seen in self._recent:
            values = torch.stack(list(seen.values())).tolist()
            if not all(map(math.isfinite, values)):
                self._bad = (number, dict(zip(seen, values, strict=True)))
                break
        self._recent.clear()
        due = self._world.rank == 0 and time.monotonic() - self._last_save > self._save_every_s
        own = Decision.SAVE if due else Decision.CONTINUE
        if self._stop.requested:
            own = Decision.STOP
        if self._bad:
            own = Decision.DIVERGED
        return Decision(self._world.agree(own))

    def diverged(self, step: int, where: str) -> str:
        """Returns the message for a loss that is not finite. `where`: the file that holds the state."""
        number, terms = self._bad or (step, {})
        listed = ", ".join(f"{name} {value:g}" for name, value in terms.items()) or "on another rank"
        return (
            f"The loss is not finite at step {number} ({listed}). The state is in {where}, for inspection; the last "
            "checkpoint is intact. Try a smaller --optim.lr, a longer warm-up or --precision fp32, with another --out."
        )
