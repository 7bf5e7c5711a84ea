"""fastcssl-eval RUN [RUN...]: what the encoders of runs have learnt. See --help."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from fastcssl.cli.endings import ended, explained
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.request import Evaluated

PROG = "fastcssl-eval"
ProbeName = Literal["linear", "linear-cached", "knn"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Probes the encoders of runs, all checkpoints side by side, and leaves RUN/evaluations/*.json.

    A run is a folder of fastcssl-train, a folder of several seeds, or an encoder file (with --data; .safetensors, or a
    state dict of torchvision's with --architecture). What was evaluated before is shown, not computed again. Several
    GPUs: torchrun --nproc-per-node 8 -m fastcssl.cli.eval RUN.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    # linear: the paper's, SGD on random crops. linear-cached: logistic regression on features extracted once. knn.
    probe: tuple[ProbeName, ...] = ("linear",)
    # all, per-task, domain-aware, domain-agnostic, semi-1, semi-10; none, for downstream sets alone.
    scope: tuple[str, ...] = ("all",)
    data: Path | None = None  # A prepared folder or manifest; by default the one the run was trained on.
    # NAME=DIR: another data set. cifar10, cifar100, stl10 and clipart have the paper's recipe.
    downstream: tuple[str, ...] = ()
    # Runs of fastcssl-train --only-task, for plasticity. Folders of such runs, too.
    references: tuple[Path, ...] = ()
    random_encoder: bool = True  # Also probe an untrained encoder, for forward transfer.
    lr: tuple[float, ...] = ()  # Of the linear probe; several are a grid. By default the method's own.
    batch_size: tuple[
        int, ...
    ] = ()  # Over all ranks; several are a grid. By default the paper's: 128 for 32 px, or 256.
    momentum: tuple[float, ...] = (0.9,)  # 0.9 as CaSSLe's code, 0 as PNR's.
    epochs: int = 100  # Of the linear probe; its learning rate drops at 60 % and 80 %.
    strength: tuple[float, ...] = (1.0,)  # Of linear-cached: scikit-learn's C.
    k: int = 20
    metric: tuple[Literal["cosine", "euclidean"], ...] = ("cosine", "euclidean")  # Of knn.
    size_px: int | None = None  # Of the images that encoders see. By default as they were trained.
    seed: int = 0  # Of the probe's order, crops and first weights.
    architecture: str | None = None  # Of an encoder file that does not say: resnet18, torchvision:resnet50, ...
    stem: Literal["imagenet", "cifar"] = "imagenet"  # Of such a resnet.
    family: Literal["imagenet", "cifar"] = "imagenet"  # How such a file's encoder saw images: size, normalisation.
    out: Path | None = None  # Where the results of an encoder file go. By default a folder beside it.
    again: bool = False  # Compute also what is known.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # Of the encoders.
    loader: str = "auto"
    num_threads: int | None = None  # Of the loader. By default one a core.
    checkpoint_minutes: float = 5.0  # How often a long probe saves what it has learnt.


def main(args: list[str] | None = None) -> int:
    return ended(lambda console: _run(sys.argv[1:] if args is None else list(args), console))


def _run(words: list[str], console: Console) -> int:
    options = tyro.cli(Options, prog=PROG, args=words, console_outputs=not console.quiet)
    if not options.runs:
        raise UserError(f"Give a run: {PROG} RUN [RUN...]. See {PROG} --help.")
    with explained():
        return _evaluate(options, words, console)


def _evaluate(options: Options, words: list[str], console: Console) -> int:
    from fastcssl import downstream
    from fastcssl.api import evaluate_runs
    from fastcssl.encoders import EncoderConfig
    from fastcssl.request import Interrupted, Request
    from fastcssl.scoreboard import Scoreboard, summary

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
        with Scoreboard(console, quiet=console.quiet) as board:
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
    except Interrupted as interrupted:
        console.print(Text(str(interrupted), "yellow"))
        return 128 + interrupted.signal
    console.print(summary(found))
    _tell_missing(found, console)
    return 0


def _tell_missing(outcomes: "list[Evaluated]", console: Console) -> None:
    """The commands that make the references which plasticity lacks, each once."""
    from fastcssl.references import missing_commands

    commands: dict[str, None] = {}
    for outcome in outcomes:
        made = outcome.evaluation
        if made.metrics.S is None or made.metrics.P is not None or not outcome.target.is_run:
            continue
        ft = made.reference.ft or [None] * len(made.columns)
        lacking = [i for i in range(1, len(ft)) if ft[i] is None]
        commands |= dict.fromkeys(missing_commands(outcome.target, lacking, Path(made.manifest.path)))
    if commands:
        console.print(Text("To make the missing references, and then --references with their folders:", "dim"))
        for command in commands:
            console.print(Text(command, "cyan"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
