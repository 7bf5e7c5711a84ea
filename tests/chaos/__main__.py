"""Runs `python -m chaos --minutes N --out FOLDER --seed S`, and `python -m chaos table FOLDER`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.campaign import Campaign, run
from chaos.records import KindCount, counts_of, markdown


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an invariant broke."""
    words = list(sys.argv[1:] if args is None else args)
    if words[:1] == ["table"]:
        parser = argparse.ArgumentParser(prog="python -m chaos table", description="Print a campaign's table.")
        parser.add_argument("folder", type=Path, help="the --out of the campaign")
        sys.stdout.write(markdown(parser.parse_args(words[1:]).folder))
        return 0
    counts = counts_of(run(_campaign(words)))
    Console().print(_table(counts))
    return 1 if any(row.num_broken for row in counts) else 0


def _campaign(words: Sequence[str]) -> Campaign:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Inject faults and check what must hold.")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to stop (60)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; a campaign in it is continued")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults come first (0)")
    parser.add_argument("--tier", choices=("quick", "all"), default="all", help="quick: only those of make test")
    parser.add_argument("--only", metavar="EXPERIMENT", help="a file in tests/chaos/experiments, without .py")
    parser.add_argument("--workers", type=int, default=2, help="faults at the same time (2)")
    found = parser.parse_args(words)
    return Campaign(found.out, found.minutes, found.seed, found.tier == "quick", found.only, found.workers)


def _table(counts: Sequence[KindCount]) -> Table:
    table = Table("experiment", "kind of fault")
    for name in ("faults", "broken", "seconds"):
        table.add_column(name, justify="right")
    for row in counts:
        style = "red" if row.num_broken else None
        table.add_row(
            row.experiment, row.kind, str(row.num_faults), str(row.num_broken), f"{row.seconds:.0f}", style=style
        )
    total = [sum(row.num_faults for row in counts), sum(row.num_broken for row in counts)]
    table.add_section()
    table.add_row("all", "", *map(str, total), f"{sum(row.seconds for row in counts):.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
