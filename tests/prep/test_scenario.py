"""Tasks partition the data, do so the same way every time, and in the reference's order when asked."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.scenario import DOMAINNET_ORDER, Assignment, Scenario, randperm, split

# The reference's class order, CIFAR-100 and ImageNet-100 alike: seed 5, five tasks.
REFERENCE_100 = """
    11 22 39 23 42 30 78 81 64 20 29 79 15 69 86 63 55 53 73 68
    89 67 58 97 96 92 37 14 75 51 54 7 3 6 50 40 45 4 83 98
    27 12 8 99 60 87 28 5 84 34 82 16 72 49 59 31 71 35 66 76
    61 17 36 62 13 2 38 94 80 19 25 18 0 1 46 74 85 91 52 77
    21 33 32 88 93 70 44 47 26 57 90 95 48 65 43 10 9 56 24 41
""".split()


def make(labels: list[int], domains: list[int] | None = None, is_val: list[bool] | None = None) -> Samples:
    domains = domains or [NO_DOMAIN] * len(labels)
    is_val = is_val or [False] * len(labels)
    rows = zip((f"{i}" for i in range(len(labels))), labels, domains, is_val, strict=True)
    return Samples.collect(rows)


def do(
    samples: Samples, kind: str, tasks: int, seed: int | None = None, classes: int = 0, domains: int = 0
) -> Assignment:
    names = tuple(f"c{i}" for i in range(classes or int(samples.label_S.max()) + 1))
    scenario = Scenario(kind=kind, num_tasks=tasks, seed=seed)  # type: ignore[arg-type]
    return split(samples, names, tuple(f"d{i}" for i in range(domains)), scenario)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 3000))
def test_randperm_is_torchs(seed: int, n: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert torch.randperm(n, generator=generator).tolist() == randperm(n, seed).tolist()


def test_reference_class_order() -> None:
    plan = do(make(list(range(100))), "class", 5)
    assert [str(label) for task in plan.tasks for label in task.classes] == REFERENCE_100
    ten = do(make(list(range(100))), "class", 10)
    assert [str(label) for task in ten.tasks for label in task.classes] == REFERENCE_100
    assert len(ten.tasks[0].classes) == 10


def test_reference_class_order_of_imagenet1k() -> None:
    plan = do(make(list(range(1000))), "class", 5)
    assert plan.tasks[0].classes[:10] == (411, 49, 291, 695, 678, 515, 112, 606, 6, 942)
    assert plan.tasks[1].classes[:5] == (912, 191, 909, 385, 697)


def test_reference_data_split_of_imagenet100() -> None:
    n = 126_689
    order = randperm(n, 42)
    assert order[:10].tolist() == [67309, 43316, 38181, 112869, 75070, 109168, 60458, 41661, 79149, 68922]
    samples = make(np.repeat(np.arange(100), 1267)[:n].tolist())
    for tasks, sizes in ((5, [25341] + [25337] * 4), (10, [12677] + [12668] * 9)):
        plan = do(samples, "data", tasks)
        assert np.bincount(plan.task_S).tolist() == sizes
        assert set(order[: sizes[0]].tolist()) == set(np.flatnonzero(plan.task_S == 0).tolist())


def test_data_split_is_torchs_random_split() -> None:
    n, tasks = 103, 4
    lengths = [n - 3 * (n // tasks)] + [n // tasks] * 3
    parts = torch.utils.data.random_split(range(n), lengths, torch.Generator().manual_seed(42))  # type: ignore[arg-type]
    plan = do(make([0] * n), "data", tasks)
    for task, part in enumerate(parts):
        assert set(part.indices) == set(np.flatnonzero(plan.task_S == task).tolist())


def test_reference_domain_order() -> None:
    domains = tuple(sorted(DOMAINNET_ORDER))
    samples = make([0] * 6, domains=list(range(6)))
    plan = split(samples, ("c",), domains, Scenario(kind="domain", num_tasks=6))
    assert [task.name for task in plan.tasks] == [
        "real", "quickdraw", "painting", "sketch", "infograph", "clipart",
    ]  # fmt: skip
    assert [domains[d] for task in plan.tasks for d in task.domains] == [task.name for task in plan.tasks]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tasks_partition_and_are_stable(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["class", "data", "domain", "joint"]))
    tasks = 1 if kind == "joint" else data.draw(st.integers(1, 6))
    classes = tasks * data.draw(st.integers(1, 4))
    # Every class and domain occurs in training, the rest is drawn freely.
    free = data.draw(st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, tasks - 1), st.booleans())))
    num_val = sum(is_val for *_, is_val in free)
    if kind == "data" and 0 < num_val < tasks:
        free = [(label, domain, False) for label, domain, _ in free]
    must = [(c, c % tasks, False) for c in range(classes)]
    rows = must + free
    labels, domains, is_val = map(list, zip(*rows, strict=True))
    seed = data.draw(st.none() | st.integers(0, 2**40))
    samples = make(labels, domains, is_val)
    plan = do(samples, kind, tasks, seed, classes=classes, domains=tasks)
    assert len(plan.tasks) == tasks
    assert plan.task_S.shape == (len(rows),) and plan.task_S.min() >= 0 and plan.task_S.max() < tasks
    again = do(samples, kind, tasks, seed, classes=classes, domains=tasks)
    assert (again.task_S == plan.task_S).all() and again.tasks == plan.tasks
    for number, task in enumerate(plan.tasks):
        mine = plan.task_S == number
        assert set(samples.label_S[mine].tolist()) <= set(task.classes)
        if kind == "domain":
            assert set(samples.domain_S[mine].tolist()) <= set(task.domains)
    if kind == "class":  # training and validation are split by the same rule
        assert sorted(label for task in plan.tasks for label in task.classes) == list(range(classes))
        owner = {label: number for number, task in enumerate(plan.tasks) for label in task.classes}
        assert all(owner[label] == task for label, task in zip(labels, plan.task_S.tolist(), strict=True))
    if kind == "data":
        sizes = np.bincount(plan.task_S[~samples.is_val_S], minlength=tasks)
        assert len(set(sizes[1:].tolist())) <= 1 and 0 <= sizes[0] - sizes[-1] < tasks


def test_another_seed_gives_another_order() -> None:
    samples = make(list(range(20)) * 5)
    assert do(samples, "class", 4, seed=1).tasks != do(samples, "class", 4, seed=2).tasks
    assert (do(samples, "data", 4, seed=1).task_S != do(samples, "data", 4, seed=2).task_S).any()
    assert do(samples, "class", 4, seed=5).tasks == do(samples, "class", 4).tasks


@pytest.mark.parametrize(
    ("kind", "tasks", "says"),
    [
        ("class", 3, "4 classes cannot be cut into 3 equal tasks"),
        ("data", 9, "8 training images cannot fill 9 tasks"),
        ("domain", 2, "has no domains"),
        ("joint", 2, "Joint training is one task"),
        ("class", 0, "at least one task"),
    ],
)
def test_impossible_splits_say_why(kind: str, tasks: int, says: str) -> None:
    with pytest.raises(PrepError, match=says):
        do(make([0, 1, 2, 3] * 2), kind, tasks)


def test_a_task_without_training_images_is_refused() -> None:
    with pytest.raises(PrepError, match="no training images"):
        do(make([0, 0, 0]), "class", 2, classes=2)


def test_ids_survive_a_limit() -> None:
    samples = make([0] * 5 + [1] * 5, is_val=[False] * 3 + [True] * 2 + [False] * 5)
    few = samples.limited(2)
    assert few.id_S.tolist() == [0, 1, 3, 4, 5, 6]
    assert [few.key(row) for row in range(len(few))] == ["0", "1", "3", "4", "5", "6"]
    assert few.fingerprint() != samples.fingerprint()
    assert samples.limited(99).fingerprint() == samples.fingerprint()
