"""Lets commands meet in one folder: two builds, two trainers, readers beside a writer, sources that change."""

import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.commands import Ended
from chaos.experiment import Fault, Outcome
from chaos.invariants import FINISHED, MISTAKE, differs, ends_well, recovers
from chaos.laboratory import Laboratory, chance_of
from chaos.subjects import EVALUATION, OUT, PREPARATIONS, TRAININGS, Bench, Subject

_NAME = re.compile(r"(.+): (.+) at ([\d.]+) %, number \d+")
_CHECK_FAILED = 1

# The second command by the kind of the fault.
_READERS: dict[str, tuple[str, ...]] = {
    "evaluation beside a trainer": EVALUATION.words,
    "report beside a trainer": ("fastcssl-report", OUT),
    "status beside a trainer": ("fastcssl-train", "status", OUT),
    "verify beside a build": ("fastcssl-prep", "verify", OUT),
    "inspect beside a build": ("fastcssl-prep", "inspect", OUT),
}


def _remove(path: Path, _: random.Random) -> None:
    path.unlink()


def _truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def _replace(path: Path, chance: random.Random) -> None:
    others = sorted(other for other in path.parent.parent.rglob("*.jpg") if other != path)
    path.write_bytes(chance.choice(others).read_bytes())


def _lose(path: Path, _: random.Random) -> None:
    shutil.rmtree(path.parent)


_CHANGES: dict[str, Callable[[Path, random.Random], None]] = {
    "an image vanishes during a build": _remove,
    "an image is cut during a build": _truncate,
    "an image is replaced during a build": _replace,
    "a class folder vanishes during a build": _lose,
}
_TWO = (
    "two builds",
    "two trainers",
    "a trainer with --resume never beside another",
    "a second build in a held folder",
    "a second trainer in a held folder",
    "a trainer with --resume never in a held folder",
)


class Company(Laboratory):
    name = "company"

    def faults(self, seed: int) -> Iterator[Fault]:
        """Yield faults without end, all kinds in turn."""
        yield Fault("two builds", f"{PREPARATIONS[0].name}: two builds at 30.0 %, number 0", is_quick=True)
        held = "a trainer with --resume never in a held folder"
        yield Fault(held, f"{TRAININGS[0].name}: {held} at 20.0 %, number 1", is_quick=True)
        chance = random.Random(seed)
        number = 2
        kinds = (*_TWO, *_READERS, *_CHANGES)
        while True:
            for kind in chance.sample(kinds, len(kinds)):
                subjects = PREPARATIONS[:2] if "build" in kind else TRAININGS
                name = f"{chance.choice(subjects).name}: {kind} at {chance.uniform(0, 100):.1f} %, number {number}"
                yield Fault(kind, name)
                number += 1

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        bench = self.bench(folder)
        match = _NAME.fullmatch(fault.name)
        assert match is not None, fault.name
        subject = next(one for one in (*PREPARATIONS, *TRAININGS) if one.name == match[1])
        delay_s = float(match[3]) / 100 * bench.reference(subject).seconds
        bench.begin(subject, scratch)
        if fault.kind in _CHANGES:
            return _changed_source(bench, subject, scratch, delay_s, fault)
        if fault.kind in _READERS:
            return _beside(bench, subject, scratch, delay_s, _READERS[fault.kind])
        more = ("--resume", "never") if "never" in fault.kind else ()
        return _two_writers(bench, subject, scratch, delay_s, more, is_held="held" in fault.kind)


def _two_writers(
    bench: Bench, subject: Subject, scratch: Path, delay_s: float, more: tuple[str, ...], *, is_held: bool
) -> Outcome:
    """Start a second writer. One of the two does the work, and the other one is refused or finds it done.

    With `is_held`, the first one is stopped while it is in the folder, so the second one must be refused.
    """
    logs, words, reference = scratch / "logs", bench.words(subject), bench.reference(subject)
    first = bench.server.start(words, scratch, logs=logs)
    first.begin()
    lock = scratch / OUT / ".lock"
    while is_held and first.is_alive() and not _holds_lock(first.pid, lock):
        time.sleep(0.001)
    time.sleep(delay_s / 2 if is_held else delay_s)
    if is_held:
        first.send(signal.SIGSTOP)
    was_alive, is_inside = first.is_alive(), is_held and _holds_lock(first.pid, lock)
    second = bench.server.run([*words, *more], scratch, logs=logs)
    first.send(signal.SIGCONT)
    both = [first.wait(), second]
    broken = [sentence for ended in both for sentence in ends_well(ended, (FINISHED, MISTAKE), reference)]
    statuses = [ended.status for ended in both]
    if FINISHED not in statuses:
        broken.append("neither of the two finished")
    if is_inside and statuses != [FINISHED, MISTAKE]:
        broken.append(f"a second command went into a folder that was in use: statuses {statuses[0]} and {statuses[1]}")
    found, again = recovers(bench, subject, scratch)
    seen = f"status {statuses[0]} and {statuses[1]} ({second.last_line[:160]}), again {again.status}"
    return Outcome(tuple(broken + found), seen, was_alive and (is_inside or not is_held))


def _holds_lock(pid: int, path: Path) -> bool:
    """Return whether a process holds the lock of a file, without touching the lock."""
    if not path.exists():
        return False
    owner, inode = str(pid), f":{path.stat().st_ino}"
    rows = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("FLOCK" in row and owner in row and any(word.endswith(inode) for word in row) for row in rows)


def _beside(bench: Bench, subject: Subject, scratch: Path, delay_s: float, words: tuple[str, ...]) -> Outcome:
    """Start a command that reads the folder while another one writes it."""
    first = bench.server.start(bench.words(subject), scratch, logs=scratch / "logs")
    first.begin()
    time.sleep(delay_s)
    was_alive = first.is_alive()
    second = bench.server.run(words, scratch, logs=scratch / "logs")
    broken = ends_well(second, (FINISHED, MISTAKE, _CHECK_FAILED) if "verify" in words else (FINISHED, MISTAKE))
    ended = first.wait()
    broken += ends_well(ended, (FINISHED,), bench.reference(subject))
    for name in ("evaluations", "report"):  # the reader's own
        shutil.rmtree(scratch / OUT / name, ignore_errors=True)
    broken += differs(subject, bench.reference(subject), scratch)
    return Outcome(tuple(broken), f"status {ended.status} and {second.status} ({second.last_line[:160]})", was_alive)


def _changed_source(bench: Bench, subject: Subject, scratch: Path, delay_s: float, fault: Fault) -> Outcome:
    """Change an image while a build reads it. What the build says is complete must verify; else it can be repeated."""
    source, kept = scratch / "source", bench.folder / "source"
    shutil.copytree(kept, source)
    words = [word.replace(str(kept), str(source)) for word in bench.words(subject)]
    chance = chance_of(fault.name)
    running = bench.server.start(words, scratch, logs=scratch / "logs")
    running.begin()
    time.sleep(delay_s)
    was_alive = running.is_alive()
    running.send(signal.SIGSTOP)  # so that the change is complete before the build sees it
    _CHANGES[fault.kind](chance.choice(sorted(source.rglob("*.jpg"))), chance)
    running.send(signal.SIGCONT)
    first = running.wait()
    broken = ends_well(first, (FINISHED, MISTAKE), bench.reference(subject))
    again = first
    if first.status == FINISHED:
        broken += _verified(bench, scratch)
    else:
        shutil.rmtree(source)
        shutil.copytree(kept, source)
        again = bench.server.run(words, scratch, logs=scratch / "logs")
        broken += [f"run again: {sentence}" for sentence in ends_well(again, (FINISHED, MISTAKE))]
        broken += _verified(bench, scratch) if again.status == FINISHED else []
    seen = f"status {first.status} ({first.last_line[:160]}), again {again.status} ({again.last_line[:80]})"
    return Outcome(tuple(broken), seen, was_alive)


def _verified(bench: Bench, scratch: Path) -> list[str]:
    ended: Ended = bench.server.run(["fastcssl-prep", "verify", OUT], scratch, logs=scratch / "logs")
    return [f"verify: {sentence}" for sentence in ends_well(ended, (FINISHED,))]


EXPERIMENT = Company()
