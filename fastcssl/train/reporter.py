"""Writes the log, the display and the status file of a run while it trains. Only rank 0 writes."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console

from fastcssl.config.config import plain
from fastcssl.errors import UserError
from fastcssl.evaluate.online_probe import ProbeResult
from fastcssl.runs.bottleneck import verdict
from fastcssl.runs.display import Display, RunHeader, TaskPlan
from fastcssl.runs.layout import RunFolder
from fastcssl.runs.log import EpochReport, ProbeReport, RunLog, StepReport, TaskReport, read_reports
from fastcssl.runs.ownership import UNLOCKED, FileGuard, FolderLost, RunFolderError
from fastcssl.runs.status import RunState, Status, write_status
from fastcssl.train.build import Run
from fastcssl.train.state import Position

_STATUS_SECONDS = 5.0


class Reporter:
    """Writes and shows reports. On ranks other than 0 every method does nothing."""

    def __init__(
        self,
        run: Run,
        *,
        data: Path,
        folder: RunFolder,
        start: Position | None,
        console: Console | None,
        guard: FileGuard = UNLOCKED,
    ) -> None:
        """`start`: the position of the checkpoint that the run resumes from, or None for a new run."""
        config = run.config
        self._run, self._folder, self._guard, self._leads = run, folder, guard, run.world.rank == 0
        self._epochs = [run.num_epochs(index) for index in range(len(run.tasks))]
        self._steps = [epochs * run.steps_per_epoch(index) for index, epochs in enumerate(self._epochs)]
        self._header = _header(run, data)
        self._position, self._resumes = start or Position(), start is not None
        self._at: StepReport | None = None
        self._started, self._began = time.time(), time.monotonic()
        self._last_status = self._began
        self._told_status = False
        self._stack = ExitStack()
        self.log = self._open_log(config.run.wandb)
        plans = [
            TaskPlan(name=run.task_name(i), num_epochs=epochs, steps_per_epoch=steps // epochs)
            for i, (epochs, steps) in enumerate(zip(self._epochs, self._steps, strict=True))
        ]
        self._display = Display(self._header, plans, step=self._position.step, console=console, quiet=not self._leads)

    def _open_log(self, wandb_project: str | None) -> RunLog:
        if not self._leads:
            return RunLog.silent()
        return RunLog(
            self._folder.root,
            resume_step=self._position.step if self._resumes else None,
            tensorboard=self._run.config.run.tensorboard,
            wandb=wandb_project is not None,
            wandb_project=wandb_project or "fastcssl",
            config=plain(self._run.config),
            guard=self._guard,
        )

    def __enter__(self) -> "Reporter":
        with ExitStack() as stack:
            stack.enter_context(self.log)
            stack.enter_context(self._display)
            self._stack = stack.pop_all()
        for probed in read_reports(self._folder.root, ProbeReport) if self._leads and self._resumes else ():
            self._display.probe(probed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            with suppress(UserError):  # the run ends with the first error
                self.write_status("failed", message=str(error) or kind.__name__)
        self._stack.__exit__(kind, error, trace)

    def note(self, text: str, *, warning: bool = False) -> None:
        self._display.note(text, warning=warning)

    def begin_task(self, index: int) -> None:
        self._display.task(index)
        self.write_status("running")

    def step(self, report: StepReport) -> None:
        self.log.write(report)
        self._display.step(report)
        self._at = report
        if time.monotonic() - self._last_status > _STATUS_SECONDS:
            self.write_status("running")

    def epoch(self, report: EpochReport) -> None:
        self.log.write(report)
        self._display.epoch_end(report)

    def probe(self, step: int, task: int, result: ProbeResult) -> dict[str, float]:
        """Reports a probe and returns its accuracies by name."""
        accuracy = {"linear": result.linear_top1}
        if result.knn_top1 is not None:
            accuracy = {"knn": result.knn_top1, **accuracy}
        report = ProbeReport(step=step, task=task, accuracy=accuracy)
        self.log.write(report)
        details: dict[str, Any] = asdict(result)
        self.log.event("probe", step=step, probe=details.pop("kind"), **details)
        self._display.probe(report)
        return accuracy

    def replaced(self, step: int, count: int, samples: dict[str, str]) -> None:
        """Reports images that could not be decoded: the number on all ranks, and the names of this rank's."""
        self.log.event("replaced", step=step, count=count, samples=samples)
        such_as = f", such as {next(iter(samples.values()))}" if samples else ""
        self.note(
            f"{count} stored {'images' if count > 1 else 'image'} could not be decoded{such_as}. Other images are "
            f"used instead. Run fastcssl-prep verify {self._run.data.folder}.",
            warning=True,
        )

    def task(self, report: TaskReport) -> None:
        self.log.write(report)
        self._display.task_end(report)

    def finish(self, step: int, tasks: Sequence[TaskReport]) -> None:
        # The time of all processes that trained the run: the last one may only have found that nothing is left.
        self._started = time.time() - sum(task.seconds for task in tasks)
        self.write_status("finished")
        if self._leads:
            found = verdict([task.stages for task in tasks], self._run.machine())
            folder = self._folder
            where = [
                (path.name.partition(".")[0], path)
                for path in (folder.encoders, folder.metrics, folder.config, folder.checkpoints)
            ]
            self._display.finish(tasks, where, found.sentence if found else "")
        self.log.event("finished", step=step)

    def write_status(self, state: RunState, message: str = "") -> None:
        if not self._leads:
            return
        self._last_status = time.monotonic()
        at, start = self._at, self._position
        task = at.task if at else min(start.task, len(self._steps) - 1)
        status = Status(
            state=state,
            title=str(self._header),
            task=task,
            num_tasks=len(self._steps),
            epoch=at.epoch if at else min(start.epoch, self._epochs[task] - 1),
            num_epochs=self._epochs[task],
            step=at.step if at else start.step,
            num_steps=sum(self._steps),
            seconds_left=self._display.seconds_left,
            message=message,
            started=self._started,
            seconds=time.monotonic() - self._began,
        )
        try:
            write_status(self._folder.root, status, self._guard)
        except FolderLost:
            raise
        except RunFolderError as error:
            # Only other processes read the status, so the run continues without it.
            if not self._told_status:
                self.note(str(error), warning=True)
            self._told_status = True


def _header(run: Run, data: Path) -> RunHeader:
    device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else f"CPU ({run.loader.name})"
    ranks = f" x {run.world.size}" if run.world.size > 1 else ""
    return RunHeader(
        recipe=run.config.recipe,
        method=run.method.name,
        strategy=run.strategy.name,
        data=str(data),
        device=device + ranks,
    )
