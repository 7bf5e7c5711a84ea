"""Defines what an experiment is: the faults that it knows, and what is checked after each of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Fault:
    """Names one fault.

    `kind` is what the table of results counts, for example "write fails with ENOSPC". `name` is unique within its
    experiment and the same for the same seed, so that a campaign can be continued. `is_quick` marks the few faults that
    also belong to `make test`.
    """

    kind: str
    name: str
    is_quick: bool = False


@dataclass(frozen=True)
class Outcome:
    """Says what was seen after a fault: `broken` has one sentence for each invariant that did not hold."""

    broken: tuple[str, ...]
    seen: str  # exit statuses and the last line that was printed
    injected: bool = True  # False: the moment of the fault never came, so the table does not count it

    @property
    def held(self) -> bool:
        return not self.broken


class Experiment(Protocol):
    """Injects the faults of one file in `experiments`, which offers an instance under the name `EXPERIMENT`.

    A file that defines `ALONE = True` beside it needs the machine for itself: a campaign runs it before the others.
    """

    name: str

    def missing(self) -> str | None:
        """Return what this machine lacks for the experiment, as a sentence, or None if it can run."""
        ...

    def faults(self, seed: int) -> Iterable[Fault]:
        """Yield the faults, enumerated where that is possible, in an order that depends only on the seed.

        Quick faults come first and need no `prepare`; a campaign calls `prepare` before it asks for all of them.
        """
        ...

    def prepare(self, folder: Path) -> None:
        """Produce in `folder` what all faults are compared with; do nothing if it is already there."""
        ...

    def inject(self, fault: Fault, folder: Path, scratch: Path) -> Outcome:
        """Inject one fault, using the reference in `folder` and the empty folder `scratch`, and check the invariants.

        The caller removes `scratch` afterwards. A program that does not end within its generous deadline is killed and
        is a broken invariant, not an exception.
        """
        ...
