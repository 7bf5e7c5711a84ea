"""Notices on the CPU that a rank is gone, while this one may be waiting for it inside a collective on the GPU.

NCCL often does not notice that a peer has died: its kernel waits, and so does whoever asks the GPU for a value. Each
rank therefore listens to the next one over a gloo connection of its own, on which a rank speaks only when it leaves in
good order. If the connection closes before that, the NCCL communicators are aborted. The waiting process continues to
its next collective, which raises RankLost. It ends, its own connection closes, and the rank before it notices.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

_A_RUN = timedelta(days=365)  # longer than any; a closed connection is noticed at once, whatever the timeout
_FAREWELL_S = 10.0


class Failing(Protocol):
    """An error of torch's NCCL back end: an enumeration, of which SUCCESS means none."""

    @property
    def name(self) -> str: ...


class Communicators(Protocol):
    """The part of torch's NCCL back end that is used here."""

    def abort(self) -> None: ...
    def get_error(self) -> Failing: ...


class PeerWatch:
    """Listens to the next rank in a thread until one of both leaves. All ranks must make theirs together."""

    def __init__(self, rank: int, size: int, communicators: Callable[[], Communicators]) -> None:
        self._next, self._previous = (rank + 1) % size, (rank - 1) % size
        self._communicators = communicators
        self._lost = ""
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_A_RUN))
        self._thread = threading.Thread(target=self._listen, name="peer watch", daemon=True)
        self._thread.start()

    def trouble(self) -> str:
        """Returns why no collective can succeed any more, or "" if none is known. Does not wait for the GPU."""
        if self._lost:
            return self._lost
        error = self._communicators().get_error()
        return "" if error.name == "SUCCESS" else f"NCCL reports {error.name}"

    def close(self) -> None:
        """Says farewell to the rank that listens, and waits for that of the next one."""
        try:
            dist.send(torch.zeros(1), dst=self._previous, group=self._group)
        except RuntimeError:
            return  # it is gone: nobody listens
        self._thread.join(_FAREWELL_S)

    def _listen(self) -> None:
        try:
            dist.recv(torch.zeros(1), src=self._next, group=self._group)
        except RuntimeError:
            self._lost = f"rank {self._next} closed its connection"
            self._communicators().abort()
