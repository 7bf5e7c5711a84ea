"""Splits samples into tasks. The result depends only on the samples, the kind, the number of tasks and the order.

The reference order is that of CaSSLe's code: classes by torch's randperm with seed 5, data by random_split with seed
42, and DomainNet's domains in a fixed sequence.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dataprep.errors import PrepError
from dataprep.samples import NO_DOMAIN, Samples
from dataprep.suggest import nearest

Kind = Literal["class", "data", "domain", "joint"]

REFERENCE_CLASS_SEED = 5
REFERENCE_DATA_SEED = 42
DOMAINNET_ORDER = ("real", "quickdraw", "painting", "sketch", "infograph", "clipart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How samples become tasks. Without a seed and an order of names, the order is the reference's."""

    kind: Kind
    num_tasks: int
    seed: int | None = None
    order: tuple[str, ...] = ()  # the names of all classes or domains; () for the seed's or the reference's order
    sizes: tuple[int, ...] = ()  # classes or domains of each task, or relative numbers of images; () for equal tasks

    def __str__(self) -> str:
        order = "given order" if self.order else "reference order" if self.seed is None else f"seed {self.seed}"
        sizes = f" of {', '.join(map(str, self.sizes))}" if self.sizes else ""
        return f"{self.kind}, {self.num_tasks} task{'s' * (self.num_tasks != 1)}{sizes}, {order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The classes and domains of a task."""

    name: str
    classes: tuple[int, ...]  # labels, in the order in which they were drawn
    domains: tuple[int, ...]  # empty if the data has no domains


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The tasks, and which task each sample belongs to."""

    tasks: tuple[Task, ...]
    task_S: npt.NDArray[np.int32]  # the task of every training and validation sample


def randperm(n: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns what torch.randperm(n) gives on the CPU after torch.manual_seed(seed), without needing torch."""
    words = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 2**32, size=max(n - 1, 0), dtype=np.uint32)
    steps = (words.astype(np.int64) % (n - np.arange(max(n - 1, 0)))).tolist()
    perm = list(range(n))
    for i, step in enumerate(steps):
        perm[i], perm[i + step] = perm[i + step], perm[i]
    return np.array(perm, np.int64)


def split(samples: Samples, classes: tuple[str, ...], domains: tuple[str, ...], scenario: Scenario) -> Assignment:
    """Returns the task of every sample. Raises PrepError if the scenario does not fit the samples."""
    if scenario.num_tasks < 1:
        raise PrepError(f"--tasks {scenario.num_tasks} is too small. Use at least one task.")
    if scenario.kind == "class":
        plan = _by_class(samples, classes, scenario)
    elif scenario.kind == "data":
        plan = _by_data(samples, scenario)
    elif scenario.kind == "domain":
        plan = _by_domain(samples, domains, scenario)
    else:
        plan = _joint(samples, scenario)
    counts = np.bincount(plan.task_S[~samples.is_val_S], minlength=len(plan.tasks))
    if not counts.all():
        number = int(np.argmin(counts))
        raise PrepError(
            f"Task {number} ({plan.tasks[number].name}) would have no training images. Use fewer --tasks or more data."
        )
    return plan


def _by_class(samples: Samples, classes: tuple[str, ...], scenario: Scenario) -> Assignment:
    num_tasks, num_classes = scenario.num_tasks, len(classes)
    if not scenario.sizes and num_classes % num_tasks:
        divisors = [t for t in range(1, num_classes + 1) if num_classes % t == 0]
        raise PrepError(
            f"{num_classes} classes cannot be cut into {num_tasks} equal tasks. "
            f"Use --tasks with one of {', '.join(map(str, divisors))}, or with a list of sizes that add up to "
            f"{num_classes}."
        )
    if scenario.order:
        order = _ordered(scenario.order, classes, "class")
    else:
        order = randperm(num_classes, REFERENCE_CLASS_SEED if scenario.seed is None else scenario.seed).tolist()
    groups = _cut(order, scenario.sizes or (num_classes // num_tasks,) * num_tasks, "classes")
    tasks, first = [], 1
    for labels in groups:
        name = f"classes {first}-{first + len(labels) - 1}"
        tasks.append(Task(name=name, classes=tuple(labels), domains=_domains_in(samples)))
        first += len(labels)
    return Assignment(tasks=tuple(tasks), task_S=_task_of_each(groups)[samples.label_S])


def _ordered(names: tuple[str, ...], known: tuple[str, ...], what: Literal["class", "domain"]) -> list[int]:
    """Returns the positions in `known` of names that a user gave. They must be all of them, each once."""
    place = {name: number for number, name in enumerate(known)}
    plural = "classes" if what == "class" else "domains"
    for name in names:
        if name not in place:
            raise PrepError(
                f"The order names the {what} {name!r}, which the data does not have. {nearest(name, known)}"
            )
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise PrepError(f"The order names the {what} {twice!r} twice. Name each of the {len(known)} {plural} once.")
    missing = [name for name in known if name not in set(names)]
    if missing:
        chosen = "--classes" if what == "class" else "--domains"
        raise PrepError(
            f"The order names {len(names)} of the {len(known)} {plural}; {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing{' among others' * (len(missing) > 3)}. Name each of them "
            f"once. To leave some out, build with {chosen}."
        )
    return [place[name] for name in names]


def _cut(order: list[int], sizes: tuple[int, ...], what: str) -> list[list[int]]:
    """Returns consecutive groups of these sizes, which must add up to the length of `order`."""
    if sum(sizes) != len(order):
        listed = ",".join(map(str, sizes))
        raise PrepError(
            f"--tasks {listed} adds up to {sum(sizes)}, but there are {len(order)} {what}. Use sizes that add up to "
            f"{len(order)}."
        )
    ends = np.cumsum(sizes).tolist()
    return [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _task_of_each(groups: list[list[int]]) -> npt.NDArray[np.int32]:
    """Returns the task of every class or domain."""
    task_of_each = np.empty(sum(map(len, groups)), np.int32)
    for task, members in enumerate(groups):
        task_of_each[members] = task
    return task_of_each


def _by_data(samples: Samples, scenario: Scenario) -> Assignment:
    seed = REFERENCE_DATA_SEED if scenario.seed is None else scenario.seed
    task_S = np.empty(len(samples), np.int32)
    for is_val in (False, True):
        rows = np.flatnonzero(samples.is_val_S == is_val)
        if len(rows) and len(rows) < scenario.num_tasks:
            raise PrepError(
                f"{len(rows)} {'validation' if is_val else 'training'} images cannot fill {scenario.num_tasks} "
                "tasks. Use fewer --tasks."
            )
        sizes = scenario.sizes or (1,) * scenario.num_tasks
        # All tasks have the length they ask for, rounded down; the remainder goes to the first, as in the reference.
        lengths = [len(rows) * size // sum(sizes) for size in sizes]
        lengths[0] += len(rows) - sum(lengths)
        task_S[rows[randperm(len(rows), seed)]] = np.repeat(np.arange(len(sizes)), lengths)
    tasks = tuple(
        Task(name=f"part {t + 1}", classes=_classes_in(samples), domains=_domains_in(samples))
        for t in range(scenario.num_tasks)
    )
    return Assignment(tasks=tasks, task_S=task_S)


def _by_domain(samples: Samples, domains: tuple[str, ...], scenario: Scenario) -> Assignment:
    if not domains:
        raise PrepError(
            "This data has no domains. Use --scenario class, data or joint, "
            "or a source with domains (domainnet, synthetic, or a folder of {domain}/{class} trees)."
        )
    if not scenario.sizes and scenario.num_tasks != len(domains):
        raise PrepError(
            f"{len(domains)} domains make {len(domains)} tasks, not {scenario.num_tasks}. Leave out --tasks, or give "
            f"it a list with the number of domains of each task, which add up to {len(domains)}."
        )
    if scenario.order:
        order = _ordered(scenario.order, domains, "domain")
    elif scenario.seed is not None:
        order = randperm(len(domains), scenario.seed).tolist()
    else:
        order = [domains.index(name) for name in reference_domains(domains)]
    groups = _cut(order, scenario.sizes or (1,) * len(domains), "domains")
    tasks = tuple(
        Task(name=", ".join(domains[d] for d in group), classes=_classes_in(samples, group), domains=tuple(group))
        for group in groups
    )
    return Assignment(tasks=tasks, task_S=_task_of_each(groups)[samples.domain_S])


def reference_domains(domains: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the domains in the reference's order, which is the source's own unless they are DomainNet's."""
    known = tuple(name for name in DOMAINNET_ORDER if name in domains)
    return known if len(known) == len(domains) else domains


def _joint(samples: Samples, scenario: Scenario) -> Assignment:
    if scenario.num_tasks != 1:
        raise PrepError(f"Joint training is one task, not {scenario.num_tasks}. Leave out --tasks.")
    task = Task(name="all", classes=_classes_in(samples), domains=_domains_in(samples))
    return Assignment(tasks=(task,), task_S=np.zeros(len(samples), np.int32))


def _classes_in(samples: Samples, domains: list[int] | None = None) -> tuple[int, ...]:
    labels = samples.label_S if domains is None else samples.label_S[np.isin(samples.domain_S, domains)]
    return tuple(np.unique(labels).tolist())


def _domains_in(samples: Samples) -> tuple[int, ...]:
    return tuple(d for d in np.unique(samples.domain_S).tolist() if d != NO_DOMAIN)
