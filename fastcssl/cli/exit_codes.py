"""How commands end.

An error that a user or a machine can cause ends in one sentence and an exit status. A bug ends in a traceback.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum

from rich.console import Console
from rich.markup import escape

from dataprep import help
from fastcssl.errors import Diverged, UserError
from fastcssl.runs.interrupt import Stop


class ExitCode(IntEnum):
    """The exit statuses of all commands (docs/resuming.md). After a signal the status is 128 + the signal's number."""

    OK = 0
    FAILED = 1  # a loss that is not finite, a lost rank, out of memory; for the doctor: a check failed
    MISTAKE = 2  # something that the user can correct: the command line, the data or a file
    INTERRUPTED = 130  # Ctrl-C at a point where there is nothing to save: 128 + SIGINT


def after_signal(signal: int) -> int:
    """Returns the exit status of a command that was ended by a signal, as shells report it."""
    return 128 + signal


class Ended(Exception):
    """Ends a command with a sentence and an exit status.

    everywhere: every rank prints the sentence, because it may concern only one of them.
    """

    def __init__(self, text: str, status: ExitCode, *, everywhere: bool = False) -> None:
        super().__init__(text)
        self.status, self.everywhere = status, everywhere


class _Said(Exception):
    """Carries the exit status when the sentence has already been printed."""


def run_command(run: Callable[[list[str], Console], int], args: Sequence[str] | None) -> int:
    """Runs a command on its words, by default those of the command line, and returns its exit status.

    Every command answers --version in the same way.
    """
    words = sys.argv[1:] if args is None else list(args)
    if help.is_version_asked(words):
        run = _show_version
    return ended(lambda console: run(words, console))


def _show_version(_: list[str], console: Console) -> int:
    console.print(help.version(), highlight=False)
    return ExitCode.OK


def ended(run: Callable[[Console], int]) -> int:
    """Runs a command with a console to print on, and returns its exit status."""
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
    # Under torchrun there is one process per GPU; what holds for all of them is printed once.
    if (rank := _rank()) == 0 or error.everywhere:
        who = f"rank {rank}: " if rank else ""
        errors = Console(stderr=True, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {who}{escape(str(error))}", highlight=False)
    return error.status if isinstance(error, Ended) else ExitCode.MISTAKE


@contextmanager
def together(connection: AbstractContextManager[object]) -> Iterator[None]:
    """Keeps the ranks connected inside a `with` block, and prints an error before a signal can end this process.

    When a rank dies, torchrun immediately ends the others, and they are the ones that can say how to resume.
    """
    with connection, Stop():
        try:
            with explained():
                yield
        except (UserError, Ended) as error:
            raise _Said(_say(error)) from None


@contextmanager
def explained() -> Iterator[None]:
    """Turns errors that a user or a machine can cause into a sentence. Any other error keeps its traceback."""
    import torch

    from fastcssl.distributed.world import RankLost, watched

    try:
        with watched("a collective", by_type=True):  # of torch's own, such as those of SyncBatchNorm
            yield
    except RankLost as error:
        # Rank 0 may be the one that is lost.
        raise Ended(f"{error} Run the same command again to resume.", ExitCode.FAILED, everywhere=True) from None
    except Diverged as error:
        raise Ended(str(error), ExitCode.FAILED) from None
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise Ended(
            f"{reason}. Use a smaller --batch-size, more processes or --accumulate 2; --dry-run estimates the memory.",
            ExitCode.FAILED,
            everywhere=True,
        ) from None
