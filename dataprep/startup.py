"""Prepares a command: how signals end it before it handles them itself, and how its threads use the cores.

Nothing slow is imported here, because a command calls `begin_command` before it imports anything else.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from dataprep.cores import share_cores

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SHOW_CURSOR = "\x1b[?25h"
_is_ending = threading.Lock()


def begin_command() -> None:
    """Catches signals and makes threads patient. Must precede `import torch`, which reads the environment."""
    catch_signals()
    share_cores()


def catch_signals() -> None:
    """Lets SIGINT, SIGTERM and SIGUSR1 end this process with a sentence and the status 128 + signal.

    A command that can save its work installs its own handlers later, and puts these back when it is done.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    # Python calls a handler only between two of its own instructions. The thread also ends a process that waits in C
    # code, such as for other ranks.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals do not concern its parent
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()


def _watch(reader: int) -> None:
    while received := os.read(reader, 1):
        number = received[0]
        if number in _SIGNALS and signal.getsignal(number) is _end:
            _end(number, None)


def _end(number: int, frame: FrameType | None) -> None:
    if not _is_ending.acquire(blocking=False):
        return
    if frame is not None:  # in the main thread; elsewhere the flush could wait for that thread
        with suppress(Exception):
            sys.stdout.flush()
    if os.environ.get("RANK", "0") == "0":
        cursor = _SHOW_CURSOR if os.isatty(2) else ""
        name = signal.Signals(number).name
        text = f"{cursor}Stopped by {name}. Finished work is kept; run the same command again to continue.\n"
        with suppress(OSError):
            os.write(2, text.encode())
    os._exit(128 + number)
