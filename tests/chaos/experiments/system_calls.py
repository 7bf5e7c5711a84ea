"""Fails the n-th file operation of every command: each operation, each number, each way to fail."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.experiment import Fault, Outcome
from chaos.invariants import FINISHED, KILLED, MISTAKE, ends_well, recovers
from chaos.laboratory import Laboratory
from chaos.shim.plan import Plan, counted
from chaos.subjects import EVALUATION, PREPARATIONS, REPORT, SUBJECTS, TRAININGS, Subject

_FAILED = 1
_WAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "open": (("kill", ""), ("fail once", "EIO"), ("fail from there on", "EIO"), ("fail once", "EMFILE")),
    "create": (("kill", ""), ("fail once", "ENOSPC"), ("fail from there on", "ENOSPC"), ("fail once", "EIO")),
    "write": (
        ("kill", ""),
        ("fail once", "ENOSPC"),
        ("fail from there on", "ENOSPC"),
        ("fail once", "EIO"),
        ("fail once", "EINTR"),
        ("short", ""),
    ),
    "read": (
        ("kill", ""),
        ("fail once", "EIO"),
        ("fail from there on", "EIO"),
        ("fail once", "EINTR"),
        ("short", ""),
    ),
    "sync": (("kill", ""), ("fail once", "EIO"), ("fail from there on", "ENOSPC")),
    "rename": (("kill", ""), ("fail once", "EIO"), ("fail once", "ENOSPC"), ("fail from there on", "EIO")),
    "mkdir": (("kill", ""), ("fail once", "ENOSPC"), ("fail from there on", "ENOSPC")),
    "truncate": (("kill", ""), ("fail once", "EIO")),
    "map": (("kill", ""), ("fail once", "ENOMEM"), ("fail from there on", "EIO")),
    "remove": (("kill", ""), ("fail once", "EIO"), ("fail from there on", "EIO")),
}
_NAME = re.compile(r"(.+): (\w+) (\d+), ([a-z ]+)(?: (E\w+))?")


@dataclass(frozen=True)
class _Stratum:
    """The faults that differ only in their number."""

    subject: Subject
    call: str
    action: str
    error: str

    @property
    def kind(self) -> str:
        if self.action == "kill":
            return f"killed at a {self.call}"
        if self.action == "short":
            return f"short {self.call}"
        return f"{self.call} fails {'from there on ' if self.action != 'fail once' else ''}with {self.error}"

    def fault(self, nth: int, *, is_quick: bool = False) -> Fault:
        way = f"{self.action} {self.error}".strip()
        return Fault(self.kind, f"{self.subject.name}: {self.call} {nth}, {way}", is_quick)


def _quick() -> Iterator[Fault]:
    """Yield the faults of the quick tier. Their numbers exist in every version of the commands."""
    array, tar, pnr = PREPARATIONS[0], PREPARATIONS[1], TRAININGS[0]
    chosen: tuple[tuple[Subject, str, str, str, int], ...] = (
        (array, "write", "kill", "", 9),
        (array, "write", "fail from there on", "ENOSPC", 4),
        (array, "write", "short", "", 6),
        (array, "read", "fail once", "EIO", 40),
        (array, "read", "short", "", 30),
        (tar, "rename", "kill", "", 4),
        (tar, "create", "fail once", "ENOSPC", 5),
        (tar, "sync", "fail once", "EIO", 6),
        (tar, "write", "fail once", "EINTR", 8),
        (pnr, "write", "kill", "", 300),
        (pnr, "rename", "kill", "", 7),
        (pnr, "write", "fail from there on", "ENOSPC", 500),
        (pnr, "sync", "fail once", "EIO", 9),
        (EVALUATION, "write", "kill", "", 5),
        (EVALUATION, "create", "fail once", "ENOSPC", 2),
        (REPORT, "write", "fail once", "ENOSPC", 3),
    )
    for subject, call, action, error, nth in chosen:
        yield _Stratum(subject, call, action, error).fault(nth, is_quick=True)


class SystemCalls(Laboratory):
    name = "system_calls"

    def faults(self, seed: int) -> Iterator[Fault]:
        """Yield the quick faults, and after `prepare` all others.

        In every round each stratum gives one fault, so that any first part covers all commands and kinds evenly. A
        command that takes several times longer takes part in fewer rounds.
        """
        quick = {fault.name: fault for fault in _quick()}
        yield from quick.values()
        if not self.is_prepared:
            return
        chance = random.Random(seed)
        waiting = self._numbers(chance)
        phases = {stratum: chance.randrange(stratum.subject.cost) for stratum in waiting}
        turn = 0
        while waiting:
            for stratum in [found for found in waiting if (turn + phases[found]) % found.subject.cost == 0]:
                fault = stratum.fault(waiting[stratum].pop())
                if not waiting[stratum]:
                    del waiting[stratum]
                if fault.name not in quick:
                    yield fault
            turn += 1

    def _numbers(self, chance: random.Random) -> dict[_Stratum, list[int]]:
        """Return the numbers of each stratum's operations in random order."""
        bench = self.bench()
        strata = []
        for subject in SUBJECTS:
            counts = bench.reference(subject).counts
            for call, ways in _WAYS.items():
                numbers = list(range(1, counts[call] + 1))
                for action, error in ways if numbers else ():
                    chance.shuffle(numbers)
                    strata.append((_Stratum(subject, call, action, error), numbers.copy()))
        chance.shuffle(strata)
        return dict(strata)

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        bench = self.bench(folder)
        match = _NAME.fullmatch(fault.name)
        assert match is not None, fault.name
        subject = next(subject for subject in SUBJECTS if subject.name == match[1])
        plan = Plan(call=match[2], nth=int(match[3]), action=match[4], error=match[5] or "")
        bench.begin(subject, scratch)
        path = scratch / "plan"
        plan.write(path, bench.watched(subject, scratch))
        first = bench.server.run(bench.words(subject), scratch, plan=path, logs=scratch / "logs")
        broken = ends_well(first, _allowed(plan), bench.reference(subject))
        found, again = recovers(bench, subject, scratch)
        return Outcome(
            tuple(broken + found),
            f"status {first.status} ({first.last_line[:160]}), again {again.status}",
            injected=counted(path).num_injected > 0,
        )


def _allowed(plan: Plan) -> tuple[int, ...]:
    """Return the exit statuses that are documented for a fault."""
    if plan.action == "kill":
        return (KILLED, FINISHED, MISTAKE)  # the killed process may be one that the command had started
    if plan.action == "short":
        return (FINISHED,)
    return (FINISHED, MISTAKE, _FAILED) if plan.error == "ENOMEM" else (FINISHED, MISTAKE)


EXPERIMENT = SystemCalls()
