"""Runs `fastcssl-train` on ranks that are processes of this machine, forked from one that has imported torch."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.small_training import reached_step

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    ["torch", "torch.distributed", "torchvision", "fastcssl.cli.train", "fastcssl.api", "fastcssl.train.loop"]
)
DEADLINE_S = 240.0  # generous: the machine may be busy
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Network:
    """What the ranks talk over: the loopback, or an interface of the network namespaces that the ranks are in."""

    master: str = "127.0.0.1"
    interface: str = "lo"
    namespaces: tuple[str, ...] = ()  # one path for each rank, or none


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended. A status of None means that the rank had to be killed at the deadline."""

    statuses: tuple[int | None, ...]
    printed: tuple[str, ...]

    @property
    def last_line(self) -> str:
        lines = [line for text in self.printed for line in text.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line]
        return (errors or lines or [""])[-1].strip()

    def broken(self, *, expected: Sequence[Sequence[int]]) -> list[str]:
        """Returns what is wrong: a hang, a status that is not among the expected ones of its rank, a traceback."""
        found = []
        for rank, (status, wanted, text) in enumerate(zip(self.statuses, expected, self.printed, strict=True)):
            if status is None:
                found.append(f"Rank {rank} did not end.")
            elif status not in wanted:
                found.append(f"Rank {rank} ended with {status} instead of {' or '.join(map(str, wanted))}.")
            if "Traceback" in text:
                found.append(f"Rank {rank} printed a traceback: {text.strip().splitlines()[-1]}")
        return found


class RankProcesses:
    """Starts one process per rank. `timeout_s` replaces the ten minutes that a rank waits for another."""

    def __init__(
        self, words: Sequence[str], size: int, folder: Path, *, timeout_s: float = 60.0, network: Network | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.size, self._out = size, Path(words[list(words).index("--out") + 1])
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._logs = [folder / f"rank{rank}.txt" for rank in range(size)]
        self._processes = [
            _FORKSERVER.Process(target=_train, args=(list(words), place, log, timeout_s), daemon=True)
            for place, log in zip(_places(size, port, network or Network()), self._logs, strict=True)
        ]
        for log, process in zip(self._logs, self._processes, strict=True):
            log.write_bytes(b"")  # a rank may be killed before it can print
            process.start()

    def signal(self, rank: int, number: int) -> bool:
        """Sends a signal to one rank and returns whether the rank was still there."""
        process = self._processes[rank]
        if not process.is_alive() or process.pid is None:
            return False
        os.kill(process.pid, number)
        return True

    def await_step(self, step: int) -> bool:
        """Waits until a line of metrics says that this step was done. Returns False if a rank ended before."""
        return self._await(lambda: reached_step(self._out) >= step)

    def _await(self, holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and all(process.is_alive() for process in self._processes):
            if holds():
                return True
            time.sleep(0.005)
        return False

    def await_end(self, rank: int) -> None:
        """Waits until this rank has ended, or the deadline has passed."""
        self._processes[rank].join(DEADLINE_S)

    def wait(self) -> Ended:
        """Waits for all ranks. Those that do not end within the deadline are killed."""
        deadline = time.monotonic() + DEADLINE_S
        statuses: list[int | None] = []
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            statuses.append(process.exitcode)
        self.kill()
        return Ended(tuple(statuses), tuple(log.read_text(errors="replace") for log in self._logs))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def trained(words: Sequence[str], size: int, folder: Path, network: Network | None = None) -> Ended:
    """Runs a training to its end, on one or more ranks."""
    return RankProcesses(words, size, folder, network=network).wait()


@dataclass(frozen=True)
class _Place:
    """What a rank's environment says, and the network namespace that it enters, if any."""

    environment: dict[str, str]
    namespace: str | None


def _places(size: int, port: int, network: Network) -> list[_Place]:
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": network.master, "MASTER_PORT": str(port)}
    shared["GLOO_SOCKET_IFNAME"] = network.interface
    namespaces = network.namespaces or (None,) * size
    return [
        _Place(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, namespace)
        for rank, namespace in enumerate(namespaces)
    ]


def _train(words: list[str], place: _Place, log: Path, timeout_s: float) -> None:
    """Is a rank: `python -m fastcssl.cli.train WORDS`, with a shorter timeout."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if place.namespace is not None:
        _enter(place.namespace)
    os.environ.update(place.environment)
    sys.exit(_main(words, timeout_s))


def _enter(namespace: str) -> None:
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"The network namespace {namespace} cannot be entered")


def _main(words: list[str], timeout_s: float) -> int:
    """Runs fastcssl-train with another time than ten minutes after which a rank counts as lost."""
    import torch

    from fastcssl.cli import train
    from fastcssl.distributed import world

    torch.set_num_threads(1)
    world.connected.__wrapped__.__kwdefaults__["timeout_s"] = timeout_s  # type: ignore[attr-defined]
    return train.main(words)
