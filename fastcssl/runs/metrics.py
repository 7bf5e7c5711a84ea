"""What a continual learner is judged by: pure functions of the table of accuracies, and the table that lists them.

a[t][i] is the accuracy on task i after learning task t, both counted from 0 here and from 1 in the paper. T rows and
columns; accuracies are shares 0..1, and so is everything below. Definitions: PNR, section 4.1 and the appendix
"Measures for Stability and Plasticity"; CaSSLe for forward transfer.

To add a metric, write its function, give it a row of `METRICS`, and describe it in docs/evaluation.md. Result files,
tables and reports follow the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Literal

AccuracyTable = Sequence[Sequence[float]]


def average(a: AccuracyTable, seen: Sequence[Sequence[int]] | None = None) -> list[float]:
    """Returns A_t: the mean accuracy on the tasks learnt so far.

    The paper prints A_t = 1/t sum_{i=1..T} a_{i,t}; with that upper limit it would exceed 1, so the sum ends at t.
    `seen`: which tasks each row's encoder has learnt, when it is not 0..t; an empty list counts all columns.
    """
    _check_table(a)
    found = []
    for t, row in enumerate(a):
        tasks = range(min(t + 1, len(row))) if seen is None else seen[t] or range(len(row))
        found.append(fmean(row[i] for i in tasks))
    return found


def average_over_all(a: AccuracyTable) -> list[float]:
    """Returns Avg(a_{1:T,t}) of the paper's figures: the mean over all tasks, those to come included."""
    _check_table(a)
    return [fmean(row) for row in a]


def stability(a: AccuracyTable) -> float:
    """Returns S = 1/(T-1) sum_{i<T} max_t (a_{i,t} - a_{i,T}); CaSSLe's forgetting. Lower is better, never below 0."""
    last = _check_square(a)
    return fmean(max(row[i] for row in a) - a[last][i] for i in range(last))


def plasticity(a: AccuracyTable, ft: Sequence[float | None]) -> float:
    """Returns P = 1/(T-1) sum_{j<T} 1/(T-j) sum_{i>j} (a_{i,j} - FT_i). Higher is better.

    FT_i: the accuracy on task i of a model trained on task i alone. FT of the first task is not used and may be None.
    """
    last = _check_square(a)
    known = _row("FT", ft, last)
    return fmean(fmean(a[j][i] - known[i] for i in range(j + 1, last + 1)) for j in range(last))


def forward_transfer(a: AccuracyTable, random: Sequence[float | None]) -> float:
    """Returns F = 1/(T-1) sum_{i>=2} (a_{i,i-1} - R_i), R_i: the accuracy of a random encoder. Higher is better."""
    last = _check_square(a)
    known = _row("R", random, last)
    return fmean(a[i - 1][i] - known[i] for i in range(1, last + 1))


def _check_table(a: AccuracyTable) -> None:
    """Raises ValueError unless all rows are of one length above 0."""
    if not a or not a[0] or any(len(row) != len(a[0]) for row in a):
        raise ValueError("The table of accuracies has no rows, no columns or rows of unequal length.")


def _check_square(a: AccuracyTable) -> int:
    """Checks that there is a row and a column for every task, and returns the last task's number."""
    _check_table(a)
    if len(a) != len(a[0]) or len(a) < 2:
        raise ValueError(
            f"The table has {len(a)} rows and {len(a[0])} columns; this metric needs one of each for every task, "
            "and two tasks at least."
        )
    return len(a) - 1


def _row(name: str, values: Sequence[float | None], last: int) -> list[float]:
    """Returns the values, complete but for the first, which no metric uses and which may be None."""
    if len(values) != last + 1:
        raise ValueError(f"{name} has {len(values)} values for {last + 1} tasks.")
    missing = [i for i in range(1, last + 1) if values[i] is None]
    if missing:
        raise ValueError(f"{name} of task {missing[0]} is not known.")
    return [0.0 if value is None else value for value in values]


# ---- The table of metrics --------------------------------------------------------------------------------------------


class Need(Enum):
    """What a metric is computed from, besides accuracies after at least one task."""

    EVERY_TASK = "a checkpoint after every task, two or more"
    REFERENCES = "models trained on one task alone"
    RANDOM_ENCODER = "the accuracy of a random encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """What is known about a run: its table of accuracies, and those of other encoders under the same probe."""

    top1: AccuracyTable
    seen: Sequence[Sequence[int]]  # the columns that each row's encoder has learnt; [] if nobody knows
    ft: Sequence[float | None] | None = None  # FT_i: trained on task i alone
    random: Sequence[float] | None = None  # not trained at all

    @property
    def has_every_task(self) -> bool:
        """True if row t has learnt tasks 0..t, for every task, and there are two or more."""
        num_columns = len(self.top1[0])
        return num_columns > 1 and learnt_in_order(self.seen, num_columns)

    @property
    def missing_references(self) -> list[int]:
        """Returns the tasks whose FT_i is not known, but for the first, which no metric uses."""
        return [i for i in range(1, len(self.top1[0])) if self.ft is None or self.ft[i] is None]

    def lacks(self, need: Need) -> bool:
        """Returns whether what a metric needs is not there."""
        if need is Need.EVERY_TASK:
            return not self.has_every_task
        return bool(self.missing_references) if need is Need.REFERENCES else self.random is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: a row of `METRICS`."""

    name: str  # its key in result files, and its heading
    better: Literal["higher", "lower"]
    needs: tuple[Need, ...]
    compute: Callable[[MetricInputs], float]  # called only where all needs are met
    title: str  # a word or two, for beside the number
    description: str  # a sentence or the like, without its full stop
    is_compared: bool = True  # has a column where runs stand side by side

    @property
    def heading(self) -> str:
        """Returns the name with an arrow that points to what is better."""
        return f"{self.name} {'↑' if self.better == 'higher' else '↓'}"


def learnt_in_order(seen: Sequence[Sequence[int]], num_tasks: int) -> bool:
    """Returns whether there is a checkpoint after each task, which has learnt that task and those before it."""
    return [list(tasks) for tasks in seen] == [list(range(t + 1)) for t in range(num_tasks)]


def _plasticity(known: MetricInputs) -> float:
    assert known.ft is not None
    return plasticity(known.top1, known.ft)


def _forward_transfer(known: MetricInputs) -> float:
    assert known.random is not None
    return forward_transfer(known.top1, known.random)


AVERAGE = MetricSpec(  # the only one with a value after each checkpoint; this is the last of them
    name="A",
    better="higher",
    needs=(),
    compute=lambda known: average(known.top1, known.seen)[-1],
    title="average",
    description="mean accuracy on the tasks learnt, after the last one",
)
METRICS: dict[str, MetricSpec] = {
    row.name: row
    for row in (
        AVERAGE,
        MetricSpec(
            name="S",
            better="lower",
            needs=(Need.EVERY_TASK,),
            compute=lambda known: stability(known.top1),
            title="forgetting",
            description="stability: how far accuracy on a task fell from its best to the end, a mean over tasks",
        ),
        MetricSpec(
            name="P",
            better="higher",
            needs=(Need.EVERY_TASK, Need.REFERENCES),
            compute=_plasticity,
            title="plasticity",
            description="plasticity: accuracy on tasks to come above that of a model trained on each alone",
        ),
        MetricSpec(
            name="F",
            better="higher",
            needs=(Need.EVERY_TASK, Need.RANDOM_ENCODER),
            compute=_forward_transfer,
            title="forward transfer",
            description="forward transfer: accuracy on the next task above that of a random encoder",
            is_compared=False,
        ),
    )
}


def single_metrics() -> list[MetricSpec]:
    """Returns the metrics that are one number for a run: all but A, which has one after each checkpoint too."""
    return [row for row in METRICS.values() if row is not AVERAGE]


def compared_metrics() -> list[MetricSpec]:
    """Returns the metrics that have a column where runs stand side by side."""
    return [row for row in METRICS.values() if row.is_compared]
