"""How commands end: a sentence and an exit status for what a user or a machine can cause, a traceback for a bug."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from fastcssl.errors import Diverged, UserError


class Ended(Exception):
    """A sentence and the command's exit status. `everywhere`: said by every rank, as it may be true of one alone."""

    def __init__(self, text: str, status: int, *, everywhere: bool = False) -> None:
        super().__init__(text)
        self.status, self.everywhere = status, everywhere


def ended(run: Callable[[Console], int]) -> int:
    """The exit status of a command that gets a console to speak on."""
    # Under torchrun there is one process for each GPU; what holds for all is said once.
    rank = int(os.environ.get("RANK", "0"))
    try:
        return run(Console(quiet=rank > 0))
    except (UserError, Ended) as error:
        if rank == 0 or (isinstance(error, Ended) and error.everywhere):
            who = f"rank {rank}: " if rank else ""
            errors = Console(stderr=True, soft_wrap=True)
            errors.print(f"[bold red]error:[/] {who}{escape(str(error))}", highlight=False)
        return error.status if isinstance(error, Ended) else 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def explained() -> Iterator[None]:
    """What a user or a machine can cause becomes a sentence; anything else keeps its traceback."""
    import torch

    from dataprep.errors import PrepError
    from dataprep.manifest import ManifestError
    from fastcssl.checkpoint import CheckpointError
    from fastcssl.dist import RankLost
    from fastcssl.loaders import LoaderError
    from fastcssl.nets import EncoderFileError
    from fastcssl.runlog import RunLogError

    try:
        yield
    except RankLost as error:
        raise Ended(f"{error} To go on, run the same command again.", 1) from None
    except Diverged as error:
        raise Ended(str(error), 1) from None
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise Ended(
            f"{reason}. Use a smaller --batch-size, more processes or --accumulate 2; --dry-run estimates the memory.",
            1,
            everywhere=True,
        ) from None
    except (LoaderError, CheckpointError) as error:
        raise Ended(str(error), 2, everywhere=True) from None
    except (PrepError, ManifestError, RunLogError, EncoderFileError) as error:
        raise UserError(str(error)) from None
