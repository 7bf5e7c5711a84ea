"""Reads which tasks a user asks for: the values of --tasks and --order, which are numbers, lists or files.

A file has one name per line. In a file for --tasks, blank lines separate the tasks. Lines that start with # are
comments.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dataprep.errors import PrepError

GivenOrder = tuple[str, ...] | Literal["reference"] | None  # None: nothing was said


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTasks:
    """The number of tasks, their sizes if they differ, and the order of the classes or domains."""

    num_tasks: int | None = None
    sizes: tuple[int, ...] = ()
    order: GivenOrder = None


def asked_tasks(tasks: str | None, order: str | None, seed: int | None) -> AskedTasks:
    """Returns what the values of --tasks, --order and --seed ask for."""
    if seed is not None and order is not None:
        own = "the reference order has its own seeds" if order == "reference" else "a seed draws an order"
        raise PrepError(f"--seed and --order exclude each other: {own}. Leave one out.")
    found = AskedTasks() if tasks is None else _tasks(tasks)
    if found.order is not None and (seed is not None or order is not None):
        flag = "--order" if order is not None else "--seed"
        raise PrepError(f"--tasks {tasks} and {flag} exclude each other: the file already has an order. Leave one out.")
    if order is None:
        return found
    return AskedTasks(num_tasks=found.num_tasks, sizes=found.sizes, order=_order(order))


def _tasks(text: str) -> AskedTasks:
    parts = [part.strip() for part in text.split(",")]
    if all(part.removeprefix("-").isdecimal() for part in parts):
        numbers = tuple(map(int, parts))
        if len(numbers) == 1:
            return AskedTasks(num_tasks=numbers[0])
        if min(numbers) < 1:
            raise PrepError(f"--tasks {text}: a task of size {min(numbers)} would be empty. Use sizes of at least 1.")
        return AskedTasks(num_tasks=len(numbers), sizes=numbers)
    if not os.path.isfile(text):
        raise PrepError(
            f"--tasks {text} is not a number, and there is no file of that name. Give a number of equal tasks, sizes "
            "such as 50,10,10, or a text file with one name per line and a blank line between tasks."
        )
    groups = _groups(Path(text), "--tasks")
    return AskedTasks(
        num_tasks=len(groups),
        sizes=tuple(map(len, groups)),
        order=tuple(name for group in groups for name in group),
    )


def _order(text: str) -> GivenOrder:
    if text == "reference":
        return "reference"
    if os.path.isfile(text):
        return tuple(name for group in _groups(Path(text), "--order") for name in group)
    if "/" in text or text.endswith(".txt"):
        raise PrepError(
            f"--order {text}: there is no such file. Give a text file with one name per line, or names separated by "
            "commas."
        )
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not names:
        raise PrepError("--order is empty. Give names separated by commas, a text file of names, or reference.")
    return names


def _groups(file: Path, flag: str) -> list[list[str]]:
    """Returns the names in a file, in groups that blank lines separate."""
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise PrepError(f"{flag} {file} cannot be read ({error.strerror}). Give a text file.") from None
    groups: list[list[str]] = [[]]
    for line in map(str.strip, lines):
        if not line:
            groups.append([])
        elif not line.startswith("#"):
            groups[-1].append(line)
    found = [group for group in groups if group]
    if not found:
        raise PrepError(f"{flag} {file} names nothing. Write one name per line.")
    return found
