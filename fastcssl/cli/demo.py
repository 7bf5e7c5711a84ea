"""fastcssl-demo: shows in a few minutes, on the embedded images, what the other commands do. `make demo` runs it."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import catch_signals

    catch_signals()

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dataprep import help
from dataprep.help import Flag
from fastcssl.cli.exit_codes import Ended, ExitCode, after_signal, ended, explained
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.cli.demo_parts import DemoBudget, LoaderRace, ResumedRun

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
    """Everything that the demo measured. Accuracies are shares 0..1, one per task."""

    seed: int
    tasks: list[str]
    chance: float
    thumbnails: list[float]
    random: list[float]
    finetune: list[list[float]]  # a row after each task
    pnr: list[list[float]]
    S: dict[str, float]  # by strategy
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
        return {**dataclasses.asdict(self), "A": self.A, "A_over_baseline": self.A["pnr"] / self.baseline}


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return ended(lambda console: _run(sys.argv[1:] if args is None else list(args), console))


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
    _clear(options.out)
    signal, findings = _measured(options, budget, console)
    if findings is None:
        return after_signal(signal)
    (options.out / FIGURES).write_text(json.dumps(findings.as_json(), indent=1) + "\n", encoding="utf-8")
    console.rule(style="dim")
    console.print(shown(findings))
    for sentence in sentences(findings):
        console.print(sentence, soft_wrap=True, highlight=False)
    console.print(
        f"Open {options.out}/report/index.html. Images: {options.out}/sheet.png, their views: {options.out}/views.png, "
        f"all numbers: {options.out}/{FIGURES}.",
        soft_wrap=True,
        style="dim",
    )
    if found := problems(findings):
        raise Ended(" ".join(found), ExitCode.FAILED)
    return ExitCode.OK


def _clear(out: Path) -> None:
    """Removes an older demo, and refuses a folder that holds anything else."""
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - _OWN_FILES):
        raise UserError(f"{out} holds more than an older demo, which would be deleted. Choose another --out.")
    shutil.rmtree(out, ignore_errors=True)


# ---- Measuring -------------------------------------------------------------------------------------------------------


def _measured(options: DemoOptions, budget: "DemoBudget", console: Console) -> tuple[int, DemoFindings | None]:
    """Returns the signal that ended the demo and no findings, or 0 and the findings."""
    from dataprep.api import build_data, draw_sheet
    from fastcssl.api import evaluate_runs, train_run
    from fastcssl.cli.demo_parts import WORDS, kill_and_resume, race, thumbnails
    from fastcssl.config.recipes import recipe
    from fastcssl.evaluate.options import Request
    from fastcssl.evaluate.scoreboard import Scoreboard
    from fastcssl.report import report_runs

    began, out, data = time.monotonic(), options.out, options.out / "data"
    _head(console, "images in four styles, one task each")
    manifest = build_data(budget.source, data, scenario="domain", console=console).manifest
    draw_sheet(data, out / "sheet.png")
    draw_sheet(data, out / "views.png", views=recipe(*WORDS, "pnr").config.views.policy)
    changes = {"seed": options.seed, **budget.changes}
    finetune, pnr = out / "finetune", out / "pnr"
    for run, strategy, start, title in (
        (finetune, "finetune", None, "fine-tuning, task after task"),
        (pnr, "pnr", f"{finetune}@0", "PNR, from the same first task"),
    ):
        _head(console, title)
        made = recipe(*WORDS, strategy).changed(changes)
        outcome = train_run(made, data=data, out=run, start_from=start, console=console)
        if outcome.signal:
            return outcome.signal, None
    _head(console, "accuracy of every encoder, and of the baselines")
    with Scoreboard(console) as board:
        tables = [
            found.evaluation
            for found in evaluate_runs([finetune, pnr], Request(probes=("linear-cached",)), progress=board)
        ]
    pixels = thumbnails(data)
    report_runs([finetune, pnr], out / "report")
    _head(console, "PNR's last task again, killed in the middle and resumed")
    resumed = kill_and_resume(pnr, out / "resumed", data, changes, budget.checkpoint_minutes)
    _head(console, "loaders, one thread each")
    raced = race(out / "jpegs", budget)
    first, second = tables
    return 0, DemoFindings(
        seed=options.seed,
        tasks=list(first.columns),
        chance=1 / len(manifest.classes),
        thumbnails=pixels,
        random=list(first.reference.random or ()),
        finetune=first.top1,
        pnr=second.top1,
        S={"finetune": first.metrics.numbers["S"] or 0.0, "pnr": second.metrics.numbers["S"] or 0.0},
        resumed=resumed,
        loader=raced,
        seconds=time.monotonic() - began,
    )


def _head(console: Console, text: str) -> None:
    console.rule(text, align="left", style="dim")


# ---- Showing ---------------------------------------------------------------------------------------------------------


def shown(found: DemoFindings) -> Table:
    """Returns the closing table, in percent."""
    table = Table(title="top-1 in %", title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in (*found.tasks, "A", "S"):
        table.add_column(name, justify="right", no_wrap=True)
    chance = [found.chance] * len(found.tasks)
    _add(table, "chance", chance)
    _add(table, "8x8 thumbnails", found.thumbnails)
    _add(table, "random encoder", found.random)
    _add(table, "MoCo + fine-tuning", found.finetune[-1], found.S["finetune"])
    _add(table, "MoCo + PNR", found.pnr[-1], found.S["pnr"])
    return table


def _add(table: Table, name: str, row: Sequence[float], forgotten: float | None = None) -> None:
    last = "" if forgotten is None else f"{100 * forgotten:.1f}"
    table.add_row(name, *(f"{100 * value:.1f}" for value in (*row, fmean(row))), last)


def sentences(found: DemoFindings) -> tuple[str, str, str, str]:
    """Returns what the demo showed, in four sentences."""
    percent = {name: f"{100 * value:.1f} %" for name, value in found.A.items()}
    fell = {name: f"{100 * value:.1f}" for name, value in found.S.items()}
    resumed = found.resumed
    times = found.A["pnr"] / found.baseline
    outcome = (
        "its losses and its encoder are identical to the last bit to those of the run that was not interrupted"
        if resumed.is_identical
        else f"{resumed.num_equal} losses are those of the run that was not interrupted, but not everything is"
    )
    return (
        f"1. It learns: A is {percent['pnr']} with PNR, {times:.1f} times the better of random encoder "
        f"({percent['random']}) and thumbnails ({percent['thumbnails']}); chance is {100 * found.chance:.1f} %.",
        f"2. {_remembers(found)}: from its best, an earlier task fell by {fell['finetune']} points with fine-tuning "
        f"and by {fell['pnr']} with PNR (S).",
        f"3. It resumes: killed after step {resumed.killed_after_step} and started again, {outcome} "
        f"({resumed.num_losses} losses compared).",
        f"4. It is fast: with one thread, the native loader makes both views of {found.loader.native:,.0f} JPEGs per "
        f"second and torchvision of {found.loader.torchvision:,.0f}, {found.loader.ratio:.1f} times as many.",
    )


def _remembers(found: DemoFindings) -> str:
    return "PNR forgets less" if found.S["pnr"] < found.S["finetune"] else "PNR forgot no less in this run"


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
