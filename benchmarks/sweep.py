"""Trains every method with every strategy on two tasks of the embedded set, with the command that a user would type.

    python benchmarks/sweep.py [--json FILE] [--work DIR] [--only METHOD/STRATEGY ...]

It shows that each combination trains, how long that takes and its final loss. It does not measure quality; quality.py
does.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from timing import environment, write_json_lines

from fastcssl.config.recipes import recipe
from fastcssl.learn import methods, strategies

RESULTS = Path(__file__).parent / "results" / "sweep.jsonl"
SOURCE = "synthetic:classes=20,train=40,val=10"
FLAGS = (
    *("--expect.num-tasks", "2", "--epochs", "2", "--batch-size", "32", "--encoder.name", "resnet18-w8"),
    *("--precision", "fp32", "--log-every", "1", "--device", "cpu", "--num-threads", "1"),
)


def combinations() -> list[tuple[str, str]]:
    """Returns all pairs of a method and a strategy."""
    return [(method, strategy) for method in methods.names() for strategy in strategies.names()]


def train(method: str, strategy: str, data: Path, out: Path) -> dict[str, Any]:
    """Trains one run and returns its record. `failure` is the last line of its output if it failed."""
    words = ["demo", method, strategy, "--data", str(data), "--out", str(out), *FLAGS]
    began = time.perf_counter()
    command = [sys.executable, "-m", "fastcssl.cli.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found: dict[str, Any] = {
        "method": method,
        "strategy": strategy,
        "seconds": round(time.perf_counter() - began, 1),
        "failure": None,
    }
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return {**found, "failure": said[-1] if said else f"exit status {done.returncode}"}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps, tasks = ([line for line in lines if line["kind"] == kind] for kind in ("step", "task"))
    expected = 1 if strategies.find(strategy).union else 2
    if len(tasks) != expected:
        found["failure"] = f"{len(tasks)} tasks were trained, not {expected}"
    return {
        **found,
        "num_steps": steps[-1]["step"],
        "terms": steps[-1]["terms"],
        "loss_by_task": [task["loss"] for task in tasks],
        "knn_by_task": [task["accuracy"].get("knn") for task in tasks],
    }


def show(console: Console, found: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Loss after the last task, × failed", title_justify="left")
    table.add_column("")
    columns = list(dict.fromkeys(line["strategy"] for line in found))
    for name in columns:
        table.add_column(name, justify="right")
    for method in dict.fromkeys(line["method"] for line in found):
        by_strategy = {line["strategy"]: line for line in found if line["method"] == method}
        table.add_row(method, *(_cell(by_strategy.get(name)) for name in columns))
    console.print(table)
    for line in found:
        if line["failure"]:
            console.print(f"[red]{line['method']} {line['strategy']}:[/] {line['failure']}", highlight=False)
    failed = sum(line["failure"] is not None for line in found)
    console.print(f"{len(found) - failed} of {len(found)} combinations trained.")


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    return "×" if line["failure"] else f"{line['loss_by_task'][-1]:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the results")
    parser.add_argument(
        "--only", nargs="*", help="the combinations to train, such as moco/pnr byol/cassle; default: all"
    )
    parser.add_argument("--work", type=Path, help="folder for data and runs; default: a temporary folder")
    args = parser.parse_args()
    chosen = [pair for pair in combinations() if not args.only or "/".join(pair) in args.only]
    if args.only and len(chosen) != len(args.only):
        parser.error(f"--only {' '.join(args.only)}: not all are a METHOD/STRATEGY of this build.")
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        data = work / "data"
        build = ["build", SOURCE, "--scenario", "class", "--tasks", "2", "--out", str(data)]
        subprocess.run([sys.executable, "-m", "dataprep.cli", *build], check=True, stdout=subprocess.DEVNULL)
        found = []
        bar = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*bar, console=console, disable=not console.is_terminal) as progress:
            at = progress.add_task("", total=len(chosen))
            for method, strategy in chosen:
                progress.update(at, description=f"{method} {strategy}")
                found.append(train(method, strategy, data, work / f"{method}-{strategy}"))
                if not console.is_terminal:
                    console.print(f"{len(found)}/{len(chosen)}  {method} {strategy}  {found[-1]['seconds']} s")
                progress.advance(at)
    show(console, found)
    failed = sum(line["failure"] is not None for line in found)
    last = {"summary": {"num_combinations": len(found), "num_failed": failed}}
    about = environment(("torch", "fastcssl"), seed=recipe("demo", *chosen[0]).config.seed)
    write_json_lines(args.json, [*found, {"environment": about}, last])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
