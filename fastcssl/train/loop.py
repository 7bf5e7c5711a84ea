"""The training loop: for each task, for each epoch, for each batch. Read it top to bottom.

After any interruption, call `train` again with the same arguments: it continues from the last checkpoint.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from fastcssl.config.config import Resume
from fastcssl.config.recipes import Recipe
from fastcssl.data.loader import Batch
from fastcssl.data.prepared import Selection
from fastcssl.distributed.world import World
from fastcssl.learn.methods import Inputs
from fastcssl.learn.optim import build_optimizer, set_lr
from fastcssl.learn.step import Step, optimise, wrapped_for_ranks
from fastcssl.train.build import Run
from fastcssl.train.meter import Meter
from fastcssl.train.profile import Profile
from fastcssl.train.session import Outcome, Session
from fastcssl.train.start import restore
from fastcssl.train.state import Position, TaskState
from fastcssl.train.watch import Decision


def train(
    recipe: Recipe,
    *,
    data: Path,
    out: Path,
    resume: Resume = "auto",
    start_from: str | None = None,
    world: World | None = None,
    device: torch.device | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains all tasks and returns how training ended. Every rank calls it.

    start_from: "RUN@k", to start with the state of another run after its task k.
    """
    recipe = recipe.completed(data)
    with ExitStack() as stack:
        run = Run(recipe.config, data, world or World(), device or torch.device("cpu"))
        stack.callback(run.loader.close)
        session = stack.enter_context(
            Session(run, recipe, data=data, out=out, resume=resume, start_from=start_from, console=console)
        )
        profile = stack.enter_context(Profile(run.config.run.profile, run, session.folder.profile))
        return _train(run, session, profile)


def _train(run: Run, session: Session, profile: Profile) -> Outcome:
    config, at = run.config, session.start.position
    restore(run, session.start)
    step, last = at.step, config.run.stop_after_task
    if last is not None and last < at.task + at.ended < len(run.tasks):
        return session.stopped_after(last, step, trained=False)
    for index in range(at.task + at.ended, len(run.tasks)):
        task = _begin_task(run, session, index, step)
        meter = task.meter
        for epoch in range(task.start.epoch, meter.num_epochs):
            meter.begin_epoch(epoch, task.first_batch(epoch))
            for batch in _batches(run, task, epoch):
                terms = train_step(run, task, batch)
                profile.step()
                if meter.report_is_due:
                    session.reporter.step(meter.step_report())
                decision = session.watch.decide(meter.step, terms, last=meter.epoch_is_over)
                if decision is not Decision.CONTINUE:
                    with meter.paused("checkpoint"):
                        session.save(decision, meter.step, run.state(meter.position()) | task.state())
                    if decision is Decision.STOP:
                        return session.stopped(meter.step)
            meter.follow()
            _tell_replaced(run, session, task)
            session.reporter.epoch(meter.epoch_report())
            if config.probe.due(epoch, meter.num_epochs):
                with meter.paused("probe"):
                    session.probe(meter.step, index)
        step = meter.step
        with meter.paused("strategy"):
            run.strategy.end_task(run.task(index), run.method)
        report = meter.task_report(session.accuracy(index))
        session.end_task(report, run.state(meter.position(ended=True)) | task.state())
        if index == last and index < len(run.tasks) - 1:
            return session.stopped_after(index, step, trained=True)
    return session.finished(step)


def train_step(run: Run, task: TaskState, batch: Batch) -> dict[str, Tensor]:
    """Makes one step: loss, gradients, optimiser, then the slow copies and banks. Returns the loss terms."""
    meter = task.meter
    meter.begin_step()
    set_lr(task.optimizer, meter.lr)
    terms = optimise(
        task.module,
        Inputs(views=batch.views, label=batch.label, id=batch.id),
        task.optimizer,
        task.scaler,
        accumulate=run.config.accumulate,
        amp_dtype=run.amp_dtype,
    )
    run.method.after_step(meter.task_step, meter.num_steps)
    run.strategy.after_step(run.method)
    if task.parity and task.labelled is not None:
        with meter.probing():
            task.parity.step(run.encoder, next(task.labelled), epoch=meter.epoch_of_task, num_epochs=meter.num_epochs)
    meter.end_step(terms)
    return terms


def _begin_task(run: Run, session: Session, index: int, step: int) -> TaskState:
    """Builds the state of a task, and loads it from the checkpoint if the run resumes inside this task."""
    config, inside = run.config, session.start.inside(index)
    task = run.task(index)
    session.reporter.begin_task(index)
    if not inside:
        run.strategy.begin_task(task, run.method)
        if index > 0:
            run.renew_banks(task)
    module = Step(run.method, run.strategy)
    module.train()
    if config.compile != "off":
        torch.compiler.reset()  # it compiles at most eight modules of one class, and every task has one
        module.compile(backend=config.compile)
    stream = run.loader.open(Selection(tasks=task.tasks))
    start = session.start.position if inside else Position(task=index, step=step)
    state = TaskState(
        index=index,
        start=start,
        module=wrapped_for_ranks(module, run.world, run.device),
        optimizer=build_optimizer(module.groups(), config.optim),
        scaler=torch.amp.GradScaler(run.device.type, enabled=run.amp_dtype is torch.float16),
        stream=stream,
        meter=Meter(run, index, stream, start),
        parity=session.parity,
    )
    if inside and session.start.state is not None:
        state.load(session.start.state)
    elif state.parity:
        state.parity.begin_task()
    state.meter.follow()
    return state


def _batches(run: Run, task: TaskState, epoch: int) -> Iterator[Batch]:
    """Returns the batches of an epoch. For the random draws, epochs are counted over all tasks."""
    number = run.epochs_before(task.index) + epoch
    task.labelled = task.parity.batches(number) if task.parity else None
    return task.stream.epoch(number)


def _tell_replaced(run: Run, session: Session, task: TaskState) -> None:
    """Reports the samples of this task that could not be decoded, if an epoch has met more of them."""
    quarantine = task.stream.quarantine
    count = sum(int(number) for number in run.world.collect(torch.tensor([len(quarantine)])))
    if count > task.num_replaced:
        session.reporter.replaced(task.meter.step, count, {str(sample): why for sample, why in quarantine.items()})
    task.num_replaced = count
