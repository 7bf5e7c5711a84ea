"""Everything around the loop that is not training: the run's folder, checkpoints, stopping, what is shown and written.

The loop calls it at fixed points. All ranks hold one and call it alike; only rank 0 writes and speaks.
"""

import json
import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from dataprep.manifest import write_atomically
from fastcssl.config.config import Resume, plain
from fastcssl.config.recipes import Recipe
from fastcssl.errors import UserError
from fastcssl.evaluate.online_probe import ParityProbe, probe
from fastcssl.learn.encoder_file import save_encoder
from fastcssl.runs.bottleneck import verdict
from fastcssl.runs.checkpoint import (
    CheckpointError,
    Checkpoints,
    Found,
    latest,
    load,
    refuse_changed,
)
from fastcssl.runs.display import Display, RunHeader, TaskPlan
from fastcssl.runs.interrupt import Stop
from fastcssl.runs.layout import ENCODERS, adopt_encoders, locked, set_aside, shared, start_of
from fastcssl.runs.log import EpochReport, ProbeReport, RunLog, StepReport, TaskReport, read_reports
from fastcssl.runs.status import State, Status, write_status
from fastcssl.train.build import Position, Run
from fastcssl.train.startup_warnings import cautions

# What the ranks agree on between two steps; the largest wins.
GO_ON, SAVE, STOP, DIVERGED = range(4)
_STATUS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How training ended: the run's folder, and a report of each task that it finished."""

    folder: Path
    status: Literal["finished", "stopped"]
    signal: int = 0  # that stopped it, or 0
    tasks: tuple[TaskReport, ...] = ()


class Session:
    """`position` and `state`: where to go on, from a checkpoint or the beginning (state is None)."""

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
        self._run, self._recipe, self._data, self.out = run, recipe, data, out
        self._config, self._world = run.config, run.world
        self._leads = run.world.rank == 0
        self._resume, self._start_from, self._console = resume, start_from, console
        self._stack = ExitStack()
        self.position = Position()
        self.state: dict[str, Any] | None = None
        self.tasks_done: list[TaskReport] = []
        self._recent: list[tuple[int, dict[str, Tensor]]] = []
        self._bad: tuple[int, dict[str, float]] | None = None
        self._accuracy: dict[int, dict[str, float]] = {}
        # Asking a GPU for a value stops it; once every few steps is enough to notice a loss that is not finite.
        self._check_every = 1 if run.device.type == "cpu" else self._config.run.log_every
        self._last_save = self._last_status = time.monotonic()
        self._started = time.time()

    # ---- Beginning and end -------------------------------------------------------------------------------------------

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._write_status("failed", message=str(error) or kind.__name__)
        self._stack.__exit__(kind, error, trace)

    def _open(self, stack: ExitStack) -> None:
        config, run = self._config, self._run
        self.stop = stack.enter_context(Stop())  # the first to enter: a checkpoint underway is waited for inside it
        if self._leads:
            try:
                if self._resume == "never":
                    set_aside(self.out)
                self.out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.out))
            except OSError as error:
                raise UserError(f"Cannot write into {self.out} ({error.strerror}). Choose another --out.") from None
        self._world.barrier()
        warnings = self._find_state()
        self.checkpoints = Checkpoints(self.out / "checkpoints", config.run.keep_checkpoints) if self._leads else None
        if self.checkpoints:
            stack.callback(self.checkpoints.wait)
            described = run.described(self._recipe, self._data)
            write_atomically(self.out / "config.json", json.dumps(described, indent=1).encode())
        self.log = stack.enter_context(
            RunLog(
                self.out,
                resume_step=self.position.step if self.state is not None else None,
                tensorboard=config.run.tensorboard,
                wandb=config.run.wandb is not None,
                wandb_project=config.run.wandb or "fastcssl",
                config=plain(config),
            )
            if self._leads
            else RunLog.silent()
        )
        self._steps = [config.epochs * run.steps_per_epoch(index) for index in range(len(run.tasks))]
        method, strategy = run.method.name, run.strategy.name
        device = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else f"CPU ({run.loader.name})"
        ranks = f" x {run.world.size}" if run.world.size > 1 else ""
        self._header = RunHeader(
            recipe=config.recipe, method=method, strategy=strategy, data=str(self._data), device=device + ranks
        )
        plans = [
            TaskPlan(name=run.task_name(i), num_epochs=config.epochs, steps_per_epoch=steps // config.epochs)
            for i, steps in enumerate(self._steps)
        ]
        self.display = stack.enter_context(
            Display(self._header, plans, step=self.position.step, console=self._console, quiet=not self._leads)
        )
        for text in (*warnings, *cautions(run, self._recipe.sources)):
            self.display.note(text, warning=True)
        for probed in read_reports(self.out, ProbeReport) if self._leads and self.state is not None else ():
            self.display.probe(probed)
        torch.manual_seed(config.seed * 1_000_003 + run.world.rank)

    def _find_state(self) -> list[str]:
        """The newest whole checkpoint of this run; failing that, the other run's state that it starts from."""
        own = self.out / "checkpoints"
        found: Found | None = latest(own) if self._leads else None
        warnings = list(found.warnings) if found else []
        name = self._world.share(found.path.name if found else "")
        if name:
            path = own / name
            self.state = found.state if found else load(path)
            refuse_changed(self.state["config"], self._config.identity(), path)
        elif self._start_from is not None:
            path = start_of(self._start_from)
            self.state = load(path)
            refuse_changed(shared(self.state["config"]), shared(self._config.identity()), path)
        else:
            return warnings
        if self.state["manifest"] != self._run.manifest_sha256:
            raise UserError(
                f"{self._data} is not the data that {path} was trained on: its manifest has changed. Give the same "
                "data, or start over with another --out."
            )
        if not name and self._leads:
            adopt_encoders(path, self.out)
        self.position = Position(**self.state["position"])
        self.tasks_done = [TaskReport(**report) for report in self.state["tasks"]]
        self._accuracy = {report.task: dict(report.accuracy) for report in self.tasks_done}
        return warnings

    def restore(self, run: Run) -> None:
        """Values from the state into what the loop has built."""
        assert self.state is not None
        run.load_method(self.state)
        same = self.state["config"]["strategy"] == self._config.identity()["strategy"]
        if same and self.state["strategy_name"] == run.strategy.name:
            run.load_strategy(self.state)
        else:
            # From another strategy's run: ours learns from the finished task what it needs to know.
            task = run.task(self.position.task)
            run.strategy.begin_task(task, run.method)
            run.strategy.end_task(task, run.method)
        ranks = self.state["rng"]
        if self._world.rank < len(ranks):
            torch.set_rng_state(ranks[self._world.rank])

    # ---- During a task -----------------------------------------------------------------------------------------------

    def begin_task(self, index: int) -> None:
        self.display.task(index)
        self._write_status("running")

    def watch(self, step: int, terms: dict[str, Tensor]) -> None:
        self._recent.append((step, terms))

    def across_ranks(self, terms: dict[str, Tensor]) -> dict[str, float]:
        """Their means over ranks, on the host."""
        if not terms:
            return {}
        stacked = torch.stack([term.detach().double() for term in terms.values()])
        mean = replace(self._world, scope="global").total(stacked) / self._world.size
        return dict(zip(terms, mean.tolist(), strict=True))

    def report(self, report: StepReport | EpochReport) -> None:
        if isinstance(report, StepReport):
            self.log.write(report)
            self.display.step(report)
            self._at = report
            if time.monotonic() - self._last_status > _STATUS_SECONDS:
                self._write_status("running")
        else:
            self.log.write(report)
            self.display.epoch_end(report)

    def agreed(self, step: int, *, last: bool) -> int:
        """What all ranks do now. Asked after every step; they speak to each other only at the steps that check."""
        if step % self._check_every and not last:
            return GO_ON
        for number, terms in self._recent:
            values = torch.stack(list(terms.values())).tolist()
            if not all(map(math.isfinite, values)):
                self._bad = (number, dict(zip(terms, values, strict=True)))
                break
        self._recent.clear()
        due = self._leads and time.monotonic() - self._last_save > 60 * self._config.run.checkpoint_minutes
        code = DIVERGED if self._bad else STOP if self.stop.requested else SAVE if due else GO_ON
        return self._world.agree(code)

    def save(self, step: int, state: dict[str, Any], *, wait: bool) -> None:
        state = self._whole(state)
        if self.checkpoints:
            began = time.perf_counter()
            self.checkpoints.wait()
            self._tell_failure()
            self.checkpoints.save(step, state, wait=wait)
            self.log.event("checkpoint", step=step, stall_s=time.perf_counter() - began)
            self.log.sync()
        self._last_save = time.monotonic()

    def _tell_failure(self) -> None:
        """A full disk does not end the run: the checkpoints before it are whole, and the next may fit again."""
        failure = self.checkpoints.check() if self.checkpoints else None
        if failure:
            self.display.note(str(failure), warning=True)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        generators = self._world.collect(torch.get_rng_state())
        return state | {
            "rng": generators,
            "tasks": [asdict(report) for report in self.tasks_done],
            "strategy_name": self._run.strategy.name,
        }

    def diverged(self, step: int, state: dict[str, Any]) -> str:
        state = self._whole(state)
        number, terms = self._bad or (step, {})
        where = "rank 0's folder"
        if self.checkpoints:
            try:
                where = str(self.checkpoints.failed(step, state))
            except CheckpointError as error:
                where = f"no file: {error}"
        listed = ", ".join(f"{name} {value:g}" for name, value in terms.items()) or "on another rank"
        return (
            f"The loss is not finite at step {number} ({listed}). The state is in {where}, to look into; the last "
            "checkpoint is whole. Try a smaller --optim.lr, a longer warm-up, or --precision fp32, in another --out."
        )

    # ---- Probes and the end of a task --------------------------------------------------------------------------------

    def parity_probe(self, run: Run) -> ParityProbe | None:
        if self._config.probe.kind != "parity":
            return None
        if not hasattr(self, "_parity"):
            self._parity = ParityProbe(
                int(run.encoder.num_features),  # type: ignore[arg-type]
                len(run.data.manifest.classes),
                run.data,
                run.loader_config,
                view=self._config.views.probe_view(),
                optim=self._config.optim,
                lr=self._config.probe_lr,
                amp_dtype=run.amp_dtype,
                world=run.world,
            )
            self._stack.callback(self._parity.close)
        return self._parity

    def probe(self, run: Run, step: int, index: int, parity: ParityProbe | None) -> None:
        if parity is not None:
            result = parity.validate(run.encoder)
        else:
            result = probe(
                run.encoder,
                run.data,
                run.loader_config,
                view=self._config.views.probe_view(),
                amp_dtype=run.amp_dtype,
                world=run.world,
            )
        accuracy = {"linear": result.linear_top1}
        if result.knn_top1 is not None:
            accuracy = {"knn": result.knn_top1, **accuracy}
        self._accuracy[index] = accuracy
        report = ProbeReport(step=step, task=index, accuracy=accuracy)
        self.log.write(report)
        details = asdict(result)
        self.log.event("probe", step=step, probe=details.pop("kind"), **details)
        self.display.probe(report)

    def accuracy(self, index: int) -> dict[str, float]:
        return self._accuracy.get(index, {})

    def export(self, run: Run, index: int) -> None:
        """The encoder as the task leaves it, for anyone."""
        if not self._leads:
            return
        config, view = self._config, self._config.views.probe_view()[0]
        folder = self.out / ENCODERS
        folder.mkdir(exist_ok=True)
        numbers = run.tasks[index]
        name = f"task{numbers[0]}" if len(numbers) == 1 else "joint"
        metadata = {
            "recipe": config.recipe,
            "method": run.method.name,
            "strategy": run.strategy.name,
            "tasks": json.dumps(list(numbers)),
            "seed": str(config.seed),
            "mean": json.dumps(view.mean),
            "std": json.dumps(view.std),
            "size_px": str(view.size_px),
            "manifest_sha256": run.manifest_sha256,
        }
        save_encoder(folder / f"{name}.safetensors", run.encoder, config.encoder, metadata)

    def end_task(self, report: TaskReport, state: dict[str, Any]) -> None:
        state = self._whole(state)
        self.log.write(report)
        self.display.task_end(report)
        if self.checkpoints:
            self.checkpoints.wait()
            self._tell_failure()
            stall_seconds = self.checkpoints.task_end(report.task, report.step, state)
            self.log.event("checkpoint", step=report.step, stall_s=stall_seconds)
            self.log.sync()
        self._last_save = time.monotonic()

    # ---- Outcomes ----------------------------------------------------------------------------------------------------

    def stopped(self, step: int) -> Outcome:
        signal = self._world.agree(self.stop.requested)
        self._write_status("stopped")
        self.display.note(f"Stopped at step {step:,}; run the same command to go on.")
        return Outcome(folder=self.out, status="stopped", signal=signal, tasks=tuple(self.tasks_done))

    def finished(self, step: int) -> Outcome:
        self._write_status("finished")
        if self._leads:
            names = (ENCODERS, "metrics.jsonl", "config.json", "checkpoints")
            found = verdict([task.stages for task in self.tasks_done], self._run.machine())
            where = [(name.partition(".")[0], self.out / name) for name in names]
            self.display.finish(self.tasks_done, where, found.sentence if found else "")
        self.log.event("finished", step=step)
        return Outcome(folder=self.out, status="finished", tasks=tuple(self.tasks_done))

    def _write_status(self, state: State, message: str = "") -> None:
        if not self._leads or not hasattr(self, "_header"):
            return
        self._last_status = time.monotonic()
        at: StepReport | None = getattr(self, "_at", None)
        write_status(
            self.out,
            Status(
                state=state,
                title=str(self._header),
                task=at.task if at else min(self.position.task, len(self._steps) - 1),
                num_tasks=len(self._steps),
                epoch=at.epoch if at else self.position.epoch,
                num_epochs=self._config.epochs,
                step=at.step if at else self.position.step,
                num_steps=sum(self._steps),
                seconds_left=self.display.seconds_left,
                message=message,
                started=self._started,
            ),
        )
