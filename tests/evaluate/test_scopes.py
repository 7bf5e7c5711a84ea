"""Which images a probe learns from and is judged by."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_runs import prepared

from dataprep.id_ranges import format_ids
from dataprep.manifest import TaskSplit
from fastcssl.data.prepared import Prepared
from fastcssl.errors import UserError
from fastcssl.evaluate.scopes import merged, plan, stratified_share

EVEN = "classes=20,train=4,val=4"  # an image of each class in each of the four domains


@pytest.fixture(scope="module")
def by_class(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """20 classes in 2 tasks; 12 images a class to train on."""
    return Prepared.open(prepared(tmp_path_factory.mktemp("class") / "out", source="classes=20,train=12,val=2"))


@pytest.fixture(scope="module")
def by_domain(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared.open(prepared(tmp_path_factory.mktemp("domain") / "out", "domain", source=EVEN))


def ids(data: Prepared, task: int, *, val: bool) -> list[int]:
    entry = data.manifest.tasks[task]
    return list((entry.val if val else entry.train).iter_ids())


def test_all_is_one_classifier_over_everything_judged_on_each_task(by_class: Prepared) -> None:
    found = plan(by_class, "all")
    (group,) = found.groups
    assert [column.name for column in found.columns] == [task.name for task in by_class.manifest.tasks]
    for task, column in enumerate(found.columns):
        assert column.val_ids.tolist() == ids(by_class, task, val=True)
    assert group.train_ids.tolist() == sorted(ids(by_class, 0, val=False) + ids(by_class, 1, val=False))
    assert group.labels.tolist() == list(range(20)) and group.columns == (0, 1) and found.follows_tasks


def test_per_task_is_a_classifier_of_each_tasks_own_classes(by_class: Prepared) -> None:
    found = plan(by_class, "per-task")
    for task, group in enumerate(found.groups):
        assert group.columns == (task,)
        assert group.train_ids.tolist() == ids(by_class, task, val=False)
        assert group.labels.tolist() == sorted(by_class.manifest.tasks[task].classes)


def test_domains_are_columns_in_the_order_of_the_tasks(by_domain: Prepared) -> None:
    agnostic, aware = plan(by_domain, "domain-agnostic"), plan(by_domain, "domain-aware")
    names = [by_domain.manifest.domains[task.domains[0]] for task in by_domain.manifest.tasks]
    assert [column.name for column in agnostic.columns] == [column.name for column in aware.columns] == names
    assert len(agnostic.groups) == 1 and len(aware.groups) == len(names) > 2
    assert agnostic.follows_tasks and aware.follows_tasks
    for task, group in enumerate(aware.groups):
        assert group.train_ids.tolist() == ids(by_domain, task, val=False)
        assert agnostic.columns[task].val_ids.tolist() == ids(by_domain, task, val=True)


def test_domains_of_data_that_is_split_otherwise(by_domain: Prepared) -> None:
    """Two tasks that each hold several domains: the columns are domains all the same."""
    first, *rest = by_domain.manifest.tasks
    joined = replace(
        first,
        name="rest",
        domains=[task.domains[0] for task in rest],
        train=_joined([task.train for task in rest]),
        val=_joined([task.val for task in rest]),
    )
    scenario = replace(by_domain.manifest.scenario, num_tasks=2)
    manifest = replace(by_domain.manifest, tasks=[first, joined], scenario=scenario)
    found = plan(replace(by_domain, manifest=manifest), "domain-aware")
    assert len(found.columns) == 1 + len(rest) and not found.follows_tasks


def _joined(parts: list[TaskSplit]) -> TaskSplit:
    numbers = sorted(i for part in parts for i in part.iter_ids())
    return replace(parts[0], count=len(numbers), ids=format_ids(numbers))


def test_a_share_is_stratified_seeded_and_nested(by_class: Prepared) -> None:
    (group,) = plan(by_class, "semi-10").groups
    labels = by_class.table["label"][np.searchsorted(by_class.table["id"], group.train_ids)]
    assert np.bincount(labels, minlength=20).tolist() == [1] * 20  # 1.2, rounded
    everything = plan(by_class, "all").groups[0].train_ids
    quarter, half = (stratified_share(by_class, everything, share) for share in (0.25, 0.5))
    assert len(quarter) == 60 and len(half) == 120 and set(group.train_ids) <= set(quarter) <= set(half)
    assert np.array_equal(half, stratified_share(by_class, everything, 0.5))
    assert not np.array_equal(half, stratified_share(by_class, everything, 0.5, seed=43))


def test_a_class_that_a_share_leaves_empty(by_class: Prepared) -> None:
    with pytest.raises(
        UserError, match=r"1 % of the 12 training images of class '\S+' is none, and likewise for 19 more .*semi-10"
    ):
        plan(by_class, "semi-1")


def test_a_scope_that_does_not_exist(by_class: Prepared) -> None:
    with pytest.raises(UserError, match=r"no scope 'per_task'\. Did you mean 'per-task'"):
        plan(by_class, "per_task")


def test_data_without_domains(by_class: Prepared) -> None:
    bare = replace(by_class, manifest=replace(by_class.manifest, domains=[]))
    with pytest.raises(UserError, match=r"needs at least two domains, but .* has none"):
        plan(bare, "domain-aware")


def test_data_without_labels(by_class: Prepared) -> None:
    one = replace(by_class, manifest=replace(by_class.manifest, classes=["images"]))
    with pytest.raises(UserError, match="has 1 class, but a probe needs at least two"):
        plan(one, "all")
    table = by_class.table.copy()
    table["label"][:3] = -1
    with pytest.raises(UserError, match=r"3 images of .* have a label outside its 20 classes"):
        plan(replace(by_class, table=table), "all")


def test_a_task_without_validation_images(tmp_path: Path) -> None:
    data = Prepared.open(prepared(tmp_path / "out", source="classes=20,train=2,val=0"))
    with pytest.raises(UserError, match=r"\(column 0\) of .* has no validation images"):
        plan(data, "all")


def test_scopes_that_coincide_are_computed_once(by_domain: Prepared) -> None:
    scopes = ("all", "domain-agnostic", "per-task", "domain-aware")
    survey = merged([plan(by_domain, scope) for scope in scopes])
    num_tasks = len(by_domain.manifest.tasks)
    assert len(survey.plan.groups) == 1 + num_tasks and len(survey.plan.columns) == 2 * num_tasks
    assert survey.places["all"] == survey.places["domain-agnostic"] == tuple(range(num_tasks))
    assert survey.places["per-task"] == survey.places["domain-aware"] == tuple(range(num_tasks, 2 * num_tasks))
    assert survey.groups_of("all") == {0} and survey.groups_of("domain-aware") == set(range(1, 1 + num_tasks))


def test_a_merged_plan_has_what_each_scope_has(by_class: Prepared) -> None:
    plans = [plan(by_class, scope) for scope in ("per-task", "semi-10", "all")]
    survey = merged(plans)
    owner = {column: group for group in survey.plan.groups for column in group.columns}
    assert len(owner) == len(survey.plan.columns) == 6 and len(survey.plan.groups) == 4
    for part in plans:
        for group in part.groups:
            for i in group.columns:
                place = survey.places[part.scope][i]
                assert survey.plan.columns[place].val_ids.tolist() == part.columns[i].val_ids.tolist()
                assert owner[place].train_ids.tolist() == group.train_ids.tolist()
                assert owner[place].labels.tolist() == group.labels.tolist()
    assert plans[0].chance == [0.1, 0.1] and plans[2].chance == [0.05, 0.05]
