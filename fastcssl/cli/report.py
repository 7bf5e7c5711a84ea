"""fastcssl-report RUN [RUN...] [--out DIR]: shows runs as tables and figures, on one page and in the terminal."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from dataprep import help
from dataprep.help import Flag
from fastcssl.cli.exit_codes import ExitCode, run_command
from fastcssl.errors import UserError

PROG = "fastcssl-report"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Summarises runs on one HTML page and in the terminal.

    The page shows the accuracies after each task, the metrics A, S and P beside the published values, the training
    curves, the speed and the configuration. Accuracies come from fastcssl-eval; a run that was not evaluated shows only
    its training. The page is a single file; every figure is also saved as a PNG file.
    """

    runs: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        Flag("a folder written by fastcssl-train, or a folder of several seeds", "RUN"),
    ] = ()
    out: Annotated[
        Path | None, Flag("folder for the page and figures; by default RUN/report, or ./report for several runs", "DIR")
    ] = None


def main(args: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    return run_command(_run, args)


def _run(words: list[str], console: Console) -> int:
    if help.is_asked(words) or not words:
        console.print(help.page(ReportOptions, f"{PROG} RUN [RUN...] [--out DIR]", [f"{PROG} runs/pnr runs/cassle"]))
        return ExitCode.OK if words else ExitCode.MISTAKE
    options = tyro.cli(ReportOptions, prog=PROG, args=words)
    if not options.runs:
        raise UserError(f"Give a run: {PROG} RUN [RUN...]. See {PROG} --help.")
    # Imported here because matplotlib takes a second to load, and --help need not wait for it.
    from fastcssl.report import report_runs
    from fastcssl.report.summary import summary

    found = report_runs(options.runs, options.out)
    if not console.is_terminal:  # a log file has no fixed width
        console = Console(file=console.file, width=max(console.width, 160))
    console.print(summary(found))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
