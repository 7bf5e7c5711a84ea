"""Metrics against tables worked out by hand."""

import copy
import pickle
from pathlib import Path

import pytest

from fastcssl.runs import metrics
from fastcssl.runs.results import References, metrics_of

# Rows: after learning task t. Columns: accuracy on task i.
THREE = [
    [0.60, 0.30, 0.20],
    [0.50, 0.70, 0.40],
    [0.40, 0.65, 0.80],
]
FT = [0.55, 0.60, 0.70]
RANDOM = [0.25, 0.20, 0.15]


def test_average_is_over_the_tasks_learnt_so_far() -> None:
    assert metrics.average(THREE) == pytest.approx([0.60, 0.60, (0.40 + 0.65 + 0.80) / 3])


def test_average_over_all_counts_the_tasks_to_come() -> None:
    assert metrics.average_over_all(THREE) == pytest.approx([1.1 / 3, 1.6 / 3, 1.85 / 3])


def test_average_of_a_joint_encoder_and_of_one_that_nobody_knows() -> None:
    assert metrics.average([[0.2, 0.6]], seen=[[0, 1]]) == pytest.approx([0.4])
    assert metrics.average([[0.2, 0.6]], seen=[[1]]) == pytest.approx([0.6])
    assert metrics.average([[0.2, 0.6]], seen=[[]]) == pytest.approx([0.4])


def test_stability_by_hand() -> None:
    # task 0: best 0.60, now 0.40; task 1: best 0.70, now 0.65
    assert metrics.stability(THREE) == pytest.approx((0.20 + 0.05) / 2)


def test_stability_counts_an_early_peak_and_is_never_negative() -> None:
    assert metrics.stability([[0.1, 0.9], [0.5, 0.5]]) == 0
    # the best may lie before the task was learnt
    assert metrics.stability([[0.3, 0.8, 0.1], [0.3, 0.5, 0.1], [0.3, 0.4, 0.9]]) == pytest.approx(0.4 / 2)


def test_plasticity_by_hand() -> None:
    # after task 0: mean(0.30 - 0.60, 0.20 - 0.70) = -0.40; after task 1: 0.40 - 0.70 = -0.30
    assert metrics.plasticity(THREE, FT) == pytest.approx((-0.40 - 0.30) / 2)


def test_plasticity_does_not_use_the_first_reference() -> None:
    assert metrics.plasticity(THREE, [None, *FT[1:]]) == metrics.plasticity(THREE, FT)
    with pytest.raises(ValueError, match="FT of task 2 is not known"):
        metrics.plasticity(THREE, [*FT[:2], None])


def test_forward_transfer_by_hand() -> None:
    # task 1 after task 0: 0.30 - 0.20; task 2 after task 1: 0.40 - 0.15
    assert metrics.forward_transfer(THREE, RANDOM) == pytest.approx((0.10 + 0.25) / 2)


def test_four_tasks_by_hand() -> None:
    a = [[0.5, 0.2, 0.1, 0.0], [0.4, 0.6, 0.2, 0.1], [0.45, 0.5, 0.7, 0.3], [0.3, 0.55, 0.6, 0.8]]
    ft = [0.5, 0.5, 0.6, 0.7]
    assert metrics.average(a) == pytest.approx([0.5, 0.5, 0.55, 0.5625])
    assert metrics.stability(a) == pytest.approx((0.2 + 0.05 + 0.1) / 3)
    after = [(-0.3 - 0.5 - 0.7) / 3, (-0.4 - 0.6) / 2, -0.4]
    assert metrics.plasticity(a, ft) == pytest.approx(sum(after) / 3)
    assert metrics.forward_transfer(a, [0.1, 0.1, 0.1, 0.1]) == pytest.approx((0.1 + 0.1 + 0.2) / 3)


@pytest.mark.parametrize("table", [[], [[]], [[0.1, 0.2], [0.3]]])
def test_a_table_that_is_none(table: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="table of accuracies"):
        metrics.average(table)


@pytest.mark.parametrize("table", [[[0.5]], [[0.1, 0.2]]])
def test_a_table_too_small_for_forgetting(table: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="needs one of each for every task"):
        metrics.stability(table)


def test_what_cannot_be_known_is_none_and_says_why() -> None:
    seen = [[0], [0, 1], [0, 1, 2]]
    whole = metrics_of(THREE, seen, References(ft=[None, 0.6, 0.7], random=RANDOM))
    assert (whole.S, whole.P, whole.F) == pytest.approx((0.125, -0.35, 0.175)) and not whole.missing
    bare = metrics_of(THREE, seen, References(ft=[0.5, None, 0.7]))
    assert bare.S == pytest.approx(0.125) and bare.P is None and bare.F is None
    assert "task 1 are missing" in bare.missing[0] and "random encoder" in bare.missing[1]
    early = metrics_of(THREE[:2], seen[:2], References(ft=[0.5, 0.6, 0.7], random=RANDOM))
    assert (early.S, early.P, early.F) == (None, None, None) and len(early.A) == 2 and len(early.missing) == 1


def test_every_row_of_the_table_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    documented = text.partition("## Metrics")[2].partition("\n## ")[0]
    for name, row in metrics.METRICS.items():
        assert row.name == name and row.title in documented and f"${name}" in documented, name
        assert not row.description.endswith(".")
    assert list(metrics.METRICS) == ["A", "S", "P", "F"]


def test_a_pickled_copy_has_the_same_metrics() -> None:
    made = metrics_of(THREE, [[0], [0, 1], [0, 1, 2]], References(random=RANDOM))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == made and other.S == made.S and other.P is None
