"""Cuts the power after every recorded file operation of a command, and runs the same command on what the disk holds.

The command is run once with its file operations recorded. What was not synced at the moment of the loss is then missing
in several ways that a kernel may choose; see `chaos.disk`.
"""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from chaos.disk import LOSSES, Event, after, interesting, read_record, write_state
from chaos.experiment import Fault, Outcome
from chaos.invariants import recovers
from chaos.laboratory import Laboratory, chance_of
from chaos.nursery import import_path
from chaos.once import once
from chaos.subjects import PREPARATIONS, TRAININGS, Bench, Subject

_SOURCE = Path(__file__).resolve().parent.parent / "shim" / "recorder.c"
_COMMANDS = {"fastcssl-prep": "dataprep.cli", "fastcssl-train": "fastcssl.cli.train"}
_SUBJECTS = (*PREPARATIONS, TRAININGS[0])
_NAME = re.compile(r"(.+): after (\d+)( %| operations), (.+?)(?: \(seed \d+\))?")
_RECORDING_S = 300


class PowerLoss(Laboratory):
    name = "power_loss"

    def faults(self, seed: int) -> Iterator[Fault]:
        """Yield the quick faults, and after `prepare` one fault for every operation and every loss."""
        array, tar, *_ = PREPARATIONS
        losses = list(LOSSES)
        for number, percent in enumerate((22, 40, 58, 76, 94)):
            subject = (tar, array)[number % 2]
            yield _fault(f"{subject.name}: after {percent} %", losses[number % len(losses)], is_quick=True)
        if not self.is_prepared:
            return
        chance = random.Random(seed)
        waiting = {subject: self._numbered(subject, chance) for subject in _SUBJECTS}
        turn = 0
        while any(waiting.values()):
            for subject in [subject for subject in waiting if waiting[subject] and turn % subject.cost == 0]:
                count, loss = waiting[subject].pop()
                yield _fault(f"{subject.name}: after {count} operations", loss, suffix=f" (seed {seed})")
            turn += 1

    def _numbered(self, subject: Subject, chance: random.Random) -> list[tuple[int, str]]:
        """Return the faults of a command in random order. If everything is synced, all losses leave the same."""
        events = recorded(self.bench().folder, subject)
        found = [
            (count, loss) for count, is_open in interesting(events) for loss in (LOSSES if is_open else [*LOSSES][:1])
        ]
        chance.shuffle(found)
        return found

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        bench = self.bench(folder)
        match = _NAME.fullmatch(fault.name)
        assert match is not None, fault.name
        subject = next(subject for subject in _SUBJECTS if subject.name == match[1])
        events = recorded(bench.folder, subject)
        count = int(match[2]) * len(events) // 100 if match[3] == " %" else int(match[2])
        write_state(after(events, count), LOSSES[match[4]], scratch, chance_of(fault.name))
        left = sum(path.is_file() for path in (scratch / "out").rglob("*"))
        broken, again = recovers(bench, subject, scratch)
        seen = f"{left} files left after {count} of {len(events)} operations, again {again.status}"
        return Outcome(tuple(broken), f"{seen} ({again.last_line[:120]})")


def _fault(moment: str, loss: str, suffix: str = "", *, is_quick: bool = False) -> Fault:
    return Fault(f"power loss leaves {loss}", f"{moment}, {loss}{suffix}", is_quick)


@cache
def recorded(folder: Path, subject: Subject) -> list[Event]:
    """Return the file operations of an undisturbed command, which is run once, with its record in `folder`."""
    home = once(folder / "recorded" / subject.file_name, lambda part: _record(Bench(folder), subject, part))
    return read_record(home / "record", Path((home / "root").read_text()))


def compiled_recorder(folder: Path) -> Path:
    """Return the library that records file operations, compiled into `folder`."""
    made = folder / "recorder.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-Wall", "-shared", "-fPIC", "-o", str(made), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return made


def _record(bench: Bench, subject: Subject, home: Path) -> None:
    """Run a command with its file operations recorded in `home`."""
    record, work = home / "record", home / "work"
    record.mkdir()
    work.mkdir()
    (home / "root").write_text(str(work))
    name, *args = bench.words(subject)
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(compiled_recorder(home)),
        "CHAOS_RECORD": str(record),
        "CHAOS_RECORD_ROOT": str(work),
    }
    done = subprocess.run(
        [sys.executable, "-m", _COMMANDS[name], *args],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RECORDING_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{subject.name} fails while it is recorded: {(done.stderr or done.stdout)[-500:]}")


EXPERIMENT = PowerLoss()
