"""Catches the signals that ask a run to stop. They set a flag, which the training loop checks between two steps."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_Handler = Callable[[int, FrameType | None], object] | int | None


class Stop:
    """A context manager that catches signals: in `with Stop() as stop`, `stop.requested` is the signal's number, or 0.

    A second Ctrl-C raises KeyboardInterrupt immediately. A Stop inside another one starts with the outer one's request.
    Only the main thread can install handlers; in other threads a Stop catches nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = 0
        self._num_interrupts = 0
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = before = signal.signal(number, self._ask)
                outer = getattr(before, "__self__", None)
                if isinstance(outer, Stop):
                    self.requested = outer.requested
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, so it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _ask(self, number: int, _: FrameType | None) -> None:
        # The first signal counts, but a later signal replaces SIGUSR1, which batch systems send as an early warning.
        if self.requested in (0, signal.SIGUSR1):
            self.requested = number
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
