"""Shows how a campaign proceeds: a bar in a terminal, and otherwise a line for each broken fault and each minute."""

import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from chaos.records import Record

_LINE_S = 60.0


class Progress:
    """Counts the faults of a campaign while it runs."""

    def __init__(self, out: Path, seconds: float, skipped: dict[str, str]) -> None:
        self.console = Console(soft_wrap=not sys.stdout.isatty())
        self._seconds, self._began = seconds, time.monotonic()
        self._num_faults = self._num_broken = 0
        self._said = 0.0
        for name, reason in skipped.items():
            self.console.print(f"skipped: {name}: {escape(reason)}", highlight=False)
        self.console.print(
            f"{seconds / 60:.1f} minutes of faults; one line each in {out / 'faults.jsonl'}", highlight=False
        )
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=seconds)

    def __enter__(self) -> "Progress":
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def add(self, record: Record) -> None:
        """Count a fault, and show it if it broke something."""
        self._num_faults += record.injected
        passed = time.monotonic() - self._began
        if not record.held:
            self._num_broken += 1
            text = f"broken: {record.experiment}, {record.name}: {'; '.join(record.broken)}"
            self.console.print(escape(text), style="red", highlight=False)
        counts = f"{self._num_faults:,} faults, {self._num_broken} broken"
        self._bar.update(self._task, completed=min(passed, self._seconds), description=f"{counts}, {record.experiment}")
        if not self.console.is_terminal and passed - self._said >= _LINE_S:
            self._said = passed
            self.console.print(f"{passed / 60:.1f} min: {counts}", highlight=False)
