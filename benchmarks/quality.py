"""Compares the accuracy of the strategies, with the same encoder, views, optimiser and images, over several seeds.

    python benchmarks/quality.py [--cifar CIFAR100] [--work DIR] [--json FILE] [--study NAME] [--report]

It takes hours on two cores, so it can be interrupted and started again: an interrupted run continues, and a finished
run is a line of FILE and is not repeated. After each task, k-NN and a linear classifier give the accuracy on each task.
They use cached features of all tasks' images and all classes. `--report` only shows the results in FILE.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from timing import environment

from dataprep import synthetic
from dataprep.cli import main as prepare
from fastcssl.cli.train import parsed
from fastcssl.config.recipes import recipe
from fastcssl.runs import metrics
from fastcssl.train.loop import train

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
PROBES = ("linear", "knn")
STRATEGIES = ("joint", "pnr", "cassle", "finetune")

# There are few steps, so the banks are small. If the momentum network changes noticeably within the age of the oldest
# key, the queries learn to distinguish fresh keys from old ones instead of images, and MoCo collapses
# (results/quality.md).
_MOCO = ("--method.bank.size", "512", "--method.ema-base", "0.996", "--method.ema-final", "0.999")
_COMMON = ("--optim.name", "adamw", "--optim.weight-decay", "0.01", "--batch-size", "64", "--online-probe", "every=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One data set and method with several strategies. `flags` are flags of fastcssl-train, the same for all."""

    about: str
    source: str  # a source of fastcssl-prep; "{images}" is a folder that `images` fills
    method: str
    flags: tuple[str, ...]
    scenario: tuple[str, ...] = ("class", "--tasks", "5")
    images: Callable[[Path, Path], None] | None = None  # fills that folder from CIFAR-100
    strategies: tuple[str, ...] = STRATEGIES
    seeds: tuple[int, ...] = (5, 6, 7)


def some_classes(cifar: Path, out: Path) -> None:
    """Links ten classes, with the test images for validation."""
    for split, called in (("train", "train"), ("test", "val")):
        _link(cifar / split, out / called)


def photos_then_drawings(cifar: Path, out: Path) -> None:
    """Makes three domains: ten classes of photos, then twenty classes of drawings in two styles."""
    _link(cifar / "train", out / "1-photos")
    for place, style in ((2, "neon"), (3, "sketch")):
        for label, name in enumerate(synthetic.class_names(20)):
            folder = out / f"{place}-{style}" / name
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(200):
                number = synthetic.STYLES.index(style)
                drawing = synthetic.draw(label=label, num_classes=20, style=number, size_px=32, seed=0, index=index)
                Image.fromarray(drawing).save(folder / f"{index:03d}.png", compress_level=1)


def _link(classes: Path, out: Path) -> None:
    """Links every tenth class, in the order of their names."""
    out.mkdir(parents=True, exist_ok=True)
    for folder in sorted(path for path in classes.iterdir() if path.is_dir())[::10]:
        link = out / folder.name
        if not link.exists():
            link.symlink_to(folder.resolve(), target_is_directory=True)


_EMBEDDED = "synthetic:classes=20,train=240,val=100"
_SMALL = ("--views.min-scale", "0.4", "--optim.lr", "0.008")

STUDIES: dict[str, Study] = {
    "shift-moco": Study(
        about="4,500 photos of 10 classes (CIFAR-100), then twice 3,600 drawings of 20 classes, 10 epochs each",
        source="folder:{images}",
        scenario=("domain",),
        images=photos_then_drawings,
        method="moco",
        flags=(*_COMMON, *_MOCO, "--views.min-scale", "0.2", "--optim.lr", "0.008", "--epochs", "10"),
    ),
    "embedded-moco": Study(
        about="the embedded set, 5 tasks of 4 classes and 960 images, 12 epochs each",
        source=_EMBEDDED,
        method="moco",
        flags=(*_COMMON, *_SMALL, *_MOCO, "--epochs", "12"),
    ),
    "embedded-byol": Study(
        about="the embedded set, 5 tasks of 4 classes and 960 images, 12 epochs each",
        source=_EMBEDDED,
        method="byol",
        flags=(*_COMMON, *_SMALL, "--epochs", "12"),
    ),
    "cifar-moco": Study(
        about="10 classes of CIFAR-100, 5 tasks of 2 classes and 1,000 images, 100 epochs each",
        source="folder:{images}",
        images=some_classes,
        method="moco",
        seeds=(5,),
        flags=(*_COMMON, *_MOCO, "--views.min-scale", "0.2", "--optim.lr", "0.012", "--epochs", "100"),
    ),
    "smoke": Study(
        about="only shows that everything runs, not a result",
        source="synthetic:classes=20,train=4,val=2",
        method="moco",
        strategies=("joint", "pnr", "finetune"),
        seeds=(5, 6),
        flags=("--batch-size", "16", "--epochs", "1", "--encoder.name", "resnet18-w8", "--views.size-px", "16"),
    ),
}


# ---- Runs ------------------------------------------------------------------------------------------------------------


def prepared(name: str, study: Study, work: Path, cifar: Path | None) -> Path:
    out = work / f"{name}-data"
    if (out / "manifest.json").exists():
        return out
    source = study.source
    if study.images is not None:
        assert cifar is not None
        folder = work / f"{name}-images"
        study.images(cifar, folder)
        source = source.format(images=folder)
    formats = ("--formats", "array")
    if prepare(["build", source, "--scenario", *study.scenario, *formats, "--out", str(out)]):
        raise SystemExit(f"{source} could not be prepared. The reason is above.")
    return out


def run(name: str, study: Study, strategy: str, seed: int, data: Path, work: Path) -> dict[str, Any]:
    words = ("demo", study.method, strategy)
    anything = ("--expect.source", "any", "--expect.scenario", "any", "--expect.num-tasks", "0")
    flags = [*anything, *study.flags, "--seed", str(seed), "--device", "cpu"]
    _, chosen = parsed(words, recipe(*words), flags)
    out, first = (work / f"{name}-{word}-seed{seed}" for word in (strategy, _first(study)))
    # The first task is the same with all of these strategies, bit for bit, so it is trained once.
    borrows = strategy not in ("joint", _first(study)) and (first / "checkpoints" / "task-0.pt").exists()
    outcome = train(
        chosen, data=data, out=out, start_from=f"{first}@0" if borrows and not out.exists() else None, console=Console()
    )
    if outcome.status != "finished":
        raise SystemExit("Stopped. Run the same command again to continue.")
    return {
        "study": name,
        "strategy": strategy,
        "method": study.method,
        "seed": seed,
        "command": f"fastcssl-train {' '.join((*words, *flags))}",
        "seconds": round(sum(task.seconds for task in outcome.tasks), 1),
        **{f"{probe}_t_i": table for probe, table in _whole(out, first if borrows else out).items()},
    }


def _first(study: Study) -> str:
    return next(strategy for strategy in study.strategies if strategy != "joint")


def _whole(out: Path, first: Path) -> dict[str, list[list[float]]]:
    """Returns the tables of a run, including the row of a first task that another run trained."""
    own, other = tables(out), tables(first)
    return {probe: rows if len(rows) == len(other[probe]) else other[probe][:1] + rows for probe, rows in own.items()}


def tables(out: Path) -> dict[str, list[list[float]]]:
    """Returns a table per probe, with one row per trained task that has the accuracy on every task."""
    found: dict[str, list[list[float]]] = {probe: [] for probe in PROBES}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report.get("what") == "probe":
            for probe in PROBES:
                found[probe].append([task[f"{probe}_top1"] for task in report["per_task"]])
    return found


# ---- Results ---------------------------------------------------------------------------------------------------------


def finished(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of the finished runs."""
    if not path.exists():
        return []
    return [line for line in map(json.loads, path.read_text().splitlines()) if "study" in line]


def average(table: list[list[float]]) -> float:
    """Returns A_T: the mean over tasks after the last one."""
    return metrics.average_over_all(table)[-1]


def forgetting(table: list[list[float]]) -> float | None:
    """Returns S: the mean fall of each task except the last from its best, or None for a single checkpoint."""
    return metrics.stability(table) if len(table) > 1 else None


def after_learning(table: list[list[float]]) -> float | None:
    """Returns the mean change of each task except the last since it was learnt. Negative values are a fall."""
    if len(table) < 2:
        return None
    return statistics.fmean(table[-1][i] - table[i][i] for i in range(len(table) - 1))


MEASURES = {"A": average, "S": forgetting, "since": after_learning}


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and standard deviation over seeds, in percent, by study and strategy."""
    found: dict[str, Any] = {}
    for line in lines:
        found.setdefault(line["study"], {}).setdefault(line["strategy"], []).append(line)
    return {
        study: {strategy: _of_seeds(runs) for strategy, runs in by_strategy.items()}
        for study, by_strategy in found.items()
    }


def _of_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": sorted(run["seed"] for run in runs)}
    for probe in PROBES:
        for name, measure in MEASURES.items():
            values = [measure(run[f"{probe}_t_i"]) for run in runs]
            known = [100 * value for value in values if value is not None]
            deviation = statistics.stdev(known) if len(known) > 1 else None
            found[f"{probe} {name}"] = (statistics.fmean(known), deviation) if known else None
    return found


def show(console: Console, found: dict[str, Any]) -> None:
    for study, by_strategy in found.items():
        about = STUDIES[study]
        table = Table(title=f"{about.method}: {about.about}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        table.add_column("strategy")
        columns = [f"{probe} {name}" for probe in PROBES for name in MEASURES]
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("seeds", justify="right")
        for strategy in sorted(by_strategy, key=about.strategies.index):
            row = by_strategy[strategy]
            table.add_row(strategy, *(_cell(row[column]) for column in columns), str(len(row["seeds"])))
        console.print(table)
    console.print(
        "Top-1 in %, mean ± standard deviation over seeds; tasks have equal weight. A: after the last task.",
        style="dim",
    )
    console.print("S: fall from a task's best. since: change since a task was learnt.", style="dim")


def _cell(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "-"
    mean, deviation = value
    return f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cifar", type=Path, help="CIFAR-100 as folders: {train,test}/{class}/*.png")
    parser.add_argument("--work", type=Path, help="folder for data and runs; kept, so that runs can continue")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write one line per finished run")
    parser.add_argument("--study", choices=STUDIES, action="append", help="may be repeated; default: all except smoke")
    parser.add_argument("--threads", type=int, default=1, help="for computing; one is the fastest beside other work")
    parser.add_argument("--report", action="store_true", help="only show the stored results")
    args = parser.parse_args()
    console = Console()
    work = args.work or Path(tempfile.gettempdir()) / "fastcssl-quality"
    if not args.report:
        torch.set_num_threads(args.threads)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        for name in args.study or [name for name in STUDIES if name != "smoke"]:
            _run_study(name, STUDIES[name], args.cifar, work, args.json, console)
    chosen = [line for line in finished(args.json) if line["study"] in (args.study or STUDIES)]
    show(console, summary(chosen))
    return 0


def _run_study(name: str, study: Study, cifar: Path | None, work: Path, path: Path, console: Console) -> None:
    if study.images is not None and cifar is None:
        console.print(f"{name} is left out, because it needs --cifar.")
        return
    done = {(line["study"], line["strategy"], line["seed"]) for line in finished(path)}
    data = prepared(name, study, work, cifar)
    for seed in study.seeds:  # all strategies of one seed first, so that they can be compared early
        for strategy in study.strategies:
            if (name, strategy, seed) not in done:
                line = run(name, study, strategy, seed, data, work)
                line["environment"] = environment(("torch", "fastcssl"))
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
