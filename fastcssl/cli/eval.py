"""fastcssl-eval RUN [RUN...]: measures what the encoders of runs have learnt. See --help."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from dataprep import help
from dataprep.help import Flag
from dataprep.manifest import write_atomically
from fastcssl.cli.exit_codes import ExitCode, after_signal, explained, run_command, together
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.evaluate.options import Evaluated

PROG = "fastcssl-eval"
ProbeName = Literal["linear", "linear-cached", "knn"]
_LINEAR, _OTHERS = "linear probe", "other probes"
_FILES, _PROCESS = "encoder files without this information", "this process"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Probes every checkpoint of the given runs and writes the accuracies to RUN/evaluations/*.json.

    All checkpoints share one pass over the images. Results that already exist are shown, not computed again. If a
    setting is given several values, every combination is probed.
    """

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        Flag(
            "a folder written by fastcssl-train, a folder of several seeds, or an encoder file (.safetensors, or a "
            "torchvision state dict with --architecture)",
            "RUN",
        ),
    ] = ()
    probe: Annotated[
        tuple[ProbeName, ...],
        Flag(
            "linear: SGD on random crops, as in the paper; linear-cached: on features extracted once, much faster; "
            "knn: nearest neighbours"
        ),
    ] = ("linear",)
    scope: Annotated[
        tuple[str, ...],
        Flag(
            "what classifiers are trained and tested on: all classes, per-task, domain-aware, domain-agnostic, semi-1 "
            "or semi-10 (1 % or 10 % of the labels); none: only --downstream data"
        ),
    ] = ("all",)
    data: Annotated[Path | None, Flag("prepared folder or manifest; by default the run's own", "DIR")] = None
    downstream: Annotated[
        tuple[str, ...],
        Flag(
            "also probe another prepared data set; cifar10, cifar100, stl10 and clipart use the paper's settings",
            "NAME=DIR",
        ),
    ] = ()
    references: Annotated[
        tuple[Path, ...],
        Flag("runs of fastcssl-train --only-task, or folders of them; needed for plasticity", "RUN"),
    ] = ()
    random_encoder: Annotated[bool, Flag("skip the untrained encoder, and with it forward transfer")] = True
    size_px: Annotated[int | None, Flag("side of the images in pixels; by default as in training", "N")] = None
    tables: Annotated[bool, Flag("also print the accuracy on every task after every task")] = False
    csv: Annotated[Path | None, Flag("also write all results to a CSV file, one line per result", "FILE")] = None
    latex: Annotated[Path | None, Flag("also write the printed table as LaTeX (booktabs)", "FILE")] = None
    again: Annotated[bool, Flag("recompute results that already exist")] = False
    lr: Annotated[tuple[float, ...], Flag("learning rate; by default the method's own", "X", _LINEAR)] = ()
    batch_size: Annotated[
        tuple[int, ...],
        Flag(
            "images per step, over all ranks; by default as in the paper: 128 for 32-px images, else 256", "N", _LINEAR
        ),
    ] = ()
    momentum: Annotated[tuple[float, ...], Flag("0.9 as in CaSSLe's code; PNR's code has 0", group=_LINEAR)] = (0.9,)
    epochs: Annotated[
        int, Flag("number of epochs; the learning rate drops at 60 % and 80 % of them", group=_LINEAR)
    ] = 100
    seed: Annotated[int, Flag("random seed for image order, crops and initial weights", group=_LINEAR)] = 0
    strength: Annotated[tuple[float, ...], Flag("linear-cached: C, as in scikit-learn", group=_OTHERS)] = (1.0,)
    k: Annotated[int, Flag("knn: number of neighbours", group=_OTHERS)] = 20
    metric: Annotated[
        tuple[Literal["cosine", "euclidean"], ...], Flag("knn: how distance is measured", group=_OTHERS)
    ] = ("cosine",)
    architecture: Annotated[str | None, Flag("such as resnet18 or torchvision:resnet50", "NAME", _FILES)] = None
    stem: Annotated[Literal["imagenet", "cifar"], Flag("imagenet or cifar: first layers of a ResNet", group=_FILES)] = (
        "imagenet"
    )
    family: Annotated[
        Literal["imagenet", "cifar"], Flag("imagenet or cifar: image size and normalisation", group=_FILES)
    ] = "imagenet"
    out: Annotated[Path | None, Flag("folder for the results; by default beside the file", "DIR", _FILES)] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("auto, cpu or cuda", group=_PROCESS)] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], Flag("auto, bf16, fp16 or fp32, for the encoders", group=_PROCESS)
    ] = "auto"
    loader: Annotated[str, Flag("auto, native, resident, ffcv, dali or torchvision", group=_PROCESS)] = "auto"
    num_threads: Annotated[
        int | None,
        Flag("threads of the loader; by default one per core, shared by the ranks of a machine", "N", _PROCESS),
    ] = None
    checkpoint_minutes: Annotated[float, Flag("minutes between saves of a long probe", group=_PROCESS)] = 5.0


_EXAMPLES = (
    f"{PROG} runs/pnr",
    f"{PROG} runs/pnr runs/cassle --probe linear-cached knn",
    f"{PROG} runs/pnr --scope none --downstream stl10=/data/stl10",
    f"{PROG} resnet50.pth --architecture torchvision:resnet50 --data /data/in100",
    "torchrun --nproc-per-node 8 -m fastcssl.cli.eval runs/pnr",
)


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(_run, args)


def _run(words: list[str], console: Console) -> int:
    if help.is_asked(words) or not words:
        console.print(help.page(EvalOptions, f"{PROG} RUN [RUN...] [FLAGS]", _EXAMPLES))
        return ExitCode.OK if words else ExitCode.MISTAKE
    options = tyro.cli(EvalOptions, prog=PROG, args=words, console_outputs=not console.quiet)
    if not options.runs:
        raise UserError(f"Give a run: {PROG} RUN [RUN...]. See {PROG} --help.")
    with explained():
        return _evaluate(options, words, console)


def _evaluate(options: EvalOptions, words: list[str], console: Console) -> int:
    from fastcssl.api import PATIENCE_S, evaluate_runs
    from fastcssl.distributed.world import connected
    from fastcssl.evaluate import downstream
    from fastcssl.evaluate.options import EvaluationInterrupted, Request
    from fastcssl.evaluate.scoreboard import Scoreboard, summary
    from fastcssl.learn.encoders import EncoderConfig

    try:
        architecture = EncoderConfig(name=options.architecture, stem=options.stem) if options.architecture else None
    except ValueError as error:
        raise UserError(f"--architecture: {error}") from None
    request = Request(
        probes=tuple(dict.fromkeys(options.probe)),
        scopes=() if options.scope == ("none",) else tuple(dict.fromkeys(options.scope)),
        downstream=tuple(downstream.parse(text) for text in options.downstream),
        data=options.data,
        lrs=options.lr,
        batch_sizes=options.batch_size,
        momenta=options.momentum,
        epochs=options.epochs,
        strengths=options.strength,
        k=options.k,
        metrics=tuple(dict.fromkeys(options.metric)),
        size_px=options.size_px,
        seed=options.seed,
        random_encoder=options.random_encoder,
        again=options.again,
    )
    try:
        with (
            together(connected(options.device, timeout_s=PATIENCE_S)),
            Scoreboard(console, quiet=console.quiet) as board,
        ):
            found = evaluate_runs(
                options.runs,
                request,
                references=options.references,
                architecture=architecture,
                family=options.family,
                out=options.out,
                device=options.device,
                precision=options.precision,
                loader=options.loader,
                num_threads=options.num_threads,
                checkpoint_minutes=options.checkpoint_minutes,
                command=shlex.join([PROG, *words]),
                progress=board,
            )
    except EvaluationInterrupted as interrupted:
        console.print(Text(str(interrupted), "yellow"))
        return after_signal(interrupted.signal)
    console.print(summary(found, tables=options.tables))
    _write_files(options, found, console)
    _tell_missing(found, console)
    return ExitCode.OK


def _write_files(options: EvalOptions, outcomes: "list[Evaluated]", console: Console) -> None:
    """Writes the files that --csv and --latex ask for. Only rank 0 is not quiet, and only it writes."""
    from fastcssl.runs.overview import as_csv, as_latex, overviews

    results = [outcome.as_result for outcome in outcomes]
    files = ((options.csv, as_csv(results)), (options.latex, as_latex(overviews(results))))
    for path, text in files if not console.quiet else ():
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text.encode())
            except OSError as error:
                raise UserError(f"{path} cannot be written ({error.strerror}). Choose another file.") from None
            console.print(Text(f"Wrote {path}", "dim"), soft_wrap=True)


def _tell_missing(outcomes: "list[Evaluated]", console: Console) -> None:
    """Prints each command that trains a reference run which the metrics need and do not have."""
    from fastcssl.evaluate.targets import missing_commands

    commands: dict[str, None] = {}
    for outcome in outcomes:
        made = outcome.evaluation
        known = made.metric_inputs
        if known.has_every_task and outcome.target.is_run:
            commands |= dict.fromkeys(
                missing_commands(outcome.target, known.missing_references, Path(made.manifest.path))
            )
    if commands:
        console.print(
            Text("These commands train the missing references. Then give their folders to --references:", "dim")
        )
        for command in commands:
            console.print(Text(command, "cyan"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
