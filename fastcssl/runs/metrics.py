"""What a continual learner is judged by: pure functions of the table of accuracies.

a[t][i] is the accuracy on task i after learning task t, both counted from 0 here and from 1 in the paper. T rows and
columns; accuracies are shares 0..1, and so is everything below. Definitions: PNR, section 4.1 and the appendix
"Measures for Stability and Plasticity"; CaSSLe for forward transfer.
"""

from collections.abc import Sequence
from statistics import fmean

Table = Sequence[Sequence[float]]


def average(a: Table, seen: Sequence[Sequence[int]] | None = None) -> list[float]:
    """A_t: the mean accuracy on the tasks learnt so far.

    The paper prints A_t = 1/t sum_{i=1..T} a_{i,t}; with that upper limit it would exceed 1, so the sum ends at t.
    `seen`: which tasks each row's encoder has learnt, when it is not 0..t; an empty list counts all columns.
    """
    _check_table(a)
    found = []
    for t, row in enumerate(a):
        tasks = range(min(t + 1, len(row))) if seen is None else seen[t] or range(len(row))
        found.append(fmean(row[i] for i in tasks))
    return found


def average_over_all(a: Table) -> list[float]:
    """Avg(a_{1:T,t}) of the paper's figures: the mean over all tasks, those to come included."""
    _check_table(a)
    return [fmean(row) for row in a]


def stability(a: Table) -> float:
    """S = 1/(T-1) sum_{i<T} max_t (a_{i,t} - a_{i,T}); CaSSLe's forgetting. Lower is better, never below 0."""
    last = _check_square(a)
    return fmean(max(row[i] for row in a) - a[last][i] for i in range(last))


def plasticity(a: Table, ft: Sequence[float | None]) -> float:
    """P = 1/(T-1) sum_{j<T} 1/(T-j) sum_{i>j} (a_{i,j} - FT_i). Higher is better.

    FT_i: the accuracy on task i of a model trained on task i alone. FT of the first task is not used and may be None.
    """
    last = _check_square(a)
    known = _row("FT", ft, last)
    return fmean(fmean(a[j][i] - known[i] for i in range(j + 1, last + 1)) for j in range(last))


def forward_transfer(a: Table, random: Sequence[float | None]) -> float:
    """F = 1/(T-1) sum_{i>=2} (a_{i,i-1} - R_i), R_i: the accuracy of a random encoder. Higher is better."""
    last = _check_square(a)
    known = _row("R", random, last)
    return fmean(a[i - 1][i] - known[i] for i in range(1, last + 1))


def _check_table(a: Table) -> None:
    if not a or not a[0] or any(len(row) != len(a[0]) for row in a):
        raise ValueError("The table of accuracies has no rows, no columns or rows of unequal length.")


def _check_square(a: Table) -> int:
    """The last task's number."""
    _check_table(a)
    if len(a) != len(a[0]) or len(a) < 2:
        raise ValueError(
            f"The table has {len(a)} rows and {len(a[0])} columns; this metric needs one of each for every task, "
            "and two tasks at least."
        )
    return len(a) - 1


def _row(name: str, values: Sequence[float | None], last: int) -> list[float]:
    """Complete but for the first, which no metric uses."""
    if len(values) != last + 1:
        raise ValueError(f"{name} has {len(values)} values for {last + 1} tasks.")
    missing = [i for i in range(1, last + 1) if values[i] is None]
    if missing:
        raise ValueError(f"{name} of task {missing[0]} is not known.")
    return [0.0 if value is None else value for value in values]
