"""Signals that ask a run to stop: they set a flag, and the training loop looks at it between two steps."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_Handler = Callable[[int, FrameType | None], object] | int | None


class Stop:
    """`with Stop() as stop: ...` and `stop.requested` is the number of the signal, or 0.

    A second Ctrl-C does not wait for the step. Inside another one, it knows what that one was asked. Only the main
    thread can have handlers; elsewhere nothing is caught.
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
            # None: it was installed by something other than Python, which cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _ask(self, number: int, _: FrameType | None) -> None:
        # The first one is remembered, but a batch system's early warning gives way to the real thing.
        if self.requested in (0, signal.SIGUSR1):
            self.requested = number
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
