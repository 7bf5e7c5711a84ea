"""Runs commands of fastcssl through the fork server and watches what they use."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.shim.plan import library

_TESTS = Path(__file__).resolve().parent.parent
_SAMPLE_MS = 10
_DEADLINE_S = 120.0
_GRACE_S = 10.0  # for the processes that a command started, after it was killed


@dataclass(frozen=True)
class Ended:
    """How a command ended, what it printed, and the most that it used."""

    words: tuple[str, ...]
    status: int | None  # minus the signal's number if a signal ended it; None if it was killed at the deadline
    stdout: str
    stderr: str
    seconds: float
    peak_mb: float
    num_threads: int
    num_files: int
    left: tuple[str, ...]  # the command lines of processes that it left behind

    @property
    def printed(self) -> str:
        return self.stdout + self.stderr

    @property
    def last_line(self) -> str:
        """Return the last line that it printed, errors first."""
        lines = [line.strip() for line in (self.stderr.strip() or self.stdout.strip()).splitlines()]
        return lines[-1] if lines else "nothing was printed"


@dataclass
class Running:
    """A command that was started."""

    words: tuple[str, ...]
    pid: int
    log: Path
    _reap: Callable[[int], int]
    _began: float = field(default_factory=time.monotonic)
    _peak_kb: int = 0
    _threads: int = 0
    _files: int = 0
    _ended: Ended | None = None

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        return self._ended is None and not self._is_over(0)

    def begin(self) -> None:
        """Wait until the command itself has begun, after what belongs to the server."""
        while self.is_alive() and not self.log.with_suffix(".begun").exists():
            time.sleep(0.001)

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, deadline_s: float = _DEADLINE_S) -> Ended:
        """Wait until it has ended, and kill it at the deadline."""
        if self._ended is not None:
            return self._ended
        in_time = self._is_over(deadline_s)
        if not in_time:
            self.send(signal.SIGKILL)
            self._is_over(_GRACE_S)
        status = self._reap(self.pid)
        left = self._left_behind()
        self._ended = Ended(
            words=self.words,
            status=status if in_time else None,
            stdout=self.log.with_suffix(".out").read_text(errors="replace"),
            stderr=self.log.with_suffix(".err").read_text(errors="replace"),
            seconds=time.monotonic() - self._began,
            peak_mb=self._peak_kb / 1024,
            num_threads=self._threads,
            num_files=self._files,
            left=left,
        )
        return self._ended

    def _is_over(self, wait_s: float) -> bool:
        """Return whether it ended within some seconds, and note what it uses until then."""
        end = time.monotonic() + wait_s
        with contextlib.suppress(ProcessLookupError):
            watched = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(watched, select.POLLIN)
                while not poll.poll(min(_SAMPLE_MS, max(0.0, 1000 * (end - time.monotonic())))):
                    self._sample()
                    if time.monotonic() > end:
                        return False
            finally:
                os.close(watched)
        return True

    def _sample(self) -> None:
        with contextlib.suppress(OSError, KeyError, IndexError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            found = dict(line.split(":", 1) for line in lines)
            self._peak_kb = max(self._peak_kb, int(found["VmHWM"].split()[0]))
            self._threads = max(self._threads, int(found["Threads"]))
            self._files = max(self._files, len(os.listdir(f"/proc/{self.pid}/fd")))

    def _left_behind(self) -> tuple[str, ...]:
        """Return the command lines of the processes of its session that live on, and end them."""
        end = time.monotonic() + _GRACE_S
        while (left := _session(self.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return tuple(left.values())


def _session(leader: int) -> dict[int, str]:
    """Return the processes of a session by their number, each with its command line, without zombies."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] not in ("Z", "X"):
                    line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry)] = line.decode(errors="replace").strip()
    return found


class CommandServer:
    """The fork server, as seen from the experiments."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(_TESTS.parent), str(_TESTS)]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library()),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "COLUMNS": "200",
            "MPLBACKEND": "agg",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chaos.server", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._stream = ours.makefile("rw", encoding="utf-8")
        ours.close()
        self._num_started = 0

    def start(
        self,
        words: Sequence[object],
        folder: Path,
        *,
        plan: Path | None = None,
        environment: dict[str, str] | None = None,
        limits: dict[str, int] | None = None,
        logs: Path | None = None,
    ) -> Running:
        """Start a command, such as ["fastcssl-prep", "build", ...], in `folder`.

        `limits` are the names of resource limits with their values. What is printed is kept in files in `logs`, by
        default `folder`'s neighbour "logs".
        """
        self._num_started += 1
        logs = logs or folder.parent / f"{folder.name}-logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{self._num_started:05d}.out"
        for path in (log, log.with_suffix(".err")):
            path.touch()
        given = tuple(map(str, words))
        answer = self._ask(
            do="start",
            words=given,
            folder=str(folder),
            plan=None if plan is None else str(plan),
            environment=environment or {},
            limits=limits or {},
            stdout=str(log),
            stderr=str(log.with_suffix(".err")),
            begun=str(log.with_suffix(".begun")),
        )
        return Running(given, answer["pid"], log, self._reaped)

    def run(self, words: Sequence[object], folder: Path, **options: Any) -> Ended:
        """Run a command until it ends."""
        return self.start(words, folder, **options).wait()

    def _reaped(self, pid: int) -> int:
        return int(self._ask(do="reap", pid=pid)["status"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line:
            raise RuntimeError(f"The fork server ended with status {self._process.wait()}; what it printed says why.")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the server and everything that it started."""
        self._stream.close()
        self._process.wait()


_kept: list[CommandServer] = []


def server() -> CommandServer:
    """Return the server of this process, which is started when it is first needed."""
    if not _kept:
        _kept.append(CommandServer())
        atexit.register(_kept[0].close)
    return _kept[0]
