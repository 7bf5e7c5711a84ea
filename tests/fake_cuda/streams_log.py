"""Reads the fake runtime's log of streams and events, inside a process that has it preloaded."""

import ctypes
import os
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """The calls that are logged, by the numbers of runtime.c."""

    RECORD = 1
    WAIT = 2
    STREAM_SYNC = 3
    EVENT_SYNC = 4
    DEVICE_SYNC = 5
    EVENT_QUERY = 6


class Entry(NamedTuple):
    """One call: `stream` and `event` are handles, 0 for the default stream or where there is none."""

    kind: Kind
    stream: int
    event: int


_LIBRARY = ctypes.CDLL(os.environ["LD_PRELOAD"])
_LIBRARY.fake_cuda_log_size.restype = ctypes.c_longlong
_LIBRARY.fake_cuda_log_read.argtypes = [ctypes.c_longlong, ctypes.c_longlong * 3]


def take() -> list[Entry]:
    """Returns the calls since the last time, and clears the log."""
    read = (ctypes.c_longlong * 3)()
    entries = []
    for at in range(_LIBRARY.fake_cuda_log_size()):
        _LIBRARY.fake_cuda_log_read(at, read)
        entries.append(Entry(Kind(read[0]), read[1], read[2]))
    _LIBRARY.fake_cuda_log_clear()
    return entries
