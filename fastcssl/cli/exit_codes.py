"""How commands end: a sentence and an exit status for what a user or a machine can cause, a traceback for a bug."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum

from rich.console import Console
from rich.markup import escape

from fastcssl.errors import Diverged, UserError
from fastcssl.runs.interrupt import Stop


class ExitCode(IntEnum):
    """The exit statuses of all commands (docs/resuming.md). One that a signal ended has 128 + its number."""

    OK = 0
    FAILED = 1  # a loss that is not finite, a lost rank, no memory left; of the doctor, something that does not work
    MISTAKE = 2  # something to correct: in the words, the data or a file
    INTERRUPTED = 130  # Ctrl-C where nothing can be kept: 128 + SIGINT


def after_signal(signal: int) -> int:
    """Returns the exit status of a command that a signal ended, as a shell gives it."""
    return 128 + signal


class Ended(Exception):
    """A sentence and the command's exit status. `everywhere`: said by every rank, as it may be true of one alone."""

    def __init__(self, text: str, status: ExitCode, *, everywhere: bool = False) -> None:
        super().__init__(text)
        self.status, self.everywhere = status, everywhere


class _Said(Exception):
    """The exit status, when the sentence is out already."""


def ended(run: Callable[[Console], int]) -> int:
    """Runs a command, which gets a console to speak on, and returns its exit status."""
    try:
        return run(Console(quiet=_rank() > 0))
    except (UserError, Ended) as error:
        return _say(error)
    except _Said as said:
        return int(said.args[0])
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(error: UserError | Ended) -> ExitCode:
    """Prints the sentence and returns the exit status."""
    # Under torchrun there is one process for each GPU; what holds for all is said once.
    if (rank := _rank()) == 0 or error.everywhere:
        who = f"rank {rank}: " if rank else ""
        errors = Console(stderr=True, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {who}{escape(str(error))}", highlight=False)
    return error.status if isinstance(error, Ended) else ExitCode.MISTAKE


@contextmanager
def together(connection: AbstractContextManager[object]) -> Iterator[None]:
    """Keeps the ranks connected for the length of a block, and says last words before a signal may end this one.

    When a rank dies, torchrun ends the others at once, and they are the ones that know how to go on.
    """
    with connection, Stop():
        try:
            with explained():
                yield
        except (UserError, Ended) as error:
            raise _Said(_say(error)) from None


@contextmanager
def explained() -> Iterator[None]:
    """Turns what a user or a machine can cause into a sentence; anything else keeps its traceback."""
    import torch

    from fastcssl.distributed.world import RankLost, watched

    try:
        with watched("a collective", by_type=True):  # of torch's own, such as those of SyncBatchNorm
            yield
    except RankLost as error:
        raise Ended(f"{error} To go on, run the same command again.", ExitCode.FAILED) from None
    except Diverged as error:
        raise Ended(str(error), ExitCode.FAILED) from None
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise Ended(
            f"{reason}. Use a smaller --batch-size, more processes or --accumulate 2; --dry-run estimates the memory.",
            ExitCode.FAILED,
            everywhere=True,
        ) from None
