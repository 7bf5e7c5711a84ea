"""fastcssl-eval RUN [RUN...]: what the encoders of runs have learnt. See --help."""

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
from fastcssl.cli.exit_codes import ExitCode, after_signal, ended, explained, together
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.evaluate.options import Evaluated

PROG = "fastcssl-eval"
ProbeName = Literal["linear", "linear-cached", "knn"]
_LINEAR, _OTHERS = "of the linear probe", "of the other probes"
_FILES, _PROCESS = "of encoder files that do not say", "this process"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Probes the encoders of runs, all checkpoints side by side, and leaves RUN/evaluations/*.json.

    What was evaluated before is shown, not computed again. Several values of a setting are a grid.
    """

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        Flag(
            "a folder of fastcssl-train, a folder of several seeds, or an encoder file (.safetensors, or a state dict "
            "of torchvision's with --architecture)",
            "RUN",
        ),
    ] = ()
    probe: Annotated[
        tuple[ProbeName, ...],
        Flag("linear is the paper's, SGD on random crops; linear-cached solves it on features extracted once; knn"),
    ] = ("linear",)
    scope: Annotated[
        tuple[str, ...],
        Flag("all, per-task, domain-aware, domain-agnostic, semi-1, semi-10; none, for downstream sets alone"),
    ] = ("all",)
    data: Annotated[Path | None, Flag("a prepared folder or manifest; by default the run's own", "DIR")] = None
    downstream: Annotated[
        tuple[str, ...],
        Flag("other data; cifar10, cifar100, stl10 and clipart have the paper's recipe", "NAME=DIR"),
    ] = ()
    references: Annotated[
        tuple[Path, ...], Flag("runs of fastcssl-train --only-task, or folders of them, for plasticity", "RUN")
    ] = ()
    random_encoder: Annotated[bool, Flag("do without the untrained encoder, and so without forward transfer")] = True
    size_px: Annotated[int | None, Flag("of the images that encoders see; by default as they were trained", "N")] = None
    again: Annotated[bool, Flag("compute also what is known")] = False
    lr: Annotated[tuple[float, ...], Flag("by default the method's own", "X", _LINEAR)] = ()
    batch_size: Annotated[
        tuple[int, ...], Flag("over all ranks; by default the paper's: 128 for 32 px, else 256", "N", _LINEAR)
    ] = ()
    momentum: Annotated[tuple[float, ...], Flag("as CaSSLe's code; PNR's has 0", group=_LINEAR)] = (0.9,)
    epochs: Annotated[int, Flag("the learning rate drops at 60 % and 80 % of them", group=_LINEAR)] = 100
    seed: Annotated[int, Flag("of order, crops and first weights", group=_LINEAR)] = 0
    strength: Annotated[tuple[float, ...], Flag("of linear-cached: scikit-learn's C", group=_OTHERS)] = (1.0,)
    k: Annotated[int, Flag("neighbours of knn", group=_OTHERS)] = 20
    metric: Annotated[tuple[Literal["cosine", "euclidean"], ...], Flag("of knn", group=_OTHERS)] = (
        "cosine",
        "euclidean",
    )
    architecture: Annotated[str | None, Flag("resnet18, torchvision:resnet50, ...", "NAME", _FILES)] = None
    stem: Annotated[Literal["imagenet", "cifar"], Flag("or cifar: of a resnet", group=_FILES)] = "imagenet"
    family: Annotated[Literal["imagenet", "cifar"], Flag("or cifar: size and normalisation", group=_FILES)] = "imagenet"
    out: Annotated[Path | None, Flag("where the results go; by default beside the file", "DIR", _FILES)] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("or cpu, cuda", group=_PROCESS)] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], Flag("or bf16, fp16, fp32: of the encoders", group=_PROCESS)
    ] = "auto"
    loader: Annotated[str, Flag("or native, resident, ffcv, dali, torchvision", group=_PROCESS)] = "auto"
    num_threads: Annotated[
        int | None, Flag("of the loader; by default one a core, shared by a machine's ranks", "N", _PROCESS)
    ] = None
    checkpoint_minutes: Annotated[float, Flag("between two saves of a long probe", group=_PROCESS)] = 5.0


_EXAMPLES = (
    f"{PROG} runs/pnr",
    f"{PROG} runs/pnr runs/cassle --probe linear-cached knn",
    f"{PROG} runs/pnr --scope none --downstream stl10=/data/stl10",
    f"{PROG} resnet50.pth --architecture torchvision:resnet50 --data /data/in100",
    "torchrun --nproc-per-node 8 -m fastcssl.cli.eval runs/pnr",
)


def main(args: list[str] | None = None) -> int:
    return ended(lambda console: _run(sys.argv[1:] if args is None else list(args), console))


def _run(words: list[str], console: Console) -> int:
    if help.is_asked(words):
        console.print(help.page(EvalOptions, f"{PROG} RUN [RUN...] [FLAGS]", _EXAMPLES))
        return ExitCode.OK
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
    console.print(summary(found))
    _tell_missing(found, console)
    return ExitCode.OK


def _tell_missing(outcomes: "list[Evaluated]", console: Console) -> None:
    """Prints the commands that make the references which metrics lack, each once."""
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
        console.print(Text("To make the missing references, and then --references with their folders:", "dim"))
        for command in commands:
            console.print(Text(command, "cyan"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
