"""Shows progress: a live bar on a terminal, a plain line every few seconds elsewhere."""

import re
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_LINE_SECONDS = 5.0
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # a terminal obeys these; lines may end


def human_bytes(count: float) -> str:
    """Returns a number of bytes as text, such as "1.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun, such as "1 image" or "2,000 images"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def human_seconds(seconds: float) -> str:
    """Returns a duration as text, such as "2m 05s"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{seconds:.1f}s"


def literal(text: str) -> str:
    """Returns a text, such as a file name, with everything escaped that rich or a terminal would interpret."""
    plain = text.encode("utf-8", "backslashreplace").decode()
    return escape(_CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), plain))


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        per_image = task.fields["num_bytes"] / max(task.completed, 1)
        return Text(f"{speed:,.0f} images/s · {speed * per_image / 1e6:,.1f} MB/s", style="cyan")


class _Live(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class OnTerminal:
    """Draws while a `with` block runs, and stops however the block ends. `_live` is None if there is no terminal."""

    _live: _Live | None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()


class ImageMeter(OnTerminal):
    """Counts the images and bytes of a job and shows them under a changing label."""

    def __init__(self, console: Console, total: int, *, resumed: int = 0, resumed_bytes: int = 0) -> None:
        self._console = console
        self._total = total
        self._done, self._num_bytes = resumed, resumed_bytes
        self._resumed, self._resumed_bytes = resumed, resumed_bytes
        self._label = ""
        self._began = self._last_line = self._last_update = time.monotonic()
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                _RateColumn(),
                TextColumn("[dim]ETA"),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
                expand=True,
            )
            self._id = self._live.add_task("", total=total, completed=resumed, num_bytes=resumed_bytes)

    def label(self, text: str) -> None:
        """Names the current piece of work."""
        if text == self._label:
            return
        self._label = text
        if self._live:
            self._live.update(self._id, description=text)

    def advance(self, num_images: int = 1, num_bytes: int = 0) -> None:
        """Counts further images and bytes."""
        self._done += num_images
        self._num_bytes += num_bytes
        now = time.monotonic()
        # rich takes a lock and reads the clock on every call, so update at most ten times per second.
        if self._live and now - self._last_update > 0.1:
            self._last_update = now
            self._live.update(self._id, completed=self._done, num_bytes=self._num_bytes)
        elif not self._live and now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            seconds = now - self._began
            rate = (self._done - self._resumed) / seconds
            megabytes = (self._num_bytes - self._resumed_bytes) / seconds / 1e6
            left = human_seconds((self._total - self._done) / rate) if rate else "unknown"
            self._console.print(
                f"{self._label}: {self._done:,}/{self._total:,} images, {rate:,.0f} images/s, "
                f"{megabytes:,.1f} MB/s, ETA {left}",
                highlight=False,
            )
