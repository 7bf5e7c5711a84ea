"""Everything around the training loop: the run's folder and its lock, checkpoints, probes and the outcome.

The loop calls a `Session` at fixed points. Every rank has one and makes the same calls; only rank 0 writes files and
messages.
"""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from rich.console import Console

from fastcssl.config.config import Resume
from fastcssl.config.recipes import Recipe
from fastcssl.errors import Diverged
from fastcssl.evaluate.online_probe import ParityProbe, probe
from fastcssl.learn.random_state import random_state
from fastcssl.runs.checkpoint import CheckpointError, Checkpoints
from fastcssl.runs.interrupt import Stop
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.log import TaskReport
from fastcssl.runs.ownership import UNLOCKED, FileGuard, own, write_config
from fastcssl.train.build import Run
from fastcssl.train.reporter import Reporter
from fastcssl.train.start import find_start
from fastcssl.train.startup_warnings import startup_warnings
from fastcssl.train.watch import Decision, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended: the run's folder, and one report per finished task."""

    folder: Path
    status: Literal["finished", "stopped"]
    signal: int = 0  # the signal that stopped it, or 0
    tasks: tuple[TaskReport, ...] = ()


class Session:
    """Opens a run's folder. `start` is where training begins; `reporter` takes all messages and reports."""

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        *,
        data: Path,
        out: Path,
        resume: Resume,
        start_from: str | None,
        console: Console | None,
    ) -> None:
        self._run, self._world, self.folder = run, run.world, RunFolder(out)
        self._leads = run.world.rank == 0
        with ExitStack() as stack:
            # Entered first and left last, so that a signal cannot interrupt the wait for a checkpoint being written.
            self._stop = stack.enter_context(Stop())
            self.guard = self._enter_folder(stack, resume)
            self.start = find_start(run, self.folder, data, start_from, self.guard)
            self._checkpoints = self._open_checkpoints(stack)
            if self._leads:
                write_config(self.folder, run.described(recipe, data), self.guard)
            self.parity = self._open_parity(stack)
            position = None if self.start.state is None else self.start.position
            self.reporter = stack.enter_context(
                Reporter(run, data=data, folder=self.folder, start=position, console=console, guard=self.guard)
            )
            for text in (*self.start.warnings, *startup_warnings(run, recipe.sources)):
                self.reporter.note(text, warning=True)
            self._stack = stack.pop_all()
        self.watch = Watch(run, self._stop)
        self._tasks = list(self.start.tasks)
        self._accuracy = {report.task: dict(report.accuracy) for report in self._tasks}
        torch.manual_seed(run.config.seed * 1_000_003 + run.world.rank)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _enter_folder(self, stack: ExitStack, resume: Resume) -> FileGuard:
        """Locks the folder on rank 0, and returns the guard of this rank's files."""
        guard = UNLOCKED
        if self._leads:
            guard = stack.enter_context(own(self.folder.root, start_over=resume == "never"))
        self._world.barrier()
        return guard

    def _open_checkpoints(self, stack: ExitStack) -> Checkpoints | None:
        if not self._leads:
            return None
        checkpoints = Checkpoints(self.folder.checkpoints, self._run.config.run.keep_checkpoints, self.guard)
        stack.callback(checkpoints.wait)
        return checkpoints

    def _open_parity(self, stack: ExitStack) -> ParityProbe | None:
        run, config = self._run, self._run.config
        if config.probe.kind != "parity":
            return None
        parity = ParityProbe(
            int(run.encoder.num_features),  # type: ignore[arg-type]
            len(run.data.manifest.classes),
            run.data,
            run.loader_config,
            view=config.views.probe_view(),
            optim=config.optim,
            lr=config.probe_lr,
            amp_dtype=run.amp_dtype,
            world=run.world,
        )
        stack.callback(parity.close)
        return parity

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, decision: Decision, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint, and waits for it if the run stops. Raises Diverged if that is the decision."""
        state = self._whole(state)
        if decision is Decision.DIVERGED:
            raise Diverged(self.watch.diverged(step, self._save_failed(step, state)))
        if self._checkpoints:
            self._tell_failure(self._checkpoints)
            stall_s = self._checkpoints.save(step, state, wait=decision is Decision.STOP)
            self.reporter.log.event("checkpoint", step=step, stall_s=stall_s)
            self.reporter.log.sync()
        self.watch.saved()

    def _save_failed(self, step: int, state: dict[str, Any]) -> str:
        """Saves the state of a run that diverged and returns where it is."""
        if not self._checkpoints:
            return "rank 0's folder"
        try:
            return str(self._checkpoints.failed(step, state))
        except CheckpointError as error:
            return f"no file: {error}"

    def _tell_failure(self, checkpoints: Checkpoints) -> None:
        """Reports a checkpoint that could not be written. A full disk does not end the run: the next one may fit."""
        checkpoints.wait()
        failure = checkpoints.check()
        if failure:
            self.reporter.note(str(failure), warning=True)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {
            **random_state(self._world, self._run.device),
            "tasks": [asdict(report) for report in self._tasks],
            "strategy_name": self._run.strategy.name,
        }

    # ---- Probes and the end of a task --------------------------------------------------------------------------------

    def probe(self, step: int, index: int) -> None:
        """Probes the encoder and reports the accuracies."""
        run = self._run
        if self.parity is not None:
            result = self.parity.validate(run.encoder)
        else:
            result = probe(
                run.encoder,
                run.data,
                run.loader_config,
                view=run.config.views.probe_view(),
                amp_dtype=run.amp_dtype,
                world=run.world,
            )
        self._accuracy[index] = self.reporter.probe(step, index, result)

    def accuracy(self, index: int) -> dict[str, float]:
        """Returns the accuracies of a task's last probe, by name."""
        return self._accuracy.get(index, {})

    def end_task(self, report: TaskReport, state: dict[str, Any]) -> None:
        """Exports the encoder and writes the checkpoint of a finished task, which is kept."""
        if self._leads:
            path = self.folder.encoder(self._run.tasks[report.task])
            with self.guard.writing(path):
                self._run.export(path, report.task)
        self._tasks.append(report)
        state = self._whole(state)
        self.reporter.task(report)
        if self._checkpoints:
            self._tell_failure(self._checkpoints)
            stall_s = self._checkpoints.task_end(report.task, report.step, state)
            self.reporter.log.event("checkpoint", step=report.step, stall_s=stall_s)
            self.reporter.log.sync()
        self.watch.saved()

    # ---- Outcomes ----------------------------------------------------------------------------------------------------

    def stopped(self, step: int) -> Outcome:
        signal = self._world.agree(self._stop.requested)
        self.reporter.write_status("stopped")
        self.reporter.note(f"Stopped at step {step:,}; run the same command to resume.")
        return Outcome(folder=self.folder.root, status="stopped", signal=signal, tasks=tuple(self._tasks))

    def stopped_after(self, task: int, step: int, *, trained: bool) -> Outcome:
        """Ends a run whose tasks up to `task`, the last one that was asked for, are done.

        trained: whether they are done only now; otherwise there was nothing to train.
        """
        flag = f"--stop-after-task {task}"
        remedy = f"to continue, leave out {flag} or name a later task."
        self.reporter.write_status("stopped", message=f"Task {task} is done, and {flag} was given: {remedy}")
        done = f"Stopped at step {step:,}, after task {task}" if trained else f"Nothing to train: task {task} is done"
        self.reporter.note(f"{done}; {remedy}")
        return Outcome(folder=self.folder.root, status="stopped", tasks=tuple(self._tasks))

    def finished(self, step: int) -> Outcome:
        self.reporter.finish(step, self._tasks)
        return Outcome(folder=self.folder.root, status="finished", tasks=tuple(self._tasks))
