"""What a user's input or machine can cause: a sentence that names the thing and the remedy."""

import errno
from typing import ClassVar

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class UserError(Exception):
    """The base of every error that a user sees as a sentence, without a traceback; the command ends with status 2.

    Its text names the thing, what was seen, and the remedy.
    """

    everywhere: ClassVar[bool] = False  # every rank says it, since it may be true of one rank alone


class PrepError(UserError):
    """Something about the images, or about the folder to write."""


class Interrupted(Exception):
    """The user asked to stop; the work stopped between two samples."""


def output_error(out: object, error: OSError) -> PrepError:
    """What an operating-system error while writing below `out` means to the user."""
    if error.errno in _NO_SPACE:
        return PrepError(
            f"The disk of {out} is full ({error.strerror}). Whole shards are kept: free some space and run the "
            "same command again to go on."
        )
    if error.errno in _NO_PERMISSION:
        return PrepError(
            f"Cannot write into {out} ({error.strerror}). Choose a folder you may write to with --out, "
            "or change its permissions."
        )
    return PrepError(f"Writing into {out} failed: {error}. Check the path and the disk, then run the same command.")
