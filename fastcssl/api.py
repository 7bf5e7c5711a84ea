"""The commands as Python functions. The package `fastcssl` exports them.

A function is named after a command and what it works on: `train_run`, because `fastcssl.train` is a package. Nothing is
printed unless a console is given. Under torchrun, every rank makes the same call and rank 0 writes; a single process
needs no setup. A mistake that the user can correct raises a `UserError`, or the error of the file that was opened
(`dataprep.ManifestError`, `LoaderError`).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import fastcssl.train.loop as loop
from fastcssl.config.config import Resume
from fastcssl.config.recipes import Recipe
from fastcssl.data.views import Family
from fastcssl.distributed.world import DeviceKind, connected
from fastcssl.evaluate.evaluate import evaluate
from fastcssl.evaluate.options import Evaluated, ProbeMachine, Progress, Request
from fastcssl.evaluate.scopes import check_scope
from fastcssl.evaluate.targets import open_references, open_targets
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.precision import Precision
from fastcssl.runs.layout import Folders, folders_of
from fastcssl.train.forecast import Forecast, forecast
from fastcssl.train.session import Outcome

PATIENCE_S = 6 * 3600.0  # a rank may fit a regression for hours while the others wait


def train_run(
    recipe: Recipe,
    *,
    data: Path | str,
    out: Path | str,
    resume: Resume = "auto",
    start_from: str | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains all tasks on `recipe.config.run.device` and returns the outcome. Called again, it resumes.

    data: a prepared folder, or one of its manifests. out: the run's folder. resume: "never" moves an older run aside
    and starts over. start_from: "RUN@k", to start with the state of another run after its task k. console: where
    progress is shown; by default nowhere.
    """
    with connected(recipe.config.run.device) as (world, device):
        return loop.train(
            recipe,
            data=Path(data),
            out=Path(out),
            resume=resume,
            start_from=start_from,
            world=world,
            device=device,
            console=console or Console(quiet=True),
        )


def train_seeds(
    recipe: Recipe,
    seeds: Sequence[int],
    *,
    data: Path | str,
    out: Path | str,
    resume: Resume = "auto",
    start_from: str | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Calls `train_run` once per seed, in OUT/seed5 etc., and returns the outcomes. A signal ends all of it.

    start_from: "RUN@k", where RUN is a folder with the same seeds.
    """
    outcomes: list[Outcome] = []
    with connected(recipe.config.run.device):
        for number, seed in enumerate(seeds, start=1):
            if console is not None:
                console.rule(f"seed {seed}, {number} of {len(seeds)}", align="left", style="dim")
            outcome = train_run(
                recipe.changed_to(dataclasses.replace(recipe.config, seed=seed)),
                data=data,
                out=Path(out) / f"seed{seed}",
                resume=resume,
                start_from=_of_seed(start_from, seed),
                console=console,
            )
            outcomes.append(outcome)
            if outcome.signal:
                break
    return outcomes


def _of_seed(start_from: str | None, seed: int) -> str | None:
    if start_from is None or "@" not in start_from:
        return start_from
    run, _, task = start_from.rpartition("@")
    return f"{run}/seed{seed}@{task}"


def forecast_run(
    recipe: Recipe, *, data: Path | str, out: Path | str = ".", num_ranks: int = 1, measure: bool = True
) -> Forecast:
    """Returns an estimate of a run: steps, learning rate, memory and disk in bytes, and seconds on this machine.

    out: where the run would be written. num_ranks: the number of processes that would train it; only this one is
    measured. measure: False skips the measurement, and leaves the seconds out.
    """
    with connected(recipe.config.run.device) as (_, device):
        config = recipe.completed(Path(data)).config
        return forecast(config, Path(data), num_ranks, device, measure, out=Path(out))


def evaluate_runs(
    runs: Folders,
    request: Request | None = None,
    *,
    references: Folders = (),
    architecture: EncoderConfig | None = None,
    family: Family = "imagenet",
    out: Path | str | None = None,
    device: DeviceKind = "auto",
    precision: Precision = "auto",
    loader: str = "auto",
    num_threads: int | None = None,
    checkpoint_minutes: float = 5.0,
    command: str = "",
    progress: Progress | None = None,
) -> list[Evaluated]:
    """Probes every checkpoint of the runs, writes RUN/evaluations/*.json and returns the results.

    All checkpoints share one pass over the images. Results that already exist are read, not computed again. A signal
    raises `EvaluationInterrupted`; what was computed so far is kept.

    runs: folders of `train_run` or `train_seeds`, or encoder files. request: probes, scopes and their settings; by
    default the paper's linear probe over all classes. references: runs of a single task, for plasticity. architecture,
    family: for encoder files that do not record them. out: the folder for the results of encoder files. num_threads:
    threads of the loader, by default one per core. checkpoint_minutes: minutes between saves of a long probe. command:
    recorded in the results.
    """
    request = request or Request()
    for scope in request.scopes:
        check_scope(scope)
    targets = open_targets(
        folders_of(runs),
        architecture=architecture,
        family=family,
        size_px=request.size_px,
        out=None if out is None else Path(out),
    )
    others = open_references(folders_of(references))
    with connected(device, timeout_s=PATIENCE_S) as (world, where):
        machine = ProbeMachine(
            world=world,
            device=where,
            precision=precision,
            loader=loader,
            num_threads=num_threads,
            checkpoint_minutes=checkpoint_minutes,
            command=command,
        )
        return evaluate(targets, request, machine, references=others, progress=progress)
