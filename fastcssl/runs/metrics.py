"""The metrics of continual learning: pure functions of the table of accuracies, and the table that lists them.

a[t][i] is the accuracy on task i after learning task t, both counted from 0 here and from 1 in the paper. The table has
T rows and T columns. Accuracies are shares in 0..1, and the metrics have the same scale; nothing is in percent. The
definitions are those of PNR (section 4.1 and the appendix "Measures for Stability and Plasticity") and, for forward
transfer, CaSSLe's.

To add a metric, write its function, add a row to `METRICS`, and describe it in docs/evaluation.md. Result files, tables
and reports then include it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Literal

AccuracyTable = Sequence[Sequence[float]]


def average(a: AccuracyTable, seen: Sequence[Sequence[int]] | None = None) -> list[float]:
    """Returns A_t for each row t: the mean accuracy on the tasks learnt so far.

    The paper prints A_t = 1/t sum_{i=1..T} a_{i,t}. With that upper limit it could exceed 1, so the sum ends at t here.
    `seen`: the tasks that each row's encoder has learnt, if not 0..t. For an empty list, all columns count.
    """
    _check_table(a)
    found = []
    for t, row in enumerate(a):
        tasks = range(min(t + 1, len(row))) if seen is None else seen[t] or range(len(row))
        found.append(fmean(row[i] for i in tasks))
    return found


def average_over_all(a: AccuracyTable) -> list[float]:
    """Returns Avg(a_{1:T,t}) of the paper's figures: the mean over all tasks, including those not yet learnt."""
    _check_table(a)
    return [fmean(row) for row in a]


def stability(a: AccuracyTable) -> float:
    """Returns S = 1/(T-1) sum_{i<T} max_t (a_{i,t} - a_{i,T}), CaSSLe's forgetting. At least 0; lower is better."""
    last = _check_square(a)
    return fmean(max(row[i] for row in a) - a[last][i] for i in range(last))


def plasticity(a: AccuracyTable, ft: Sequence[float | None]) -> float:
    """Returns P = 1/(T-1) sum_{j<T} 1/(T-j) sum_{i>j} (a_{i,j} - FT_i). Higher is better.

    FT_i is the accuracy on task i of a model trained only on task i. That of the first task is unused and may be None.
    """
    last = _check_square(a)
    known = _row("FT", ft, last)
    return fmean(fmean(a[j][i] - known[i] for i in range(j + 1, last + 1)) for j in range(last))


def forward_transfer(a: AccuracyTable, random: Sequence[float | None]) -> float:
    """Returns F = 1/(T-1) sum_{i>=2} (a_{i,i-1} - R_i), where R_i is a random encoder's accuracy. Higher is better."""
    last = _check_square(a)
    known = _row("R", random, last)
    return fmean(a[i - 1][i] - known[i] for i in range(1, last + 1))


def _check_table(a: AccuracyTable) -> None:
    """Raises ValueError unless all rows have the same length, above 0."""
    if not a or not a[0] or any(len(row) != len(a[0]) for row in a):
        raise ValueError("The table of accuracies has no rows, no columns, or rows of unequal length.")


def _check_square(a: AccuracyTable) -> int:
    """Checks that there is one row and one column per task, and returns the number of the last task."""
    _check_table(a)
    if len(a) != len(a[0]) or len(a) < 2:
        raise ValueError(
            f"The table has {len(a)} rows and {len(a[0])} columns; this metric needs one of each for every task, "
            "and at least two tasks."
        )
    return len(a) - 1


def _row(name: str, values: Sequence[float | None], last: int) -> list[float]:
    """Returns the values. All but the first must be known; the first may be None, because no metric uses it."""
    if len(values) != last + 1:
        raise ValueError(f"{name} has {len(values)} values for {last + 1} tasks.")
    missing = [i for i in range(1, last + 1) if values[i] is None]
    if missing:
        raise ValueError(f"{name} of task {missing[0]} is not known.")
    return [0.0 if value is None else value for value in values]


# ---- The table of metrics --------------------------------------------------------------------------------------------


class Need(Enum):
    """An input that a metric needs in addition to the accuracies after at least one task."""

    EVERY_TASK = "a checkpoint after every task, two or more"
    REFERENCES = "models trained on one task alone"
    RANDOM_ENCODER = "the accuracy of a random encoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """The inputs of metrics: a run's table of accuracies, and the accuracies of other encoders under the same probe."""

    top1: AccuracyTable
    seen: Sequence[Sequence[int]]  # the columns that each row's encoder has learnt; [] if unknown
    ft: Sequence[float | None] | None = None  # FT_i: of a model trained only on task i
    random: Sequence[float] | None = None  # of an encoder that was not trained

    @property
    def has_every_task(self) -> bool:
        """Returns whether there are two or more tasks, and for each a row that has learnt it and all before it."""
        num_columns = len(self.top1[0])
        return num_columns > 1 and learnt_in_order(self.seen, num_columns)

    @property
    def missing_references(self) -> list[int]:
        """Returns the tasks whose FT_i is unknown, except for the first, which no metric uses."""
        return [i for i in range(1, len(self.top1[0])) if self.ft is None or self.ft[i] is None]

    def lacks(self, need: Need) -> bool:
        """Returns whether an input that a metric needs is missing."""
        if need is Need.EVERY_TASK:
            return not self.has_every_task
        return bool(self.missing_references) if need is Need.REFERENCES else self.random is None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric: a row of `METRICS`."""

    name: str  # its key in result files, and its heading
    better: Literal["higher", "lower"]
    needs: tuple[Need, ...]
    compute: Callable[[MetricInputs], float]  # called only if all needs are met
    title: str  # one or two words, shown beside the number
    description: str  # a phrase without a full stop
    is_compared: bool = True  # whether tables that compare runs have a column for it

    @property
    def heading(self) -> str:
        """Returns the name with an arrow that points in the better direction."""
        return f"{self.name} {'↑' if self.better == 'higher' else '↓'}"


def learnt_in_order(seen: Sequence[Sequence[int]], num_tasks: int) -> bool:
    """Returns whether there is one checkpoint per task, which has learnt that task and all before it."""
    return [list(tasks) for tasks in seen] == [list(range(t + 1)) for t in range(num_tasks)]


def _plasticity(known: MetricInputs) -> float:
    assert known.ft is not None
    return plasticity(known.top1, known.ft)


def _forward_transfer(known: MetricInputs) -> float:
    assert known.random is not None
    return forward_transfer(known.top1, known.random)


AVERAGE = MetricSpec(  # the only metric with a value for each checkpoint; this computes the last one
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
            description="stability: how far accuracy on a task fell from its best to the end, averaged over tasks",
        ),
        MetricSpec(
            name="P",
            better="higher",
            needs=(Need.EVERY_TASK, Need.REFERENCES),
            compute=_plasticity,
            title="plasticity",
            description="plasticity: accuracy on tasks not yet learnt, minus that of a model trained only on each task",
        ),
        MetricSpec(
            name="F",
            better="higher",
            needs=(Need.EVERY_TASK, Need.RANDOM_ENCODER),
            compute=_forward_transfer,
            title="forward transfer",
            description="forward transfer: accuracy on the next task, minus that of a random encoder",
            is_compared=False,
        ),
    )
}


def single_metrics() -> list[MetricSpec]:
    """Returns the metrics with one number per run: all but A, which has one per checkpoint."""
    return [row for row in METRICS.values() if row is not AVERAGE]


def compared_metrics() -> list[MetricSpec]:
    """Returns the metrics that have a column in tables that compare runs."""
    return [row for row in METRICS.values() if row.is_compared]
