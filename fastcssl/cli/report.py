"""fastcssl-report RUN [RUN...] [--out DIR]: tables and pictures of runs, as one page and in the terminal."""

import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from fastcssl.errors import UserError


def main(args: list[str] | None = None) -> int:
    return tyro.cli(_report, prog="fastcssl-report", args=args, config=(tyro.conf.FlagConversionOff,))


def _report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN...]")],
    /,
    out: Path | None = None,
) -> int:
    """Draw runs: accuracies after each task, A, S and P beside the published values, training, speed, configuration.

    Args:
        runs: Folders that fastcssl-train wrote. One with several seeds in it stands for all of them.
        out: Where the page and its pictures go. Default: RUN/report, or ./report for several runs.
    """
    try:
        if not runs:
            raise UserError("Give one run or more: fastcssl-report RUN [RUN...].")
        # Here, as drawing takes a second to load and --help need not wait for it.
        from fastcssl.report import report
        from fastcssl.report.summary import summary

        console = Console()
        found = report(runs, out)
        if not console.is_terminal:  # a log has no edge to keep to
            console = Console(width=max(console.width, 160))
        console.print(summary(found))
    except UserError as error:
        errors = Console(stderr=True, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
