"""Parses --online-probe, which says when and how to probe the encoder during training."""

from dataclasses import dataclass
from typing import Literal, get_args

from dataprep.suggest import nearest
from fastcssl.data.prepared import Prepared
from fastcssl.errors import UserError

ProbeKind = Literal["off", "clean", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """Which probe to run, and when: after every E-th epoch of a task and at its end, or only at its end (every=0)."""

    every: int = 0  # epochs
    kind: ProbeKind = "off"

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"--online-probe: every is {self.every}; give a number of epochs, 0 for task ends only.")
        if self.kind not in get_args(ProbeKind):
            raise ValueError(f"--online-probe has no kind {self.kind!r}. {nearest(self.kind, get_args(ProbeKind))}")

    @classmethod
    def parse(cls, text: str) -> "ProbePlan":
        """Returns the plan for "off", or for "every=E" and "clean" or "parity", either or both, joined by a comma."""
        words = [word.strip() for word in text.split(",")]
        if words == ["off"]:
            return cls()
        every: int | None = None
        kind: ProbeKind | None = None
        for word in words:
            key, equals, value = word.partition("=")
            if key not in ("every", *get_args(ProbeKind)):
                raise ValueError(
                    f"--online-probe {text!r}: there is no {key!r}. {nearest(key, ('every', 'clean', 'parity', 'off'))}"
                )
            if key == "off":
                raise ValueError(f"--online-probe {text!r}: 'off' cannot be combined. Remove it, or the rest.")
            if (every if key == "every" else kind) is not None:
                raise ValueError(
                    f"--online-probe {text!r} gives {'the interval' if equals else 'the kind of probe'} twice. "
                    "Give it once."
                )
            if key == "every":
                if not value.isdecimal():
                    raise ValueError(
                        f"--online-probe {text!r}: every needs a number of epochs, such as every=2, "
                        "or every=0 for task ends only."
                    )
                every = int(value)
            else:
                if equals:
                    raise ValueError(f"--online-probe {text!r}: {key!r} takes no value. Write only {key!r}.")
                kind = "parity" if key == "parity" else "clean"
        return cls(every=every or 0, kind=kind or "clean")

    def __str__(self) -> str:
        return "off" if self.kind == "off" else f"every={self.every}{',parity' if self.kind == 'parity' else ''}"

    def due(self, epoch: int, num_epochs: int) -> bool:
        """Returns whether to probe after epoch `epoch` of a task, counted from 0."""
        done = epoch + 1
        return self.kind != "off" and (done == num_epochs or (self.every > 0 and done % self.every == 0))

    def check(self, data: Prepared) -> None:
        """Raises UserError, at the start of a run, when a task has no validation images to probe."""
        empty = [number for number, task in enumerate(data.manifest.tasks) if not task.val.count]
        if self.kind != "off" and empty:
            raise UserError(
                f"--online-probe {self} needs validation images, but task {empty[0]} of {data.folder} has none. "
                "Prepare the data with a validation split, or use --online-probe off."
            )
