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

Kind = Literal["class", "data", "domain", "joint"]

REFERENCE_CLASS_SEED = 5
REFERENCE_DATA_SEED = 42
DOMAINNET_ORDER = ("real", "quickdraw", "painting", "sketch", "infograph", "clipart")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How samples become tasks. If `seed` is None, the order is the reference's."""

    kind: Kind
    num_tasks: int
    seed: int | None = None

    def __str__(self) -> str:
        order = "reference order" if self.seed is None else f"seed {self.seed}"
        return f"{self.kind}, {self.num_tasks} task{'s' * (self.num_tasks != 1)}, {order}"


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
    if num_classes % num_tasks:
        divisors = [t for t in range(1, num_classes + 1) if num_classes % t == 0]
        raise PrepError(
            f"{num_classes} classes cannot be cut into {num_tasks} equal tasks. "
            f"Use --tasks with one of {', '.join(map(str, divisors))}."
        )
    order = randperm(num_classes, REFERENCE_CLASS_SEED if scenario.seed is None else scenario.seed)
    per_task = num_classes // num_tasks
    task_of_class = np.empty(num_classes, np.int32)
    task_of_class[order] = np.arange(num_classes) // per_task
    tasks = tuple(
        Task(
            name=f"classes {t * per_task + 1}-{(t + 1) * per_task}",
            classes=tuple(order[t * per_task : (t + 1) * per_task].tolist()),
            domains=_domains_in(samples),
        )
        for t in range(num_tasks)
    )
    return Assignment(tasks=tasks, task_S=task_of_class[samples.label_S])


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
        # All tasks have the same length; the remainder goes to the first task, as in the reference.
        length = len(rows) // scenario.num_tasks
        first = len(rows) - length * (scenario.num_tasks - 1)
        position = np.arange(len(rows))
        task_of_position = np.where(position < first, 0, 1 + (position - first) // max(length, 1))
        task_S[rows[randperm(len(rows), seed)]] = task_of_position
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
    if scenario.num_tasks != len(domains):
        raise PrepError(
            f"{len(domains)} domains make {len(domains)} tasks, not {scenario.num_tasks}. Leave out --tasks."
        )
    if scenario.seed is not None:
        order = randperm(len(domains), scenario.seed).tolist()
    elif set(domains) <= set(DOMAINNET_ORDER):
        order = [domains.index(name) for name in DOMAINNET_ORDER if name in domains]
    else:
        order = list(range(len(domains)))
    task_of_domain = np.empty(len(domains), np.int32)
    task_of_domain[order] = np.arange(len(domains))
    tasks = tuple(Task(name=domains[d], classes=_classes_in(samples, domain=d), domains=(d,)) for d in order)
    return Assignment(tasks=tasks, task_S=task_of_domain[samples.domain_S])


def _joint(samples: Samples, scenario: Scenario) -> Assignment:
    if scenario.num_tasks != 1:
        raise PrepError(f"Joint training is one task, not {scenario.num_tasks}. Leave out --tasks.")
    task = Task(name="all", classes=_classes_in(samples), domains=_domains_in(samples))
    return Assignment(tasks=(task,), task_S=np.zeros(len(samples), np.int32))


def _classes_in(samples: Samples, domain: int | None = None) -> tuple[int, ...]:
    labels = samples.label_S if domain is None else samples.label_S[samples.domain_S == domain]
    return tuple(np.unique(labels).tolist())


def _domains_in(samples: Samples) -> tuple[int, ...]:
    return tuple(d for d in np.unique(samples.domain_S).tolist() if d != NO_DOMAIN)
