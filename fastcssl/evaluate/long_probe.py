"""Saves the state of a long probe, and finds it again after an interruption."""

import time
from pathlib import Path
from typing import Any

from fastcssl.evaluate.options import EvaluationInterrupted, ProbeMachine
from fastcssl.evaluate.probes import linear
from fastcssl.runs.checkpoint import Checkpoints, latest, load
from fastcssl.runs.interrupt import Stop


class Guard:
    """Saves the state of a long probe every few minutes, and when a signal asks it to stop."""

    def __init__(self, folder: Path, machine: ProbeMachine, stop: Stop, epochs: int) -> None:
        self._folder, self._machine, self._stop, self._epochs = folder, machine, stop, epochs
        self._last = time.monotonic()
        self._step = 0

    def state(self) -> dict[str, Any] | None:
        world = self._machine.world
        found = latest(self._folder) if world.rank == 0 else None
        name = world.share(found.path.name if found else "")
        if not name:
            return None
        state = found.state if found else load(self._folder / name)
        self._step = state["step"]
        return state

    def after_batch(self, training: linear.Training) -> None:
        world, self._step = self._machine.world, self._step + 1
        done = training.epoch == self._epochs
        due = world.rank == 0 and (done or time.monotonic() - self._last > 60 * self._machine.checkpoint_minutes)
        signal = world.agree(self._stop.requested)
        if world.agree(int(due)) or signal:
            if world.rank == 0:
                checkpoints = Checkpoints(self._folder, keep=1)
                checkpoints.save(self._step, training.state() | {"step": self._step}, wait=True)
            self._last = time.monotonic()
        if signal:
            raise EvaluationInterrupted(signal)
