"""Determines the order of an epoch and all its views as pure functions of (seed, epoch, sample, visit).

Neither the number of ranks nor the batch size changes the order. Removing a sample does not move the others relative
to each other, because each sample is placed by its own hash.
"""

import sys
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from fastcssl.data.backends import LoaderError, LocalBatch
from fastcssl.data.draws import Drawn, Reserved, draw_views, uniform
from fastcssl.data.prepared import Order, Prepared
from fastcssl.data.views import Policy
from fastcssl.distributed.world import World

Last = Literal["drop", "pad"]
RowNumbers = npt.NDArray[np.int64]


def local_size(batch_size: int, world: World) -> int:
    """Returns how many rows of a global batch each rank loads."""
    if batch_size < 1 or batch_size % world.size:
        raise LoaderError(
            f"The global batch size {batch_size} cannot be shared equally by {world.size} ranks. "
            f"Use a multiple of {world.size}."
        )
    return batch_size // world.size


class EpochPlan:
    """The batches of one epoch for one rank."""

    def __init__(
        self,
        data: Prepared,
        rows: RowNumbers,
        *,
        policy: Policy,
        batch_size: int,
        world: World,
        seed: int,
        epoch: int,
        order: Order,
        last: Last,
    ) -> None:
        if not len(rows):
            raise LoaderError("The selection holds no samples. Choose other tasks, another split or other ids.")
        if last == "drop" and order != "endless" and len(rows) < batch_size:
            raise LoaderError(
                f"The selection has {len(rows)} samples, fewer than one batch of {batch_size}, so it gives no batch. "
                "Use a smaller batch size, or pad the last batch."
            )
        self._data, self._policy, self._world = data, policy, world
        self._seed, self._epoch, self._order = seed, epoch, order
        self._batch_size, self._local_size = batch_size, local_size(batch_size, world)
        self._rows = rows
        whole, rest = divmod(len(rows), batch_size)
        self._num_batches = sys.maxsize if order == "endless" else whole + (last == "pad" and rest > 0)
        self._pass = lru_cache(maxsize=4)(self._ordered)
        self._batch = lru_cache(maxsize=16)(self._make)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> LocalBatch:
        if not 0 <= number < self._num_batches:
            raise IndexError(number)
        return self._batch(number)

    def _ordered(self, visit: int) -> RowNumbers:
        if self._order == "sequential":
            return self._rows
        id_S = self._data.table["id"][self._rows]
        key_S = uniform(self._seed, self._epoch, id_S, np.full(len(id_S), visit), Reserved.ORDER_VIEW, 0)
        return self._rows[np.argsort(key_S, kind="stable")]

    def _make(self, number: int) -> LocalBatch:
        begin = number * self._batch_size + self._world.rank * self._local_size
        position_N = np.arange(begin, begin + self._local_size)
        total = len(self._rows)
        visit_N = position_N // total
        place_N = position_N - visit_N * total
        row_N = np.concatenate([self._pass(int(v))[place_N[visit_N == v]] for v in np.unique(visit_N)])
        valid_N = np.ones(len(row_N), np.bool_) if self._order == "endless" else position_N < total
        drawn = self.draw(row_N, visit_N)
        return LocalBatch(
            number=number,
            row_N=row_N,
            valid_N=valid_N,
            visit_N=visit_N,
            box_VN4=drawn.box_VN4,
            columns_VNC=drawn.columns_VNC,
        )

    def draw(self, row_N: RowNumbers, visit_N: RowNumbers) -> Drawn:
        """Returns the random choices for all views of these rows."""
        table = self._data.table
        return draw_views(
            self._policy,
            seed=self._seed,
            epoch=self._epoch,
            id_N=table["id"][row_N],
            visit_N=visit_N,
            width_N=table["width"][row_N],
            height_N=table["height"][row_N],
        )

    def replacement(self, row: int, attempt: int) -> int:
        """Returns the row of another sample to replace one that cannot be decoded. All ranks choose the same."""
        sample_id = np.array([self._data.table["id"][row]])
        u = uniform(self._seed, self._epoch, sample_id, np.array([attempt]), Reserved.REPLACEMENT_VIEW, 0)
        return int(self._rows[int(u[0] * len(self._rows))])
