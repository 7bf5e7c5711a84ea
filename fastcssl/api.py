"""What the commands do, as functions: a verb of the command line and what it works on. `fastcssl` hands them on.

Plain verbs are packages here (`fastcssl.train` trains), so no name has two meanings. Nothing is printed unless a
console is given. Under torchrun every rank calls alike and rank 0 writes; alone, nothing need be connected. A user's
mistake is a `UserError`, or the error of what was opened (`dataprep.ManifestError`, `LoaderError`).
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

PATIENCE_S = 6 * 3600.0  # a rank may solve a regression for hours while the others wait


def train_run(
    recipe: Recipe,
    *,
    data: Path | str,
    out: Path | str,
    resume: Resume = "auto",
    start_from: str | None = None,
    console: Console | None = None,
) -> Outcome:
    """Trains task after task on `recipe.config.run.device`; called again, it goes on from the last checkpoint.

    data: a prepared folder, or one of its manifests. out: the run's folder. resume: "never" sets an older run aside.
    start_from: "RUN@k", another run's state after its task k.
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
    """`train_run` for each seed, in OUT/seed5 and so on; a signal ends the rest, too.

    start_from: "RUN@k", where RUN holds the same seeds.
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
    """What a run will take: steps, learning rate, memory and disk in bytes and, if measured, seconds on this machine.

    out: where it would be written. num_ranks: processes that would share it; this one stands for all of them.
    """
    with connected(recipe.config.run.device) as (_, device):
        return forecast(recipe.config, Path(data), num_ranks, device, measure, out=Path(out))


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
    """Probes every checkpoint of the runs, side by side from one decode, and writes RUN/evaluations/*.json.

    runs: folders of `train_run`, or of `train_seeds`, or encoder files. request: probes, scopes and their settings; by
    default the paper's linear probe over all classes. references: runs of one task alone, for plasticity.
    architecture, family, out: of encoder files that do not say so, and where their results go. num_threads: of the
    loader, by default one a core. checkpoint_minutes: how often a long probe is saved. command: noted in the results.
    What is known already is read, not computed. A signal is raised as `EvaluationInterrupted`, all kept.
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
