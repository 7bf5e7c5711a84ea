"""Sends signals to every command at random times: SIGKILL, also several times in a row, and those that ask to stop."""

import random
import re
import signal
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from chaos.commands import Ended
from chaos.experiment import Fault, Outcome
from chaos.invariants import FINISHED, KILLED, ends_well, recovers
from chaos.laboratory import Laboratory
from chaos.subjects import PREPARATIONS, SUBJECTS, TRAININGS, Subject

_SIGNALS = ("SIGKILL", "SIGKILL three times", "SIGTERM", "SIGINT", "SIGINT twice", "SIGUSR1")
_NAME = re.compile(r"(.+): (SIG\w+)( three times| twice)? at ((?:[\d.]+ ?)+)%, number \d+")
_SECOND_S = 0.05
_LATEST = 110  # per cent of the uninterrupted command's time


def _kind(how: str) -> str:
    return {"SIGKILL three times": "killed three times", "SIGKILL": "killed at a random time"}.get(
        how, f"{how} at a random time"
    )


def _fault(subject: Subject, how: str, moments: list[float], number: int, *, is_quick: bool = False) -> Fault:
    listed = " ".join(f"{moment:.1f}" for moment in moments)
    return Fault(_kind(how), f"{subject.name}: {how} at {listed} %, number {number}", is_quick)


def _understands(subject: Subject, how: str) -> bool:
    """Return whether a signal's effect on the command is documented."""
    return how != "SIGUSR1" or subject.words[0] in ("fastcssl-train", "fastcssl-eval")


class Kills(Laboratory):
    name = "kills"

    def faults(self, seed: int) -> Iterator[Fault]:
        """Yield faults without end: all commands in turn, a long one in fewer rounds, with all signals in turn."""
        yield _fault(PREPARATIONS[0], "SIGKILL", [25.0], 0, is_quick=True)
        yield _fault(TRAININGS[0], "SIGKILL", [40.0], 1, is_quick=True)
        yield _fault(TRAININGS[0], "SIGTERM", [30.0], 2, is_quick=True)
        chance = random.Random(seed)
        signals = {subject: cycle(chance.sample(_SIGNALS, len(_SIGNALS))) for subject in SUBJECTS}
        number = 3
        while True:
            for subject in chance.sample(SUBJECTS, len(SUBJECTS)):
                how = next(signals[subject])
                if chance.randrange(subject.cost) == 0 and _understands(subject, how):
                    moments = [chance.uniform(0, _LATEST) for _ in range(3 if "three" in how else 1)]
                    yield _fault(subject, how, moments, number)
                    number += 1

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        bench = self.bench(folder)
        match = _NAME.fullmatch(fault.name)
        assert match is not None, fault.name
        subject = next(subject for subject in SUBJECTS if subject.name == match[1])
        number = signal.Signals[match[2]]
        reference = bench.reference(subject)
        bench.begin(subject, scratch)
        broken, statuses, was_reached = [], [], False
        ended: Ended | None = None
        for moment in map(float, match[4].split()):
            running = bench.server.start(bench.words(subject), scratch, logs=scratch / "logs")
            running.begin()
            time.sleep(moment / 100 * reference.seconds)
            was_reached |= running.is_alive()
            running.send(number)
            if match[3] == " twice":
                time.sleep(_SECOND_S)
                running.send(number)
            ended = running.wait()
            statuses.append(str(ended.status))
            broken += ends_well(ended, _allowed(subject, number), reference)
        assert ended is not None
        found, again = recovers(bench, subject, scratch)
        seen = f"status {', '.join(statuses)} ({ended.last_line[:160]}), again {again.status}"
        return Outcome(tuple(broken + found), seen, was_reached)


def _allowed(subject: Subject, number: signal.Signals) -> tuple[int, ...]:
    if number == signal.SIGKILL:
        return (KILLED, FINISHED)
    if subject in PREPARATIONS:  # ends with 130 whichever signal asks
        return (FINISHED, 128 + signal.SIGINT, 128 + number)
    return (FINISHED, 128 + number)


EXPERIMENT = Kills()
