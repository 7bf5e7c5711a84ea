"""Runs made by hand: folders as fastcssl-train and fastcssl-eval leave them, with numbers from a formula."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcssl.config.config import plain
from fastcssl.config.recipes import RECIPES, recipe
from fastcssl.runs.log import EpochReport, RunLog, StepReport, TaskReport
from fastcssl.runs.results import EvaluatedData, EvaluatedEncoder, Evaluation, MadeBy, Probe, References, metrics_of
from fastcssl.runs.status import Status, write_status

_TERMS: Mapping[str, Sequence[str]] = {"pnr": ("plasticity", "stability"), "cassle": ("moco", "cassle")}


def made_run(
    folder: Path,
    name: str = "demo",
    method: str = "moco",
    strategy: str = "pnr",
    *,
    seed: int = 5,
    tasks_done: int | None = None,
    steps_a_task: int = 40,
    wait_share: float = 0.05,
    idle_share: float | None = None,
    **changes: Any,
) -> Path:
    found = recipe(name, method, strategy)
    found = found.changed_to(dataclasses.replace(found.config, seed=seed, **changes))
    count = 1 if strategy == "joint" or found.config.only_task is not None else RECIPES[name].num_tasks
    done = count if tasks_done is None else tasks_done
    folder.mkdir(parents=True)
    described = {
        "config": plain(found.config),
        "sources": dict(found.sources),
        "settings": found.settings,
        "words": [name, method, strategy],
        "data": "/data/prepared",
        "manifest_sha256": "0" * 64,
        "tasks": [list(range(RECIPES[name].num_tasks))] if strategy == "joint" else [[t] for t in range(count)],
        "task_names": ["all tasks"] if strategy == "joint" else [f"classes {t}" for t in range(count)],
        "machine": {"device": "cpu" if idle_share is None else "cuda", "loader": "native", "num_cores": 8},
    }
    (folder / "config.json").write_text(json.dumps(described))
    state = "finished" if done == count else "stopped"
    write_status(
        folder,
        Status(
            state=state, title=f"{name} · {method} · {strategy} · data · CPU (native)", task=min(done, count - 1),
            num_tasks=count, epoch=0, num_epochs=2, step=done * steps_a_task, num_steps=count * steps_a_task,
        ),
    )  # fmt: skip
    _log(folder, strategy, done, count, steps_a_task, wait_share, idle_share)
    return folder


def _log(
    folder: Path, strategy: str, done: int, count: int, steps_a_task: int, wait_share: float, idle_share: float | None
) -> None:
    begun = min(done + 1, count)  # the task after the last finished one has logged something
    with RunLog(folder) as log:
        for task in range(begun):
            names = _TERMS.get(strategy, ("loss",)) if task else ("loss",)
            for batch in range(steps_a_task if task < done else steps_a_task // 2):
                fall = math.exp(-3 * batch / steps_a_task)
                terms = {name: 4 + task + number + 2 * fall for number, name in enumerate(names)}
                log.write(
                    StepReport(
                        step=task * steps_a_task + batch + 1, task=task, epoch=2 * batch // steps_a_task, batch=batch,
                        lr=0.1, loss=sum(terms.values()), terms=terms, images_per_s=800 + 50 * math.sin(batch / 3),
                        data_wait_share=wait_share * (1.2 + math.cos(batch / 4)), device_idle_share=idle_share,
                    )
                )  # fmt: skip
            seconds = 60.0
            stages = {
                "main": {"model": (1 - wait_share) * seconds, "wait": wait_share * seconds, "probe": 4.0},
                "loader": {"read": 2.0, "decode": 50.0, "crop": 20.0, "photometric": 15.0},
                "device": {} if idle_share is None else {"idle": idle_share * seconds, "transfer": 1.0},
            }
            step = task * steps_a_task + steps_a_task // 2
            log.write(
                EpochReport(
                    step=step, task=task, epoch=0, lr=0.1, loss=5.0, terms={}, images_per_s=800.0,
                    data_wait_share=wait_share, seconds=seconds / 2, stages=stages,
                )
            )  # fmt: skip
            if task < done:
                log.write(
                    TaskReport(
                        step=(task + 1) * steps_a_task, task=task, name=f"classes {task}", num_images=1600,
                        num_epochs=2, loss=4.5, images_per_s=800.0, data_wait_share=wait_share, seconds=seconds,
                        accuracy={"knn": 0.31, "linear": 0.42}, stages=stages,
                    )
                )  # fmt: skip


def accuracies(num_rows: int, num_columns: int, level: float = 0.6) -> list[list[float]]:
    """Forgets a little, and knows least of what is to come."""
    return [
        [
            min(level + 0.02 * t - 0.015 * max(t - i, 0) - 0.05 * max(i - t, 0) + 0.03 * math.sin(2.1 * i), 0.99)
            for i in range(num_columns)
        ]
        for t in range(num_rows)
    ]


def evaluated(
    run: Path,
    *,
    probe: Probe = "linear",
    scope: str = "all",
    level: float = 0.6,
    columns: Sequence[str] | None = None,
    rows: int | None = None,
    ft: bool = True,
    settings: Mapping[str, Any] | None = None,
    top1: list[list[float]] | None = None,
) -> Evaluation:
    """Writes the result and returns it."""
    described = json.loads((run / "config.json").read_text())
    num_tasks = RECIPES[described["words"][0]].num_tasks
    names = list(columns or [f"classes {20 * t + 1}-{20 * t + 20}" for t in range(num_tasks)])
    groups: list[list[int]] = described["tasks"]
    seen = [sorted(task for group in groups[: t + 1] for task in group) for t in range(len(groups))]
    seen = seen[: len(groups) if rows is None else rows]
    table = top1 or accuracies(len(seen), len(names), level)
    reference = References(ft=[level - 0.06] * len(names) if ft else None)
    found = Evaluation(
        format=1,
        probe=probe,
        scope=scope,
        settings=dict(settings or {"epochs": 100}),
        manifest=EvaluatedData(
            path="/data/prepared/manifest.json", sha256="0" * 64, source="cifar100", scenario="class",
            num_tasks=num_tasks, task_names=names,
        ),
        columns=names,
        checkpoints=[
            EvaluatedEncoder(task=t, path=f"encoders/task{t}.safetensors", sha256="1" * 64, seen=tasks)
            for t, tasks in enumerate(seen)
        ],
        top1=table,
        top5=[[min(value + 0.2, 1.0) for value in row] for row in table],
        overall_top1=[sum(row) / len(row) for row in table],
        overall_top5=[min(sum(row) / len(row) + 0.2, 1.0) for row in table],
        num_val=[2000] * len(names),
        reference=reference,
        metrics=metrics_of(table, seen if len(names) == num_tasks else [[] for _ in seen], reference),
        seconds=83.0,
        made_by=MadeBy(command="fastcssl-eval", version="0.1.0", commit=None),
    )  # fmt: skip
    found.save(run)
    return found
