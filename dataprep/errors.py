"""Errors that a user's input or machine can cause. Each is a sentence that names the thing and the remedy."""

import errno
from typing import ClassVar

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


class UserError(Exception):
    """The base of all errors that are shown as a sentence, without a traceback. The command then exits with status 2.

    The text names the thing, what was seen, and the remedy.
    """

    everywhere: ClassVar[bool] = False  # true: every rank prints it, because it may concern a single rank


class PrepError(UserError):
    """Something is wrong with the images, or with the folder to write."""


class Interrupted(Exception):
    """The user asked to stop; the work stopped between two samples."""


def output_error(out: object, error: OSError) -> PrepError:
    """Returns the error to show the user when the operating system fails to write below `out`."""
    if error.errno in _NO_SPACE:
        return PrepError(
            f"The disk of {out} is full ({error.strerror}). Complete shards are kept. Free some space and run "
            "the same command again to continue."
        )
    if error.errno in _NO_PERMISSION:
        return PrepError(
            f"Cannot write into {out} ({error.strerror}). Choose a folder that you may write to with --out, "
            "or change its permissions."
        )
    return PrepError(
        f"Writing into {out} failed: {error}. Check the path and the disk, then run the same command again."
    )
