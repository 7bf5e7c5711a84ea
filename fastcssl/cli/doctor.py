"""fastcssl-doctor: what works here, what is missing, and what to do about it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from dataprep import help
from dataprep.help import Flag
from fastcssl import __version__
from fastcssl.cli.exit_codes import ExitCode
from fastcssl.doctor import Section

PROG = "fastcssl-doctor"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Looks at machine, build, packages and cards, and runs the operators against plain torch.

    On a GPU it also times them against eager torch, torch.compile and flash attention, and looks for races where
    compute-sanitizer is installed. Exit status: 0 when all is well, 1 when something failed.
    """

    data: Annotated[Path | None, Flag("a folder (or file) whose disk is timed", "DIR")] = None
    full: Annotated[bool, Flag("also run tests/gpu, from a clone of the repository: minutes")] = False
    json: Annotated[bool, Flag("print a JSON object in place of the tables")] = False


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if help.is_asked(words):
        usage = f"{PROG} [--data DIR] [--full] [--json]"
        Console().print(help.page(DoctorOptions, usage, [f"{PROG} --data /data/in100"]))
        return ExitCode.OK
    options = tyro.cli(DoctorOptions, args=words, prog=PROG, config=(tyro.conf.FlagCreatePairsOff,))
    console = Console(width=None if sys.stdout.isatty() else 110)
    with Console(stderr=True).status("") as status:
        import torch

        from fastcssl.doctor.checks import checks
        from fastcssl.doctor.show import show_section, show_verdict

        has_gpu = torch.cuda.is_available()
        about = f"fastcssl {__version__}, torch {torch.__version__}"
        if not options.json:
            console.print(about, highlight=False)
        sections: list[Section] = []
        for title, check in checks(options.data, full=options.full):
            status.update(title)
            sections.append(check())
            if not options.json:
                show_section(console, sections[-1])
    is_well = all(finding.status != "failed" for section in sections for finding in section.findings)
    if options.json:
        found = {"about": about, "gpu": has_gpu, "well": is_well, "sections": [each.as_json() for each in sections]}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        show_verdict(console, sections, has_gpu=has_gpu)
    return ExitCode.OK if is_well else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
