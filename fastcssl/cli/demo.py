"""fastcssl-demo: shows in a few minutes, on the embedded images, what the other commands do. `make demo` runs it."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

import dataclasses
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from dataprep import help
from dataprep.help import Flag
from fastcssl.cli.exit_codes import Ended, ExitCode, after_signal, explained, run_command
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.cli.demo_parts import DemoBudget, LoaderRace, ResumedRun
    from fastcssl.runs.results import Evaluation

PROG = "fastcssl-demo"
FIGURES = "demo.json"
# All that a demo leaves; "run" is that of version 0.1.0.
_OWN_FILES = {"data", "finetune", "pnr", "resumed", "jpegs", "report", "run", "sheet.png", "views.png", FIGURES}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Draws images in four styles, trains on one style after another, and shows that it learns, remembers and resumes.

    Fine-tuning and PNR share the first task. PNR's last task is then repeated in a process that is killed and resumed.
    The exit status is 1 if PNR's encoder is not better than a random encoder and thumbnails of the images, or if the
    resumed run differs. Every number is in DIR/demo.json.
    """

    out: Annotated[Path, Flag("folder for data, runs, report and figures; an older demo in it is replaced", "DIR")] = (
        Path("demo")
    )
    seed: Annotated[int, Flag("seed of the weights, the order of images and the views")] = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFindings:
    """Everything that the demo measured. Accuracies are shares 0..1, one per task, of a linear classifier."""

    seed: int
    tasks: list[str]
    chance: float
    thumbnails: list[float]
    random: list[float]
    finetune: list[list[float]]  # a row after each task
    pnr: list[list[float]]
    S: dict[str, float]  # by strategy
    S_knn: dict[str, float]  # the same by k-NN, which shows forgetting that a linear classifier makes up for
    resumed: "ResumedRun"
    loader: "LoaderRace"
    seconds: float

    @property
    def A(self) -> dict[str, float]:
        """Returns the mean over tasks by row of the table; of the runs, after the last task."""
        rows = {"thumbnails": self.thumbnails, "random": self.random}
        return {name: fmean(row) for name, row in rows.items()} | {
            "finetune": fmean(self.finetune[-1]),
            "pnr": fmean(self.pnr[-1]),
        }

    @property
    def baseline(self) -> float:
        return max(self.A["thumbnails"], self.A["random"])

    def as_json(self) -> dict[str, Any]:
        """Returns the content of demo.json."""
        return {
            **dataclasses.asdict(self),
            "A": self.A,
            "A_over_baseline": self.A["pnr"] / self.baseline,
            "S_difference": self.S["finetune"] - self.S["pnr"],
            "S_knn_difference": self.S_knn["finetune"] - self.S_knn["pnr"],
            "loader_ratio": self.loader.ratio,
        }


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(_run, args)


def _run(words: list[str], console: Console) -> int:
    if help.is_asked(words):
        console.print(help.page(DemoOptions, f"{PROG} [--out DIR] [--seed N]", [f"{PROG} --seed 6"]))
        return ExitCode.OK
    options = tyro.cli(DemoOptions, prog=PROG, args=words)
    with explained():
        from fastcssl.cli.demo_parts import DemoBudget

        return demonstrate(options, DemoBudget(), console)


def demonstrate(options: DemoOptions, budget: "DemoBudget", console: Console) -> int:
    """Runs the demo, writes its figures, prints its table and sentences, and returns the exit status."""
    from fastcssl.cli.demo_screen import show

    _clear(options.out)
    try:
        findings = _measured(options, budget, console)
    except _Stopped as stopped:
        return after_signal(stopped.signal)
    (options.out / FIGURES).write_text(json.dumps(findings.as_json(), indent=1) + "\n", encoding="utf-8")
    show(findings, options.out, console)
    if found := problems(findings):
        raise Ended(" ".join(found), ExitCode.FAILED)
    return ExitCode.OK


def _clear(out: Path) -> None:
    """Removes an older demo, and refuses a folder that holds anything else."""
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - _OWN_FILES):
        raise UserError(f"{out} holds more than an older demo, which would be deleted. Choose another --out.")
    shutil.rmtree(out, ignore_errors=True)


# ---- Measuring -------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Ends the demo after a signal that ended its training."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def _measured(options: DemoOptions, budget: "DemoBudget", console: Console) -> DemoFindings:
    """Does all the work of the demo and returns what was found."""
    from dataprep.api import build_data, draw_sheet
    from fastcssl.api import evaluate_runs, train_run
    from fastcssl.cli.demo_parts import STYLES, WORDS, kill_and_resume, race, thumbnails
    from fastcssl.cli.demo_screen import ImageShare, PartLines, share_of
    from fastcssl.config.recipes import recipe
    from fastcssl.evaluate.options import Request
    from fastcssl.report import report_runs

    began, out, data = time.monotonic(), options.out, options.out / "data"
    lines = PartLines(console)
    with lines.part(f"Images in four styles: {', '.join(STYLES)}"):
        manifest = build_data(budget.source, data, scenario="domain", domains=STYLES).manifest
        draw_sheet(data, out / "sheet.png")
        draw_sheet(data, out / "views.png", views=recipe(*WORDS, "pnr").config.views.policy)
    changes = {"seed": options.seed, **budget.changes}
    finetune, pnr = out / "finetune", out / "pnr"
    for run, strategy, start, title in (
        (finetune, "finetune", None, "MoCo with fine-tuning, one style after another"),
        (pnr, "pnr", f"{finetune}@0", "MoCo with PNR, from the same first style"),
    ):
        with lines.part(title, share_of(run)):
            made = recipe(*WORDS, strategy).changed(changes)
            if signal := train_run(made, data=data, out=run, start_from=start).signal:
                raise _Stopped(signal)
    images = ImageShare()
    with lines.part("Accuracy of every encoder and of the baselines", images):
        found = evaluate_runs([finetune, pnr], Request(probes=("linear-cached", "knn")), progress=images)
        pixels = thumbnails(data)
        report_runs([finetune, pnr], out / "report")
    with lines.part("PNR's last style again, killed in the middle and resumed", share_of(out / "resumed")):
        resumed = kill_and_resume(pnr, out / "resumed", data, changes, budget.checkpoint_minutes)
    with lines.part("JPEGs per second, native loader and torchvision"):
        raced = race(out / "jpegs", budget)
    tables = [outcome.evaluation for outcome in found]
    linear, knn = ([made for made in tables if made.probe == probe] for probe in ("linear-cached", "knn"))
    first, second = linear
    return DemoFindings(
        seed=options.seed,
        tasks=list(first.columns),
        chance=1 / len(manifest.classes),
        thumbnails=pixels,
        random=list(first.reference.random or ()),
        finetune=first.top1,
        pnr=second.top1,
        S=_forgotten(first, second),
        S_knn=_forgotten(*knn),
        resumed=resumed,
        loader=raced,
        seconds=time.monotonic() - began,
    )


def _forgotten(finetune: "Evaluation", pnr: "Evaluation") -> dict[str, float]:
    return {"finetune": finetune.metrics.numbers["S"] or 0.0, "pnr": pnr.metrics.numbers["S"] or 0.0}


# ---- Judging ---------------------------------------------------------------------------------------------------------


def problems(found: DemoFindings) -> list[str]:
    """Returns a sentence for each thing that must hold and does not."""
    said = []
    if found.A["pnr"] <= found.baseline:
        said.append(
            f"The trained encoder is not better than its baselines: A is {100 * found.A['pnr']:.1f} %, and the better "
            f"of random encoder and thumbnails has {100 * found.baseline:.1f} %. Training is broken on this machine; "
            "fastcssl-doctor checks its parts."
        )
    if not found.resumed.is_identical:
        said.append(
            "The resumed run is not identical to the one that was not interrupted. Please report it with demo.json and "
            "the output of fastcssl-doctor."
        )
    return said


if __name__ == "__main__":
    sys.exit(main())
