"""Prints the doctor's findings on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dataprep.progress import counted
from fastcssl.doctor import Finding, Section

MARKS = {"ok": ("✓", "green"), "note": ("•", "yellow"), "failed": ("✗", "bold red")}
PLAIN_MARKS = {"ok": "ok", "note": "note", "failed": "FAILED"}


def show_section(console: Console, section: Section) -> None:
    """Prints a title and a table with one row per finding."""
    console.print()
    console.print(Text(section.title, style="bold"))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, min_width=1 if console.is_terminal else 6)
    table.add_column(no_wrap=True, min_width=20, style="bold")
    table.add_column(overflow="fold")
    for finding in section.findings:
        table.add_row(_mark(console, finding), finding.name, _text(finding))
    console.print(Padding(table, (0, 0, 0, 1)))


def _mark(console: Console, finding: Finding) -> Text:
    if not console.is_terminal:
        return Text(PLAIN_MARKS[finding.status])
    sign, style = MARKS[finding.status]
    return Text(sign, style=style)


def _text(finding: Finding) -> Text:
    text = Text(finding.text, style="red" if finding.status == "failed" else "")
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}", style="cyan" if finding.status == "failed" else "dim")
    return text


def show_verdict(console: Console, sections: Sequence[Section], *, has_gpu: bool) -> None:
    """Prints what failed, or that nothing did."""
    found = [finding for section in sections for finding in section.findings]
    broken = [finding.name for finding in found if finding.status == "failed"]
    num_ok, num_notes = (sum(finding.status == status for finding in found) for status in ("ok", "note"))
    console.print()
    if broken:
        console.print(Text(f"{len(broken)} failed: {', '.join(broken)}.", style="bold red"))
    else:
        passed = f"{counted(num_ok, 'check')} passed, {counted(num_notes, 'note')}."
        console.print(Text("No problems found.", style="bold green"), Text(passed))
    if not has_gpu:
        console.print(
            Text(
                "No GPU was tested. The CPU's operators were compared with float64 instead. The test suite (make test) "
                "runs the CUDA kernels in an emulator, without a GPU.",
                style="dim",
            )
        )
