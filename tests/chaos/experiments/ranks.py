"""Loses, stops and warns one of two ranks that train together, and changes the number of ranks between resumes."""

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.experiment import Fault, Outcome
from chaos.rank_processes import Ended, RankProcesses, trained
from chaos.small_training import SmallTraining, differences, losses, made_once, prepare_data, reached_step

_STRATEGIES = ("pnr", "cassle", "der", "ewc", "lessforget", "lump")  # all that keep state
_ROUNDS = 8
_WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_SHORT_S = 8.0  # instead of ten minutes: after this time a rank that does not respond counts as lost
_RESUME = "Run the same command again to resume."
# A step on two ranks adds up in another order than on one. AdamW divides by the gradient's size, so that rounding grows
# from step to step; this bounds the growth over the few steps here.
_TOLERANCE = 0.3


@dataclass(frozen=True)
class RankFault(Fault):
    """Says what happens to which rank, and when: `delay_s` after `step` was seen in the metrics."""

    action: str = "kill"
    strategy: str = "pnr"
    rank: int = 0
    step: int = 1
    delay_s: float = 0.0
    signal: int = 0
    epochs: int = 2


_KINDS = {
    "kill": "SIGKILL of one of two ranks",
    "kill early": "SIGKILL of one of two ranks while they start",
    "kill both": "SIGKILL of both ranks",
    "pause": "SIGSTOP of a rank, then SIGCONT",
    "stop": "SIGSTOP of a rank for good",
    "warn": "a signal that asks one of two ranks to stop",
    "change": "the number of ranks changes between resumes: 1, 2, 1",
}


class RankExperiment:
    """Compares with runs of the same command on the same number of ranks, which nobody interrupted."""

    name = "ranks"

    def missing(self) -> str | None:
        return None

    def faults(self, seed: int) -> Iterator[RankFault]:
        yield RankFault(_KINDS["kill"], "quick: kill rank 1 after step 3", True, rank=1, step=3, epochs=1)
        draw = random.Random(f"ranks {seed}")
        for number, strategy, action in itertools.product(range(_ROUNDS), _STRATEGIES, _KINDS):
            rank, step, delay_s = draw.randrange(2), draw.randrange(1, 11), round(draw.uniform(0, 0.15), 3)
            if action == "kill early":
                step, delay_s = 0, round(draw.uniform(0, 1.5), 3)
            warning = draw.choice(_WARNINGS) if action in ("warn", "change") else signal.SIGKILL
            name = f"{action} {strategy} {number}: rank {rank}, step {step} + {delay_s} s, {warning.name}"
            yield RankFault(
                _KINDS[action],
                name,
                action=action,
                strategy=strategy,
                rank=rank,
                step=step,
                delay_s=delay_s,
                signal=warning,
            )

    def prepare(self, folder: Path) -> None:
        prepare_data(folder / "data")

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        assert isinstance(fault, RankFault)
        training = SmallTraining(folder / "data", strategy=fault.strategy, epochs=fault.epochs)
        reference = _reference(folder, training, 1 if fault.action == "change" else 2)
        if fault.action == "change":
            return _changed(fault, training, reference, scratch)
        out = scratch / "run"
        timeout_s = _SHORT_S if fault.action == "stop" else 60.0
        ranks = RankProcesses(training.words(out), 2, scratch / "logs" / "first", timeout_s=timeout_s)
        if fault.step:
            ranks.await_step(fault.step)
        time.sleep(fault.delay_s)
        was_over = reached_step(out) >= training.num_steps
        broken, seen = _ACTIONS[fault.action](fault, ranks, was_over)
        again = trained(training.words(out), 2, scratch / "logs" / "second")
        broken += [f"Resumed: {text}" for text in again.broken(expected=[(0,), (0,)])]
        if not broken:
            broken += differences(out, reference)
        return Outcome(tuple(broken), f"{seen.statuses}, then {again.statuses}; {seen.last_line}")


# ---- What happens to the ranks ---------------------------------------------------------------------------------------


def _killed(fault: RankFault, ranks: RankProcesses, was_over: bool) -> tuple[list[str], Ended]:
    was_hit = ranks.signal(fault.rank, signal.SIGKILL)
    seen = ranks.wait()
    return _lost(fault, seen, was_over=was_over or not was_hit), seen


def _stopped(fault: RankFault, ranks: RankProcesses, was_over: bool) -> tuple[list[str], Ended]:
    was_hit = ranks.signal(fault.rank, signal.SIGSTOP)
    ranks.await_end(1 - fault.rank)
    ranks.signal(fault.rank, signal.SIGKILL)
    seen = ranks.wait()
    return _lost(fault, seen, was_over=was_over or not was_hit), seen


def _lost(fault: RankFault, seen: Ended, *, was_over: bool) -> list[str]:
    """Checks the rank that is left: it ends with 1 and says how to resume, unless there was nothing left to do."""
    gone, left = (-signal.SIGKILL,), (0, 1) if was_over else (1,)
    expected = (
        [gone + ((0,) if was_over else ()), left] if fault.rank == 0 else [left, gone + ((0,) if was_over else ())]
    )
    broken = seen.broken(expected=expected)
    survivor = 1 - fault.rank
    if seen.statuses[survivor] == 1 and _RESUME not in seen.printed[survivor]:
        broken.append(f"Rank {survivor} did not say how to resume.")
    return broken


def _killed_both(fault: RankFault, ranks: RankProcesses, _: bool) -> tuple[list[str], Ended]:
    for rank in (fault.rank, 1 - fault.rank):
        ranks.signal(rank, signal.SIGKILL)
    seen = ranks.wait()
    return seen.broken(expected=[(-signal.SIGKILL, 0, 1)] * 2), seen


def _paused(fault: RankFault, ranks: RankProcesses, _: bool) -> tuple[list[str], Ended]:
    ranks.signal(fault.rank, signal.SIGSTOP)
    time.sleep(1.0)
    ranks.signal(fault.rank, signal.SIGCONT)
    seen = ranks.wait()
    return seen.broken(expected=[(0,), (0,)]), seen


def _warned(fault: RankFault, ranks: RankProcesses, was_over: bool) -> tuple[list[str], Ended]:
    was_hit = ranks.signal(fault.rank, fault.signal)
    seen = ranks.wait()
    expected = (128 + fault.signal, 0) if was_over or not was_hit else (128 + fault.signal,)
    broken = seen.broken(expected=[expected, expected])
    if len(set(seen.statuses)) > 1:
        broken.append(f"The ranks do not agree on how they ended: {seen.statuses}.")
    return broken, seen


_ACTIONS: dict[str, Callable[[RankFault, RankProcesses, bool], tuple[list[str], Ended]]] = {
    "kill": _killed,
    "kill early": _killed,
    "kill both": _killed_both,
    "pause": _paused,
    "stop": _stopped,
    "warn": _warned,
}


def _changed(fault: RankFault, training: SmallTraining, reference: Path, scratch: Path) -> Outcome:
    """Trains on one rank, then on two, then on one. Each but the last is warned."""
    out, broken, statuses = scratch / "run", [], []
    steps = sorted((fault.step % 6 + 1, fault.step % 6 + 4))
    for size, step in zip((1, 2), steps, strict=True):
        ranks = RankProcesses(training.words(out), size, scratch / "logs" / f"on{size}")
        ranks.await_step(step)
        ranks.signal(fault.rank % size, fault.signal)
        seen = ranks.wait()
        statuses.append(seen.statuses)
        broken += seen.broken(expected=[(128 + fault.signal, 0)] * size)
    last = trained(training.words(out), 1, scratch / "logs" / "last")
    broken += [f"Resumed: {text}" for text in last.broken(expected=[(0,)])]
    if not broken:
        broken += _far_apart(out, reference, steps[0])
    return Outcome(tuple(broken), f"{statuses}, then {last.statuses}; {last.last_line}")


def _far_apart(out: Path, reference: Path, exact_until: int) -> list[str]:
    """Returns where the losses differ: not at all before the first change, and only by rounding after it."""
    ours, theirs = losses(out), losses(reference)
    if [line[:2] for line in ours] != [line[:2] for line in theirs]:
        return ["The metrics do not have the lines of the reference."]
    for (kind, step, own), (_, _, wanted) in zip(ours, theirs, strict=True):
        if kind != "step":
            continue
        limit = 0.0 if step <= exact_until else _TOLERANCE
        for term, value in own.items():
            if abs(value - wanted[term]) > limit:
                return [f"{term} at step {step} is {value} instead of {wanted[term]}."]
    return []


def _reference(folder: Path, training: SmallTraining, size: int) -> Path:
    """Returns a run that nobody interrupts. It is trained when first asked for: there are many, and few are needed."""

    def train(fresh: Path) -> None:
        done = trained(training.words(fresh), size, folder / "logs")
        if any(done.statuses):
            raise RuntimeError(f"The reference cannot be trained: {done.printed}")

    return made_once(folder / f"{training.strategy}-{training.epochs}-on{size}", train)


EXPERIMENT = RankExperiment()
