"""Errors that a user's input or machine can cause. Each is a sentence that names the thing and the remedy."""

import errno
import resource
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


def file_limit(error: OSError) -> str:
    """Returns what to do if the limit of open files is the cause of an error, and "" if it is not."""
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"This process may have only {limit} files open at the same time (ulimit -n). "
            "Raise the limit, for example with ulimit -n 4096, and run the same command again."
        )
    if error.errno == errno.ENFILE:
        return (
            "This machine has as many open files as it allows (fs.file-max). "
            "End other programs or raise that limit, and run the same command again."
        )
    return ""


def unreadable(path: object, error: OSError | ValueError | EOFError, remedy: str) -> str:
    """Returns the sentences for a file that cannot be read. The remedy is left out if the limit of files is the cause.

    A library may wrap the error of the operating system, or raise its own for a file whose content is wrong.
    """
    if isinstance(error, OSError):
        return f"{path} cannot be read ({error.strerror or error}). {file_limit(error) or remedy}"
    return f"{path} cannot be read ({error}). {remedy}"


def output_error(out: object, error: OSError) -> PrepError:
    """Returns the error to show the user when the operating system fails to write below `out`."""
    if error.errno in _NO_SPACE:
        return PrepError(
            f"The disk of {out} is full ({error.strerror}). Complete shards are kept. Free some space and run "
            "the same command again to continue."
        )
    if limit := file_limit(error):
        return PrepError(f"Writing into {out} failed: {error.strerror}. {limit} Complete shards are kept.")
    if error.errno in _NO_PERMISSION:
        return PrepError(
            f"Cannot write into {out} ({error.strerror}). Choose a folder that you may write to with --out, "
            "or change its permissions."
        )
    return PrepError(
        f"Writing into {out} failed: {error}. Check the path and the disk, then run the same command again."
    )
