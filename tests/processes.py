"""Functions of a test, run on several ranks at once: real processes connected by gloo, kept for the whole session.

`run(4, function, *args)` calls function(world, *args) on four ranks and returns what each returned. The function and
what goes in and out are pickled, so it stands at the top of a test module. A call costs a few milliseconds, as the
processes and their process group stay. Whatever goes wrong on a rank ends them all and is reported with its traceback,
or with its stack if it hangs; the next call starts new ones, forked from a process that has imported torch already.
"""

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Never

import torch
import torch.distributed as dist

from fastcssl.distributed.world import World

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    ["torch", "torch.distributed", "torchvision", "pytest", "fastcssl.distributed.world"]
)
_GRACE_S = 0.5  # for the other ranks to say what they saw, once one has failed
_SILENT = "has not returned"
_kept: dict[int, "Ranks"] = {}


class RanksFailed(AssertionError):
    """What every failed rank has to say."""


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    return ranks(world_size).run(function, *args, timeout_s=timeout_s)


def ranks(world_size: int) -> "Ranks":
    """Those of the session, started when first asked for and again after a failure."""
    if world_size not in _kept or _kept[world_size].closed:
        _kept[world_size] = Ranks(world_size)
    return _kept[world_size]


class Ranks:
    def __init__(self, size: int, *, timeout_s: float = 60.0) -> None:
        """`timeout_s`: after which a collective gives up waiting for another rank."""
        self.size, self.closed = size, False
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            mine, theirs = _FORKSERVER.Pipe()
            process = _FORKSERVER.Process(
                target=_serve, args=(World(rank, size), self._folder, timeout_s, theirs), daemon=True
            )
            process.start()
            theirs.close()  # the only other end is the child's: its death is the end of the file
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        self.send(function, *args)
        return self.results(range(self.size), timeout_s=timeout_s)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        request = pickle.dumps((function, args))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                self._fail({rank: "is gone"})

    def results(self, of: Iterable[int], *, timeout_s: float = 120.0) -> list[Any]:
        """What these ranks returned. Those left out, because they are meant to be lost, cannot be used again."""
        of = list(of)
        waiting = {self._pipes[rank]: rank for rank in of}
        returned: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(_GRACE_S)
                    good, value = False, f"ended with status {self._processes[rank].exitcode}"
                (returned if good else failed)[rank] = value
            if failed:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failed or waiting:
            self._fail({**dict.fromkeys(waiting.values(), _SILENT), **failed})
        return [returned[rank] for rank in of]

    def _fail(self, reports: dict[int, str]) -> Never:
        for rank in (rank for rank, report in reports.items() if report == _SILENT):
            if self._processes[rank].exitcode is None:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # prints its stack
        time.sleep(_GRACE_S)
        saying: dict[str, list[str]] = {}  # mostly all say the same
        for rank, report in sorted(reports.items()):
            printed = self._folder / f"rank{rank}.txt"
            text = printed.read_text(errors="replace")[-4000:] if printed.exists() else ""
            saying.setdefault(f"{report}\n{text}".strip(), []).append(str(rank))
        self.close()
        lines = [f"rank {', '.join(said_by)} of {self.size} {text}" for text, said_by in saying.items()]
        raise RanksFailed("\n\n".join(lines))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@atexit.register
def _close_all() -> None:
    for kept in _kept.values():
        kept.close()


def _serve(world: World, folder: Path, timeout_s: float, pipe: Connection) -> None:
    """A rank's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test run ends it
    printed = (folder / f"rank{world.rank}.txt").open("w")
    for stream in (1, 2):
        os.dup2(printed.fileno(), stream)
    faulthandler.enable(printed)
    faulthandler.register(signal.SIGUSR1, printed)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name resolves to
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            function, args = pickle.loads(request)
            answer = pickle.dumps((True, function(world, *args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
