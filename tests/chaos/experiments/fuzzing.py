"""Fuzzes the codec and the loader's engine under libFuzzer, with ASan and UBSan. One fault is a session."""

import hashlib
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from chaos import fuzzers
from chaos.experiment import Fault, Outcome
from chaos.fuzzers import TARGETS, Target
from chaos.once import once

_SESSIONS = 60  # of each target


class Fuzzing:
    name = "fuzzing"

    def missing(self) -> str | None:
        return fuzzers.missing()

    def faults(self, seed: int) -> Iterable[Fault]:
        for number in range(_SESSIONS):
            for target in TARGETS:
                yield Fault(f"{target.what}, fuzzed under ASan and UBSan", f"{target.name} session {seed}.{number}")

    def prepare(self, folder: Path) -> None:
        """Compile the targets, which takes two minutes, and write the files that they begin with."""
        fuzzers.built(folder)
        for target in TARGETS:
            _corpus(target, folder)

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        target = next(target for target in TARGETS if target.name == fault.name.split()[0])
        return _session(target, folder, scratch, fault.name)


def _corpus(target: Target, folder: Path) -> Path:
    """Return the folder of a target's inputs, to which every session adds those that reach new code."""
    return once(folder / f"corpus-{target.name}", partial(fuzzers.write_corpus, target))


def _session(target: Target, folder: Path, scratch: Path, name: str) -> Outcome:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big") + 1  # zero means a random one
    session = fuzzers.run(target, fuzzers.built(folder), _corpus(target, folder), scratch, seed)
    broken = []
    if session.fault:
        kept = ""
        if session.input is not None:
            (folder / "found").mkdir(exist_ok=True)
            kept = f"; the input is kept as found/{target.name}-{session.input.name}"
            shutil.copy(session.input, folder / "found" / f"{target.name}-{session.input.name}")
        broken.append(session.fault + kept)
    return Outcome(tuple(broken), f"{session.num_inputs} inputs")


EXPERIMENT = Fuzzing()
