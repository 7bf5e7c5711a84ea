"""Replays samples of earlier tasks. They are read from their shards again, with new augmentations at each visit.

Which samples: each sample has a number in [0, 1), a hash of (seed, id). The samples with the `budget` smallest numbers
of all earlier tasks are kept. So every earlier sample is equally likely, labels play no role, and the share kept of a
task only shrinks as more tasks end. Only ids are stored.

When: replay is an endless stream of global batches of the same size as in training. Each pass visits every sample once,
in a new order. The position in the stream is part of a checkpoint.

B samples kept, N in a batch on this rank.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastcssl.data.draws import Reserved, uniform
from fastcssl.data.loader import Batch
from fastcssl.data.prepared import Selection
from fastcssl.learn.methods import Inputs
from fastcssl.learn.strategies import CurrentTask

Ids = npt.NDArray[np.int64]


def choice(task: CurrentTask, tasks: tuple[int, ...], budget: int, seed: int) -> Ids:
    """Returns the ids that are kept of these tasks, sorted."""
    id_S = task.open(Selection(tasks=tasks, order="endless")).ids
    draw_S = uniform(seed, 0, id_S, np.zeros(len(id_S), np.int64), Reserved.CHOICE_VIEW, 0)
    return np.sort(id_S[np.argsort(draw_S, kind="stable")[:budget]])


def as_inputs(batch: Batch, dtype: torch.dtype, rows: slice = slice(None)) -> Inputs:
    """Returns rows of a batch for a step. Unless the dtype differs, they share memory with the batch."""
    views = tuple(view[rows].to(dtype) for view in batch.views)
    return Inputs(views=views, label=batch.label[rows], id=batch.id[rows])


class Replay:
    """The ids that are kept, and the position of the stream. Both are part of a checkpoint."""

    def __init__(self) -> None:
        self.id_B = torch.zeros(0, dtype=torch.int64)  # sorted
        self.batch = 0  # the batch that the next row comes from
        self._row = 0  # the next row of that batch
        self._task: CurrentTask | None = None
        self._batches: Iterator[Batch] | None = None
        self._held: Batch | None = None

    def begin(self, task: CurrentTask) -> None:
        """Starts a new stream. It opens at the first `next`, so a position may still be loaded from a checkpoint."""
        self.close()
        self._task, self.batch, self._row = task, 0, 0

    @property
    def epoch(self) -> int:
        """The epoch number with which the task's replayed samples are drawn."""
        assert self._task is not None
        return Reserved.REPLAY_EPOCH + self._task.index

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next(self, like: Inputs) -> Inputs:
        """Returns as many replayed samples as `like` has, in its precision. They are valid until the next call."""
        parts, missing = [], len(like.label)
        while missing:
            batch = self._current()
            rows = slice(self._row, min(self._row + missing, len(batch.label)))
            part = as_inputs(batch, like.views[0].dtype, rows)
            missing -= rows.stop - rows.start
            parts.append(_cloned(part) if missing else part)
            self._row = rows.stop
            if self._row == len(batch.label):
                self._held, self._row = None, 0
                self.batch += 1
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _current(self) -> Batch:
        assert self._task is not None
        if self._batches is None:
            ids = self.id_B.cpu().numpy()
            stream = self._task.open(Selection(tasks=self._task.earlier, ids=ids, order="endless"))
            stream.load_state_dict(stream.state_dict() | {"epoch": self.epoch, "batch": self.batch})
            self._batches = stream.epoch(self.epoch)
        if self._held is None:
            self._held = next(self._batches)
        return self._held

    def close(self) -> None:
        """Closes the stream. It reopens at the same position."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
        self._batches = self._held = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.id_B, "batch": self.batch, "row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        self.id_B = state["id"].to(self.id_B.device, copy=True)
        self.batch, self._row = state["batch"], state["row"]


def _cloned(inputs: Inputs) -> Inputs:
    views = tuple(view.clone() for view in inputs.views)
    return Inputs(views=views, label=inputs.label.clone(), id=inputs.id.clone())


def _joined(parts: list[Inputs]) -> Inputs:
    return Inputs(
        views=tuple(torch.cat(views) for views in zip(*(part.views for part in parts), strict=True)),
        label=torch.cat([part.label for part in parts]),
        id=torch.cat([part.id for part in parts]),
    )


def check_budget(budget: int) -> None:
    """Raises ValueError unless at least one sample is kept."""
    if budget < 1:
        raise ValueError(f"strategy.budget is {budget}; keep at least one sample.")
