"""The request, the machine, the progress and the outcome of an evaluation."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fastcssl.distributed.world import Agreed, World
from fastcssl.errors import UserError
from fastcssl.evaluate.probes.knn import KnnMetric
from fastcssl.evaluate.targets import Target
from fastcssl.learn.precision import Precision
from fastcssl.runs.overview import Result
from fastcssl.runs.results import Evaluation, Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that says what to evaluate, and how.

    Several learning rates, batch sizes, momenta or strengths make a grid. () means the default: the method's learning
    rate, the data's batch size.
    """

    probes: tuple[Probe, ...] = ("linear",)
    scopes: tuple[str, ...] = ("all",)
    downstream: tuple[tuple[str, Path], ...] = ()
    data: Path | None = None
    lrs: tuple[float, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    momenta: tuple[float, ...] = (0.9,)
    epochs: int = 100
    strengths: tuple[float, ...] = (1.0,)
    k: int = 20
    metrics: tuple[KnnMetric, ...] = ("cosine",)
    size_px: int | None = None
    seed: int = 0
    random_encoder: bool = True
    again: bool = False

    def __post_init__(self) -> None:
        least = (("k", self.k, 1), ("size-px", 1 if self.size_px is None else self.size_px, 1), ("seed", self.seed, 0))
        for name, value, allowed in least:
            if value < allowed:
                raise UserError(f"--{name} {value}: give {allowed} or more.")
        if not all(0 < strength < math.inf for strength in self.strengths):
            raise UserError("--strength: give finite numbers above 0. A larger strength penalises less.")
        if not self.probes or not (self.scopes or self.downstream):
            raise UserError("There is nothing to evaluate: give a --probe, and a --scope or a --downstream set.")


class EvaluationInterrupted(Agreed):
    """A signal asked the evaluation to stop. All ranks raise this together; finished results are kept."""

    def __init__(self, signal: int) -> None:
        super().__init__("Interrupted. The results so far are kept; run the same command to continue.")
        self.signal = signal


class Progress:
    """Receives the progress of an evaluation. This base class shows nothing."""

    def begin(self, title: str, num_images: int, done: int = 0) -> None: ...

    def advance(self, num_images: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMachine:
    """The machine that an evaluation runs on: ranks, device and loader; also how often to save."""

    world: World = field(default_factory=World)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "auto"
    loader: str = "auto"
    num_threads: int | None = None
    checkpoint_minutes: float = 5.0
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One table of accuracies of one run, and the file that holds it."""

    target: Target
    path: Path
    evaluation: Evaluation
    was_there: bool  # the file already existed, and nothing was computed

    @property
    def as_result(self) -> Result:
        """Returns the row that it is in an overview."""
        return Result(run=self.target.folder, path=self.path, evaluation=self.evaluation)
