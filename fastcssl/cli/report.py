"""fastcssl-report RUN [RUN...] [--out DIR]: tables and pictures of runs, as one page and in the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from dataprep import help
from dataprep.help import Flag
from fastcssl.cli.exit_codes import ExitCode, ended
from fastcssl.errors import UserError

PROG = "fastcssl-report"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draws runs: accuracies after each task, A, S and P beside the published values, training, speed, configuration.

    A run is a folder of fastcssl-train, or a folder of several seeds. What fastcssl-eval has found is read from it; a
    run that was not evaluated shows its training. The page needs nothing but itself; each picture is a PNG file too.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, Flag("folders that fastcssl-train wrote", "RUN")] = ()
    out: Annotated[
        Path | None, Flag("for the page and its pictures; by default RUN/report, or ./report for several runs", "DIR")
    ] = None


def main(args: list[str] | None = None) -> int:
    return ended(lambda console: _run(sys.argv[1:] if args is None else list(args), console))


def _run(words: list[str], console: Console) -> int:
    if help.is_asked(words):
        console.print(help.page(ReportOptions, f"{PROG} RUN [RUN...] [--out DIR]", [f"{PROG} runs/pnr runs/cassle"]))
        return ExitCode.OK
    options = tyro.cli(ReportOptions, prog=PROG, args=words)
    if not options.runs:
        raise UserError(f"Give a run: {PROG} RUN [RUN...]. See {PROG} --help.")
    # Here, as drawing takes a second to load and --help need not wait for it.
    from fastcssl.report import report_runs
    from fastcssl.report.summary import summary

    found = report_runs(options.runs, options.out)
    if not console.is_terminal:  # a log has no edge to keep to
        console = Console(file=console.file, width=max(console.width, 160))
    console.print(summary(found))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
