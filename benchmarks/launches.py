"""Counts what one training step launches on a GPU, without a GPU: operations, host synchronisations and collectives.

    python benchmarks/launches.py [--json FILE] [--only METHOD/STRATEGY ...]

The step is a real one on fake tensors (tests/fake_cuda): ImageNet-100 recipe, ResNet-18, second task, bf16 autocast,
forward and backward passes, optimiser, slow network and banks, as the only rank and as one of eight. An operation is
what torch dispatches once. Views and allocations do not count. Collectives are counted separately, without DDP's own.
These are counts, not times: nothing here ran on a GPU. The columns "before" are the counts of commit 6633f5b, which
passed each view through the networks separately and used torch's SyncBatchNorm.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timing import environment, write_json_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import fake_cuda

RESULTS = Path(__file__).parent / "results"
BEFORE = RESULTS / "launches_before.jsonl"
RANKS = (1, 8)
SHOWN = ("ops", "host_syncs", "collectives")
AIMS = {"ops_per_step_1": 600, "host_syncs_per_step_8": 0, "collectives_per_step_8": 60}  # of MoCo + PNR, at most


def counts(ranks: int, only: list[str]) -> list[dict[str, Any]]:
    """Returns one row per method and strategy, counted in a process with a fake card."""
    printed = fake_cuda.run("-m", "fake_cuda.count_steps", "--ranks", str(ranks), *only)
    return [json.loads(line) for line in printed.splitlines()]


def read_before() -> dict[tuple[str, int], dict[str, Any]]:
    """Returns the earlier counts by combination and number of ranks."""
    rows = [json.loads(line) for line in BEFORE.read_text().splitlines()]
    return {(row["name"], row["ranks"]): row for row in rows}


def table(rows: list[dict[str, Any]], before: dict[tuple[str, int], dict[str, Any]], ranks: int) -> Table:
    """Returns the table of one number of ranks: each count, and what it was before."""
    title = "one rank" if ranks == 1 else f"one of {ranks} ranks"
    made = Table(title=f"Dispatched per step, {title}", box=box.SIMPLE_HEAD, title_justify="left")
    made.add_column("method/strategy", no_wrap=True)
    for heading in ("operations", "before", "syncs", "before", "collectives", "before"):
        made.add_column(heading, justify="right", no_wrap=True, style="dim" if heading == "before" else "")
    for row in rows:
        if "error" in row:
            made.add_row(row["name"], f"[red]failed: {row['error'][:60]}")
            continue
        earlier = before.get((row["name"], ranks), {})
        made.add_row(row["name"], *(str(value) for key in SHOWN for value in (row[key], earlier.get(key, "-"))))
    return made


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the counts of MoCo + PNR, which the aims are about."""
    chosen = [row for row in rows if row["name"] == "moco/pnr" and "error" not in row]
    return {f"{key}_per_step_{row['ranks']}": row[key] for row in chosen for key in SHOWN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts as JSON lines")
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD/STRATEGY", help="count these combinations")
    options = parser.parse_args()
    console, before, rows = Console(), read_before(), []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(RANKS))
        for ranks in RANKS:
            progress.update(bar, description=f"counting steps of {ranks} rank{'s' * (ranks > 1)}")
            rows += counts(ranks, options.only)
            progress.advance(bar)
    for ranks in RANKS:
        console.print(table([row for row in rows if row["ranks"] == ranks], before, ranks))
    found = summary(rows)
    for key, most in AIMS.items():
        if key in found:
            verdict = "reached" if found[key] <= most else "missed"
            console.print(f"{key}: {found[key]}, at most {most} wanted: {verdict}", highlight=False)
    if options.json:
        write_json_lines(
            options.json, [*rows, {"environment": environment(("torch", "fastcssl"), seed=0)}, {"summary": found}]
        )
    sys.stdout.write(json.dumps({"summary": found}) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
