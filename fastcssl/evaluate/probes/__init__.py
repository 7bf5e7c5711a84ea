"""Classifiers on frozen encoders, with one module per probe.

A probe is `run(contenders, bench)`. It takes any number of encoders, each with any number of settings, decodes every
image once for all of them, and returns how many images each (encoder, setting) classified correctly. They do not affect
each other: an encoder that is probed alone gets the same numbers, bit for bit on one CPU.

N: training rows, M: validation rows, F: feature width, C: classes, B: rows of a batch, I: columns of the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dataprep.manifest import SplitName
from dataprep.progress import counted
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.prepared import Order, Prepared, Selection
from fastcssl.data.views import Policy
from fastcssl.distributed.world import World
from fastcssl.evaluate.features import Features, features_of, finite
from fastcssl.evaluate.scopes import Plan

# Images per forward pass of an encoder, independent of the classifiers' batch sizes, so that no grid changes a feature.
CHUNK = 256

ProbeSettings = TypeVar("ProbeSettings")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbedEncoder(Generic[ProbeSettings]):
    """An encoder, and the settings of the classifiers to train on it, one classifier per setting and group.

    `groups`: the numbers of the groups to train classifiers for; None means all. The others have no hits.
    """

    encoder: nn.Module
    settings: tuple[ProbeSettings, ...]
    groups: frozenset[int] | None = None

    def needs(self, group: int) -> bool:
        return self.groups is None or group in self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeViews:
    """The views on which classifiers are trained and those on which they are validated."""

    train: Policy
    val: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """The number of correct predictions in each column, of one classifier or of those of all groups together."""

    top1: tuple[int, ...]
    top5: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Bench:
    """The data, the views and the machine that probes work with."""

    data: Prepared
    plan: Plan
    views: ProbeViews
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    world: World = field(default_factory=World)
    amp_dtype: torch.dtype | None = None
    loader: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    spill: Path | None = None  # folder for large features, which are memory-mapped
    on_images: Callable[[int], None] = lambda _: None
    notes: list[str] = field(default_factory=list)

    def open_loader(self, split: SplitName, policy: Policy) -> Loader:
        """Returns a loader whose batches are chunks of the split's images."""
        size, chunk = self.world.size, min(CHUNK, self.num_images(split))  # a larger chunk would be mostly padding
        config = LoaderConfig(
            policy=policy,
            batch_size=-(-chunk // size) * size,
            seed=self.seed,
            loader=self.loader,
            last="pad",
            num_threads=self.num_threads,
            device=str(self.device),
            dtype=self.amp_dtype or torch.float32,
        )
        return Loader(self.data, config, self.world)

    def selection(self, split: SplitName, order: Order) -> Selection:
        """Returns the samples of a split that the plan uses."""
        tasks = tuple(range(len(self.data.manifest.tasks)))
        if split == "train":
            return Selection(tasks=tasks, ids=self.plan.train_ids, order=order)
        ids = np.unique(np.concatenate([column.val_ids for column in self.plan.columns]))
        return Selection(tasks=tasks, split="val", ids=ids, order=order)

    def features(
        self, encoders: Sequence[nn.Module], split: SplitName, *, mine: Callable[[int], bool] = lambda _: True
    ) -> list[Features | None]:
        """Returns the features of a split under the validation view. Those of encoders that are not `mine` are None."""
        with self.open_loader(split, self.views.val) as loader:
            found = features_of(
                encoders,
                loader.open(self.selection(split, "sequential")),
                device=self.device,
                amp_dtype=self.amp_dtype,
                world=self.world,
                mine=mine,
                spill=self.spill,
                on_batch=self.on_images,
            )
        checked: list[Features | None] = []
        for item in found:
            whole, num_bad = finite(item) if item is not None else (None, 0)
            if num_bad:
                images = counted(num_bad, f"{split} image")
                self.notes.append(f"The features of {images} were not finite and count as zeros.")
            checked.append(whole)
        return checked

    def num_images(self, split: SplitName) -> int:
        return len(self.data.rows(self.selection(split, "sequential")))


def rows_of(found: Features, ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Features:
    """Returns the rows of these ids, without a copy if these are all rows."""
    mine_N = torch.from_numpy(np.isin(found.id_N.cpu().numpy(), ids)).to(found.h_NF.device)
    return found if bool(mine_N.all()) else found[mine_N]


def hits(
    plan: Plan, val: Features, guess: Callable[[int, Features], Tensor], needs: Callable[[int], bool] = lambda _: True
) -> Hits:
    """Counts the correct guesses. `guess` maps a group's number and validation rows to labels [M, 5], -1 for none.

    Groups that are not needed are left out.
    """
    top1, top5 = [0] * len(plan.columns), [0] * len(plan.columns)
    for number, group in enumerate(plan.groups):
        if not needs(number):
            continue
        rows = rows_of(val, np.concatenate([plan.columns[i].val_ids for i in group.columns]))
        right_M5 = guess(number, rows) == rows.label_N[:, None]
        id_M = rows.id_N.cpu().numpy()
        for i in group.columns:
            mine_M5 = right_M5[torch.from_numpy(np.isin(id_M, plan.columns[i].val_ids)).to(right_M5.device)]
            top1[i], top5[i] = int(mine_M5[:, 0].sum()), int(mine_M5.any(dim=1).sum())
    return Hits(top1=tuple(top1), top5=tuple(top5))


def on_all_ranks(
    found: dict[tuple[int, int], Hits], shape: Sequence[int], num_columns: int, world: World
) -> list[list[Hits]]:
    """Returns the hits by encoder and setting on every rank, where before each was known to one rank.

    `shape`: the number of settings of each encoder.
    """
    table = torch.zeros(sum(shape), 2, num_columns, dtype=torch.float64)
    places = [(e, s) for e, count in enumerate(shape) for s in range(count)]
    for row, place in enumerate(places):
        if place in found:
            table[row] = torch.tensor([found[place].top1, found[place].top5], dtype=torch.float64)
    whole = replace(world, scope="global").total(table).long().tolist()
    results: list[list[Hits]] = [[] for _ in shape]
    for (e, _), (top1, top5) in zip(places, whole, strict=True):
        results[e].append(Hits(top1=tuple(top1), top5=tuple(top5)))
    return results
