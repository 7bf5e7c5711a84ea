"""Models trained on one task alone: which run they are references of, and the commands that make those missing."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from fastcssl.targets import Target


def matched(target: Target, others: Sequence[Target], manifest_sha256: str) -> dict[int, int]:
    """By task, which of the others is its reference: the same data, method and encoder; rather of the same seed."""
    found: dict[int, int] = {}
    if target.only_task is not None or not target.is_run:
        return found
    for index, other in enumerate(others):
        task = other.only_task
        alike = (other.method, other.encoder) == (target.method, target.encoder)
        if task is None or not alike or other.manifest_sha256 != manifest_sha256:
            continue
        if task not in found or (other.seed == target.seed and others[found[task]].seed != target.seed):
            found[task] = index
    return found


def unmatched(targets: Sequence[Target], references: Sequence[Target]) -> list[Target]:
    """Those that are of no use to any of the targets."""
    return [
        other for other in references if not any(matched(target, [other], target.manifest_sha256) for target in targets)
    ]


def missing_commands(target: Target, tasks: Sequence[int], manifest: Path) -> list[str]:
    """Fine-tuning from nothing: with one task alone every strategy is that."""
    data = target.data or manifest
    return [
        " ".join(
            (
                f"fastcssl-train {target.recipe} {target.method} finetune --data {shlex.quote(str(data))}",
                f"--only-task {task} --out {shlex.quote(str(out_of(target, task)))}",
                *target.flags,
            )
        )
        for task in tasks
    ]


def out_of(target: Target, task: int) -> Path:
    """Of the method, not of the strategy: all its strategies share the references."""
    return target.folder.parent / f"{target.recipe}-{target.method}-only{task}-seed{target.seed}"
