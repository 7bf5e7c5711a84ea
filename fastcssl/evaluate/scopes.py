"""The scopes of a probe: the columns of its table, and groups of columns that share a classifier.

all               one classifier over all classes of all tasks, validated on each task (task-agnostic)
per-task          one classifier per task, with only the task's images and classes
domain-agnostic   one classifier over all domains, validated on each domain
domain-aware      one classifier per domain
semi-1, semi-10   like `all`, trained on 1 % or 10 % of the training images, the same share of each class
downstream:NAME   like `all`, on another data set
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dataprep.manifest import SPLITS
from dataprep.suggest import nearest
from fastcssl.data.draws import Reserved, uniform
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.errors import UserError
from fastcssl.runs.results import DOWNSTREAM, ScopeName

SampleIds = npt.NDArray[np.int64]
SHARES = {"semi-1": 0.01, "semi-10": 0.1}
SUBSET_SEED = 42  # as in the references' split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationColumn:
    """An evaluation task: validation images whose accuracy is reported separately."""

    name: str
    val_ids: SampleIds  # sorted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The training images of one classifier, and the columns that it is validated on."""

    train_ids: SampleIds  # sorted
    labels: SampleIds  # the classes it distinguishes, sorted
    columns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The columns and classifiers of a scope on one data set."""

    scope: str
    columns: tuple[EvaluationColumn, ...]
    groups: tuple[Group, ...]
    follows_tasks: bool  # column i is task i of the manifest

    @property
    def train_ids(self) -> SampleIds:
        """Returns the training ids of all classifiers together, sorted."""
        return np.unique(np.concatenate([group.train_ids for group in self.groups]))

    @property
    def num_val(self) -> list[int]:
        """Returns the number of validation images of each column."""
        return [len(column.val_ids) for column in self.columns]

    @property
    def chance(self) -> list[float]:
        """Returns for each column the accuracy of guessing one of the classes at random."""
        num_classes = {i: len(group.labels) for group in self.groups for i in group.columns}
        return [1 / num_classes[i] for i in range(len(self.columns))]


def check_scope(scope: str) -> None:
    """Raises UserError for a scope that does not exist."""
    if scope not in get_args(ScopeName) and not scope.startswith(DOWNSTREAM):
        known = nearest(scope, get_args(ScopeName))
        raise UserError(f"There is no scope {scope!r}. {known} For other data use --downstream NAME=DIR.")


def plan(data: Prepared, scope: str) -> Plan:
    """Returns the columns and groups of a scope. Raises UserError if the scope cannot be evaluated on this data."""
    check_scope(scope)
    _check_labels(data)
    tasks = data.manifest.tasks
    if scope.startswith("domain-"):
        names, members, follows = _domains(data, scope)
    else:
        names, members, follows = [task.name for task in tasks], _task_of_row(data), True
    table = data.table
    in_use = table["is_stored"] & (members >= 0)
    parts = []
    for column, name in enumerate(names):
        mine = in_use & (members == column)
        train, val = table[mine & ~table["is_val"]], table[mine & table["is_val"]]
        for split, rows in (("validation", val), ("training", train)):
            if not len(rows):
                raise UserError(
                    f"{name} (column {column}) of {data.folder} has no {split} images, so it has no accuracy. Prepare "
                    "the data with a validation split, or evaluate on other data with --data."
                )
        parts.append((name, train, val))
    columns = tuple(EvaluationColumn(name=name, val_ids=val["id"].astype(np.int64)) for name, _, val in parts)
    if scope in ("per-task", "domain-aware"):
        groups = tuple(
            Group(
                train_ids=train["id"].astype(np.int64),
                labels=np.union1d(train["label"], val["label"]).astype(np.int64),
                columns=(i,),
            )
            for i, (_, train, val) in enumerate(parts)
        )
    else:
        train_ids = np.sort(np.concatenate([train["id"] for _, train, _ in parts])).astype(np.int64)
        if scope in SHARES:
            train_ids = stratified_share(data, train_ids, SHARES[scope])
        labels = np.arange(len(data.manifest.classes), dtype=np.int64)
        groups = (Group(train_ids=train_ids, labels=labels, columns=tuple(range(len(columns)))),)
    return Plan(scope=scope, columns=columns, groups=groups, follows_tasks=follows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Several scopes in one plan, in which a classifier or validation set that scopes have in common occurs once."""

    plan: Plan
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by scope: the columns of `plan` that it needs

    def groups_of(self, scope: str) -> set[int]:
        """Returns the numbers of the groups that a scope needs."""
        wanted = set(self.places[scope])
        return {number for number, group in enumerate(self.plan.groups) if wanted & set(group.columns)}


def merged(plans: Sequence[Plan]) -> Survey:
    """Returns one plan for several scopes of a data set.

    A column of the merged plan belongs to one group: two classifiers that are validated on the same images have two
    columns. Scopes that coincide on the data, such as `all` and `domain-agnostic` where tasks are domains, share all.
    """
    columns: list[EvaluationColumn] = []
    groups: list[Group] = []
    places: dict[str, tuple[int, ...]] = {}
    for part in plans:
        place_of = [0] * len(part.columns)
        for group in part.groups:
            number = next((n for n, known in enumerate(groups) if _is_same_classifier(known, group)), len(groups))
            if number == len(groups):
                groups.append(replace(group, columns=()))
            for i in group.columns:
                ids, known = part.columns[i].val_ids, groups[number].columns
                place = next((c for c in known if np.array_equal(columns[c].val_ids, ids)), len(columns))
                if place == len(columns):
                    columns.append(part.columns[i])
                    groups[number] = replace(groups[number], columns=(*known, place))
                place_of[i] = place
        places[part.scope] = tuple(place_of)
    plan = Plan(scope=" + ".join(places), columns=tuple(columns), groups=tuple(groups), follows_tasks=False)
    return Survey(plan=plan, places=places)


def _is_same_classifier(one: Group, other: Group) -> bool:
    return np.array_equal(one.train_ids, other.train_ids) and np.array_equal(one.labels, other.labels)


class ClassDraw(NamedTuple):
    """Samples sorted by class and, within a class, by a random draw. S: samples, C: classes."""

    draw_S: npt.NDArray[np.float64]  # the draw of each sample, in the order given
    order_S: npt.NDArray[np.int64]  # indices that sort the samples
    place_S: npt.NDArray[np.int64]  # for each sorted sample, its place within its class
    label_C: npt.NDArray[np.int64]
    count_C: npt.NDArray[np.int64]


def drawn_by_class(rows: npt.NDArray[Any], seed: int) -> ClassDraw:
    """Returns the order of samples, shuffled within each class by a draw that depends only on (seed, id)."""
    draw_S = uniform(seed, 0, rows["id"], np.zeros(len(rows), np.int64), Reserved.SUBSET_VIEW, 0)
    order_S = np.lexsort((draw_S, rows["label"]))
    label_C, begin_C, count_C = np.unique(rows["label"][order_S], return_index=True, return_counts=True)
    place_S = np.arange(len(rows)) - np.repeat(begin_C, count_C)
    return ClassDraw(draw_S, order_S, place_S, label_C, count_C)


def stratified_share(data: Prepared, train_ids: SampleIds, share: float, seed: int = SUBSET_SEED) -> SampleIds:
    """Returns the sorted ids of this share of each class, rounded. 10 % contains 1 %: see `drawn_by_class`."""
    rows = data.table[np.searchsorted(data.table["id"], train_ids)]
    _, order_S, place_S, label_C, count_C = drawn_by_class(rows, seed)
    wanted_C = np.floor(share * count_C + 0.5).astype(np.int64)
    if len(empty := np.flatnonzero(wanted_C == 0)):
        name = data.manifest.classes[int(label_C[empty[0]])]
        more = f", and likewise for {len(empty) - 1} more classes" if len(empty) > 1 else ""
        raise UserError(
            f"{100 * share:g} % of the {count_C[empty[0]]} training images of class {name!r} is none{more}. Use "
            f"{'--scope semi-10, ' if share < 0.1 else ''}a data set with more images per class, or --scope all."
        )
    chosen: SampleIds = np.sort(rows["id"][order_S[place_S < np.repeat(wanted_C, count_C)]]).astype(np.int64)
    return chosen


def _check_labels(data: Prepared) -> None:
    labels, num_classes = data.table["label"], len(data.manifest.classes)
    if num_classes < 2:
        raise UserError(
            f"{data.folder} has {num_classes} class{'' if num_classes == 1 else 'es'}, but a probe needs at least two. "
            "Prepare images in one folder per class, or give other data with --data."
        )
    wrong = int(((labels < 0) | (labels >= num_classes)).sum())
    if wrong:
        raise UserError(
            f"{wrong} images of {data.folder} have a label outside its {num_classes} classes. Prepare the data again."
        )


def _task_of_row(data: Prepared) -> npt.NDArray[np.int64]:
    """Returns the task of each row of the table, or -1 for rows that belong to no task."""
    found = np.full(len(data.table), -1, np.int64)
    for number in range(len(data.manifest.tasks)):
        for split in SPLITS:
            found[data.rows(Selection(tasks=(number,), split=split))] = number
    return found


def _domains(data: Prepared, scope: str) -> tuple[list[str], npt.NDArray[np.int64], bool]:
    """Returns the names of the domains in the order of the tasks, the column of each row, and whether it follows tasks.

    The column is the place of the row's domain among the names, or -1 for rows that belong to no task or no domain.
    Columns follow tasks if domain i is task i.
    """
    manifest = data.manifest
    if len(manifest.domains) < 2:
        raise UserError(
            f"--scope {scope} needs at least two domains, but {data.folder} has {len(manifest.domains) or 'none'}. "
            "Use --scope all or per-task."
        )
    order = list(dict.fromkeys(domain for task in manifest.tasks for domain in task.domains))
    column_of = np.full(len(manifest.domains), -1, np.int64)
    column_of[order] = np.arange(len(order))
    follows = manifest.scenario.kind == "domain" and [task.domains for task in manifest.tasks] == [[d] for d in order]
    known = (_task_of_row(data) >= 0) & (data.table["domain"] >= 0)
    members = np.where(known, column_of[data.table["domain"]], -1)
    return [manifest.domains[domain] for domain in order], members, follows
