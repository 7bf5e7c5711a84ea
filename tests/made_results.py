"""A small result of an evaluation, to store, load and draw."""

import dataclasses
from typing import Any

from fastcssl.runs.results import EvaluatedData, EvaluatedEncoder, Evaluation, MadeBy, Metrics, References


def evaluation(**changes: Any) -> Evaluation:
    made = Evaluation(
        format=1,
        probe="linear",
        scope="all",
        settings={"lr": 0.3, "batch_size": 256, "views": ["a"]},
        manifest=EvaluatedData(
            path="/d", sha256="ab", source="synthetic", scenario="class", num_tasks=2, task_names=["a", "b"]
        ),
        columns=["a", "b"],
        checkpoints=[
            EvaluatedEncoder(task=t, path=f"task{t}.safetensors", sha256=str(t), seen=list(range(t + 1)))
            for t in range(2)
        ],
        top1=[[0.5, 0.25], [0.5, 0.75]],
        top5=[[1.0, 0.5], [1.0, 1.0]],
        overall_top1=[0.375, 0.625],
        overall_top5=[0.75, 1.0],
        num_val=[4, 4],
        reference=References(ft=[None, 0.5], random=[0.1, 0.1]),
        metrics=Metrics(A=[0.5, 0.625], numbers={"S": 0.0, "P": -0.25, "F": 0.15}),
        seconds=1.5,
        made_by=MadeBy(command="fastcssl-eval run", version="0.1.0", commit=None),
    )
    return dataclasses.replace(made, **changes)
