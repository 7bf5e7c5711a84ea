"""The training loop: for each task, for each epoch, for each batch. Read it top to bottom.

`train` may be called again with the same arguments after any interruption and goes on from the last checkpoint.
"""

import time
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from fastcssl.config.config import Resume
from fastcssl.config.recipes import Recipe
from fastcssl.data.loader import Stream
from fastcssl.data.prepared import Selection
from fastcssl.distributed.world import World
from fastcssl.errors import Diverged
from fastcssl.learn.memory import fill
from fastcssl.learn.methods import Inputs
from fastcssl.learn.optim import build_optimizer, lr_at, lr_peak, set_lr
from fastcssl.learn.step import Step, across_ranks, optimise
from fastcssl.learn.strategies import Task
from fastcssl.runs.log import EpochReport, StepReport, TaskReport
from fastcssl.runs.timing import DeviceIdle, StageTimes
from fastcssl.train.build import Position, Run, Underway
from fastcssl.train.session import DIVERGED, GO_ON, STOP, Outcome, Session

_PREFILL_EPOCH = 1 << 20  # an epoch number that no training epoch has: its views are drawn anew


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
    """Every rank calls it. `start_from`: "RUN@k", another run's state after its task k."""
    with ExitStack() as stack:
        run = Run(recipe.config, data, world or World(), device or torch.device("cpu"))
        stack.callback(run.loader.close)
        session = stack.enter_context(
            Session(run, recipe, data=data, out=out, resume=resume, start_from=start_from, console=console)
        )
        return _train(run, session)


def _train(run: Run, session: Session) -> Outcome:
    config, method, strategy = run.config, run.method, run.strategy
    at, state = session.position, session.state
    if state is not None:
        # Shapes first, then values; the frozen copy made here is replaced by the one of the checkpoint.
        strategy.begin_task(run.task(at.task), method)
        session.restore(run)
    done = session.tasks_done
    step = at.step
    for index in range(at.task + at.ended, len(run.tasks)):
        inside = state is not None and index == at.task and not at.ended
        task = run.task(index)
        session.begin_task(index)
        if not inside:
            strategy.begin_task(task, method)
            if index > 0:
                _renew_banks(run, task)
        module = Step(method, strategy)
        module.train()
        if config.compile != "off":
            torch.compiler.reset()  # it gives up after eight modules of one class, and this is a task's
            module.compile(backend=config.compile)
        wrapped = across_ranks(module, run.world, run.device)
        optimizer = build_optimizer(module.groups(), config.optim)
        scaler = torch.amp.GradScaler(run.device.type, enabled=run.amp_dtype is torch.float16)
        stream = run.loader.open(Selection(tasks=task.tasks))
        idle, parity = DeviceIdle(run.device), session.parity_probe(run)
        now_at = Underway(optimizer=optimizer, scaler=scaler, stream=stream, parity=parity)
        rates, stages, sums = now_at.rates, now_at.stages, now_at.sums
        if inside and state is not None:
            now_at.load(state)
        elif parity:
            parity.begin_task()
        _follow(stages, run, stream, idle)

        num_steps, num_replaced = config.epochs * len(stream), 0
        peak = lr_peak(config.optim, config.batch_size)
        for epoch in range(at.epoch if inside else 0, config.epochs):
            first = at.batch if inside and epoch == at.epoch else 0
            if not first:
                sums.clear()
            labelled = parity.batches(index * config.epochs + epoch) if parity else None
            began = epoch_began = time.perf_counter()
            waited, augmented = stream.wait_seconds, stream.augment_seconds
            for number, batch in enumerate(stream.epoch(index * config.epochs + epoch), start=first):
                idle.begin()
                task_step = epoch * len(stream) + number
                lr = lr_at(config.optim, peak, task_step / len(stream), config.epochs)
                set_lr(optimizer, lr)
                terms = optimise(
                    wrapped,
                    Inputs(views=batch.views, label=batch.label, id=batch.id),
                    optimizer,
                    scaler,
                    accumulate=config.accumulate,
                    amp_dtype=run.amp_dtype,
                )
                method.after_step(task_step, num_steps)
                strategy.after_step(method)
                probed = time.perf_counter()
                if parity and labelled is not None:
                    parity.step(run.encoder, next(labelled), epoch=task_step / len(stream), num_epochs=config.epochs)
                probe_s = time.perf_counter() - probed
                idle.end()
                step += 1
                for name, term in terms.items():
                    sums[name] = sums.get(name, torch.zeros((), device=run.device, dtype=torch.float64)) + term
                now = time.perf_counter()
                wait_s, augment_s = stream.wait_seconds - waited, stream.augment_seconds - augmented
                rates.step(config.batch_size, wait_s, now - began)
                stages.step(now - began, {"wait": wait_s, "augment": augment_s, "probe": probe_s})
                waited, augmented, began = stream.wait_seconds, stream.augment_seconds, now

                session.watch(step, terms)
                last = number == len(stream) - 1
                if step % config.run.log_every == 0 or last:
                    mean = session.across_ranks(terms)
                    session.report(
                        StepReport(
                            step=step,
                            task=index,
                            epoch=epoch,
                            batch=number,
                            lr=lr,
                            loss=sum(mean.values()),
                            terms=mean,
                            images_per_s=rates.images_per_s,
                            data_wait_share=rates.wait_share,
                            device_idle_share=idle.share,
                        )
                    )
                what = session.agreed(step, last=last)
                if what != GO_ON:
                    position = Position(task=index, epoch=epoch, batch=number + 1, step=step)
                    current = run.state(position) | now_at.state()
                    if what == DIVERGED:
                        raise Diverged(session.diverged(step, current))
                    with stages.timed("checkpoint"):
                        session.save(step, current, wait=what == STOP)
                    if what == STOP:
                        return session.stopped(step)
                    idle.pause()
                    began = time.perf_counter()
            _follow(stages, run, stream, idle)
            num_replaced = _tell_replaced(run, session, step, stream, num_replaced)
            mean = session.across_ranks({name: value / len(stream) for name, value in sums.items()})
            session.report(
                EpochReport(
                    step=step,
                    task=index,
                    epoch=epoch,
                    lr=lr_at(config.optim, peak, epoch, config.epochs),
                    loss=sum(mean.values()),
                    terms=mean,
                    images_per_s=rates.mean_images_per_s,
                    data_wait_share=rates.mean_wait_share,
                    seconds=time.perf_counter() - epoch_began,
                    stages=stages.state(),
                )
            )
            if config.probe.due(epoch, config.epochs):
                with stages.timed("probe"):
                    session.probe(run, step, index, parity)
                idle.pause()
        with stages.timed("strategy"):
            strategy.end_task(task, method)
        session.export(run, index)
        done.append(
            TaskReport(
                step=step,
                task=index,
                name=run.task_name(index),
                num_images=stream.num_samples,
                num_epochs=config.epochs,
                loss=sum(mean.values()),
                images_per_s=rates.mean_images_per_s,
                data_wait_share=rates.mean_wait_share,
                seconds=rates.seconds,
                accuracy=session.accuracy(index),
                stages=stages.state(),
            )
        )
        ended = Position(task=index, epoch=config.epochs, step=step, ended=True)
        session.end_task(done[-1], run.state(ended) | now_at.state())
        if index == config.run.stop_after_task and index < len(run.tasks) - 1:
            return session.stopped(step)
    return session.finished(step)


def _follow(stages: StageTimes, run: Run, stream: Stream, idle: DeviceIdle) -> None:
    """Reads the clocks that run beside the loop."""
    stages.follow("loader", run.loader.stage_seconds())
    if run.device.type == "cuda":
        stages.follow("device", {"idle": idle.seconds, "transfer": 0.0, "augment": 0.0, **stream.device_seconds})


def _tell_replaced(run: Run, session: Session, step: int, stream: Stream, told: int) -> int:
    """After an epoch: the task's samples that could not be decoded, on all ranks; those met here by name."""
    count = sum(int(number) for number in run.world.collect(torch.tensor([len(stream.quarantine)])))
    if count > told:
        samples = {str(sample): why for sample, why in stream.quarantine.items()}
        session.log.event("replaced", step=step, count=count, samples=samples)
        such_as = f", such as {next(iter(samples.values()))}" if samples else ""
        session.display.note(
            f"{count} stored {'images' if count > 1 else 'image'} could not be decoded, and others took their "
            f"place{such_as}. Run fastcssl-prep verify {run.data.folder}.",
            warning=True,
        )
    return count


def _renew_banks(run: Run, task: Task) -> None:
    """At the start of a task: what the banks hold of the last one is kept, dropped, or replaced by the frozen model's.

    With prefill both models' banks are filled from the network as the last task left it, which both models then are.
    """
    banks = [*run.method.banks, *run.strategy.banks]
    how = getattr(getattr(run.config.method, "bank", None), "at_task_start", "keep")
    if not banks or how == "keep":
        return
    for bank in banks:
        bank.reset()
    if how == "prefill":
        for bank in banks:
            bank.filled.zero_()
        stream: Stream = run.loader.open(Selection(tasks=task.tasks))
        network = run.method.online
        with torch.no_grad(), torch.autocast(run.device.type, run.amp_dtype, enabled=run.amp_dtype is not None):
            network.eval()
            batches = stream.epoch(_PREFILL_EPOCH + task.index)
            fill(banks, lambda view: network(view)[1], batches, run.world.gather_keys)
            network.train()
