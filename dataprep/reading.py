"""Reads parts of files that somebody may replace or cut short meanwhile.

Nothing here is mapped: a mapped file that becomes shorter ends the process with SIGBUS, or reads as zeros. And no file
stays open, because a data set may have more shards than a process may have open files.
"""

import os
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt


def read_at(path: Path, offset: int, num_bytes: int) -> bytes:
    """Returns `num_bytes` bytes of a file. Raises OSError if it does not have them."""
    with opened(path) as file:
        _check(path, file, offset, num_bytes)
        content = b""
        while len(content) < num_bytes:  # once, unless it is more than 2 GB
            more = os.pread(file, num_bytes - len(content), offset + len(content))
            if not more:
                raise _shrunk(path, offset + len(content))
            content = content + more if content else more
    return content


def read_rows(path: Path, offset: int, row_N: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
    """Fills out[i] with the row row_N[i] of an array of such rows that begins at `offset` in a file.

    Raises OSError if the file does not have them. Consecutive rows are read at once.
    """
    row_bytes = out[:1].nbytes
    begins = np.flatnonzero(np.diff(row_N, prepend=row_N[:1] - 2) != 1)
    with opened(path) as file:
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(row_N)], strict=True):
            at = offset + int(row_N[begin]) * row_bytes
            _check(path, file, at, (end - begin) * row_bytes)
            _fill(path, file, at, out[begin:end].reshape(-1).data)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yields the descriptor of a file that is open inside the `with` block."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _check(path: Path, file: int, offset: int, num_bytes: int) -> None:
    """Refuses a range outside the file before memory is taken for it."""
    size = os.fstat(file).st_size
    if offset < 0 or num_bytes < 0 or offset + num_bytes > size:
        raise OSError(f"{path} has {size} bytes, but {num_bytes} bytes at byte {offset} are needed")


def _fill(path: Path, file: int, offset: int, room: memoryview) -> None:
    done = 0
    while done < len(room):  # one call reads at most 2 GB
        got = os.preadv(file, [room[done:]], offset + done)
        if got == 0:
            raise _shrunk(path, offset + done)
        done += got


def _shrunk(path: Path, size: int) -> OSError:
    return OSError(f"{path} ended at byte {size} while it was read")


def array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Returns shape, whether the order is Fortran's, and type of a .npy file. The next byte is the array's first.

    Raises ValueError whatever is wrong: numpy tokenizes a header that it cannot parse, with errors of its own.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(file)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(file)
    except (tokenize.TokenError, SyntaxError, TypeError, EOFError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"its header is damaged: {error}") from None
    raise ValueError(f"it has version {version} of the format, which is not used here")
