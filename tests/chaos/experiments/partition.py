"""Cuts the network between two ranks, which train in network namespaces with a cable (veth) between them."""

import itertools
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.experiment import Fault, Outcome
from chaos.rank_processes import Ended, Network, RankProcesses, trained
from chaos.small_training import SmallTraining, differences, made_once, prepare_data, reached_step

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_TIMEOUT_S = 15.0  # instead of ten minutes
_RESUME = "Run the same command again to resume."
_ROUNDS = 6


@dataclass(frozen=True)
class PartitionFault(Fault):
    """Says what happens to the cable, after which step; `netem` has the words for `tc qdisc add ... netem`."""

    action: str = "cut"
    step: int = 1
    delay_s: float = 0.0
    netem: str = ""


_KINDS = {
    "cut": "the network between two ranks is cut for good",
    "one end": "one end of the network between two ranks goes down for good",
    "gap": "the network between two ranks is cut for two seconds",
    "delay": "packets between two ranks are delayed",
    "loss": "packets between two ranks are lost",
}
_NETEM = {"delay": "delay 40ms 20ms", "loss": "loss 5%"}


class PartitionExperiment:
    """Compares with a run in the same two namespaces whose network was left alone."""

    name = "partition"

    def missing(self) -> str | None:
        if os.getuid() != 0:
            return "The network cannot be cut: network namespaces need root."
        if shutil.which("ip") is None:
            return "The network cannot be cut: ip is not installed (run .ci/packages python3 chaos)."
        try:
            with Cable(f"probe{os.getpid()}"):
                return None
        except subprocess.CalledProcessError as error:
            return f"The network cannot be cut: {error.stderr.strip() or error}"

    def faults(self, seed: int) -> Iterator[PartitionFault]:
        actions = [action for action in _KINDS if action not in _NETEM or _has_netem()]
        draw = random.Random(f"partition {seed}")
        for number, action in itertools.product(range(_ROUNDS), actions):
            step, delay_s = draw.randrange(1, 11), round(draw.uniform(0, 0.1), 3)
            name = f"{action} {number}: step {step} + {delay_s} s"
            yield PartitionFault(
                _KINDS[action], name, action=action, step=step, delay_s=delay_s, netem=_NETEM.get(action, "")
            )

    def prepare(self, folder: Path) -> None:
        prepare_data(folder / "data")

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        assert isinstance(fault, PartitionFault)
        training = SmallTraining(folder / "data")
        reference = made_once(folder / "reference", lambda fresh: _train(training, fresh, folder / "logs"))
        out, logs = scratch / "run", scratch / "logs"
        with Cable(f"cut{os.getpid()}") as cable:
            ranks = RankProcesses(training.words(out), 2, logs / "first", timeout_s=_TIMEOUT_S, network=cable.network)
            ranks.await_step(fault.step)
            time.sleep(fault.delay_s)
            was_over = reached_step(out) >= training.num_steps
            _ACTIONS[fault.action](cable, fault)
            seen = ranks.wait()
        broken = _judged(fault, seen, was_over)
        again = _trained(training, out, logs / "second")
        broken += [f"Resumed: {text}" for text in again.broken(expected=[(0,), (0,)])]
        if not broken:
            broken = differences(out, reference)
        return Outcome(tuple(broken), f"{seen.statuses}, then {again.statuses}; {seen.last_line}")


def _judged(fault: PartitionFault, seen: Ended, was_over: bool) -> list[str]:
    """Returns what is wrong: after a cut both ranks say so and end with 1; what heals is not noticed."""
    is_lasting = fault.action in ("cut", "one end")
    expected = ((0, 1) if was_over else (1,)) if is_lasting else (0,)
    broken = seen.broken(expected=[expected, expected])
    for rank, (status, text) in enumerate(zip(seen.statuses, seen.printed, strict=True)):
        if status == 1 and _RESUME not in text:
            broken.append(f"Rank {rank} did not say how to resume.")
    return broken


class Cable:
    """Connects two network namespaces inside a `with` block."""

    def __init__(self, name: str) -> None:
        self.namespaces = (f"{name}a", f"{name}b")

    def __enter__(self) -> "Cable":
        here, there = self.namespaces
        try:
            for namespace in self.namespaces:
                _ip("netns", "add", namespace)
            _ip("link", "add", "cable", "netns", here, "type", "veth", "peer", "name", "cable", "netns", there)
            for namespace, address in zip(self.namespaces, _ADDRESSES, strict=True):
                _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", namespace, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    @property
    def network(self) -> Network:
        """Returns what ranks at both ends of the cable need to know."""
        paths = tuple(f"/run/netns/{namespace}" for namespace in self.namespaces)
        return Network(_ADDRESSES[0], "cable", paths)

    def set_end(self, end: int, state: str) -> None:
        _ip("-n", self.namespaces[end], "link", "set", "cable", state)

    def disturb(self, words: str) -> None:
        """Lets the kernel delay or lose packets at both ends."""
        for namespace in self.namespaces:
            command = ["tc", "-n", namespace, "qdisc", "add", "dev", "cable", "root", "netem", *words.split()]
            subprocess.run(command, check=True, capture_output=True, text=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _has_netem() -> bool:
    """Returns whether the kernel can delay packets."""
    try:
        with Cable(f"netem{os.getpid()}") as cable:
            cable.disturb("delay 1ms")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _cut(cable: Cable, _: PartitionFault) -> None:
    for end in (0, 1):
        cable.set_end(end, "down")


def _cut_one_end(cable: Cable, fault: PartitionFault) -> None:
    cable.set_end(fault.step % 2, "down")


def _gap(cable: Cable, _: PartitionFault) -> None:
    cable.set_end(1, "down")
    time.sleep(2.0)
    cable.set_end(1, "up")


def _disturb(cable: Cable, fault: PartitionFault) -> None:
    cable.disturb(fault.netem)


_ACTIONS = {"cut": _cut, "one end": _cut_one_end, "gap": _gap, "delay": _disturb, "loss": _disturb}


def _trained(training: SmallTraining, out: Path, logs: Path) -> Ended:
    with Cable(f"run{os.getpid()}") as cable:
        return trained(training.words(out), 2, logs, cable.network)


def _train(training: SmallTraining, out: Path, logs: Path) -> None:
    done = _trained(training, out, logs)
    if any(done.statuses):
        raise RuntimeError(f"The reference cannot be trained: {done.printed}")


EXPERIMENT = PartitionExperiment()
