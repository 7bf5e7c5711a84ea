"""fastcssl-doctor: reports what works on this machine, what is missing, and how to fix it."""

if __name__ == "__main__":  # before the imports, which take seconds
    from dataprep.startup import begin_command

    begin_command()

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
    """Checks the machine, the build, the packages and the GPUs, and compares the compiled operators with plain torch.

    With a GPU it also times the contrastive loss against eager torch, torch.compile and flash attention, and looks for
    data races if compute-sanitizer is installed. The exit status is 1 if a check failed, otherwise 0.
    """

    data: Annotated[Path | None, Flag("measure how fast this folder (or file) can be read", "DIR")] = None
    full: Annotated[bool, Flag("also run tests/gpu (minutes; needs a clone of the repository)")] = False
    json: Annotated[bool, Flag("print one JSON object instead of tables")] = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if help.is_version_asked(words):
        Console().print(help.version(), highlight=False)
        return ExitCode.OK
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
