"""What classifiers make of frozen encoders: one file a probe.

A probe is `run(contenders, bench)`: it takes any number of encoders, each with any number of settings, decodes every
image once for all of them, and returns what each (encoder, setting) got right. None looks at another: an encoder that
is probed alone gets the same numbers, bit for bit on one CPU.

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
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.prepared import Order, Prepared, Selection
from fastcssl.data.views import Policy
from fastcssl.distributed.world import World
from fastcssl.evaluate.features import Features, features_of, finite
from fastcssl.evaluate.scopes import Plan

CHUNK = 256  # images that an encoder takes at once, whatever batches its classifiers take: so no grid changes a feature

ProbeSettings = TypeVar("ProbeSettings")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbedEncoder(Generic[ProbeSettings]):
    """An encoder, and the settings under which a classifier each is trained on it."""

    encoder: nn.Module
    settings: tuple[ProbeSettings, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeViews:
    """How images are seen: by a classifier that is trained on them, and by one that is judged."""

    train: Policy
    val: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Of one classifier, or of those of all groups together: a number for each column."""

    top1: tuple[int, ...]
    top5: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Bench:
    """What probes work with."""

    data: Prepared
    plan: Plan
    views: ProbeViews
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    world: World = field(default_factory=World)
    amp_dtype: torch.dtype | None = None
    loader: str = "auto"
    num_threads: int | None = None
    seed: int = 0
    spill: Path | None = None  # for features that do not fit in memory
    on_images: Callable[[int], None] = lambda _: None
    notes: list[str] = field(default_factory=list)

    def open_loader(self, split: SplitName, policy: Policy) -> Loader:
        size, chunk = self.world.size, min(CHUNK, self.num_images(split))  # padding would be computed for nothing
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
        tasks = tuple(range(len(self.data.manifest.tasks)))
        if split == "train":
            return Selection(tasks=tasks, ids=self.plan.train_ids, order=order)
        ids = np.unique(np.concatenate([column.val_ids for column in self.plan.columns]))
        return Selection(tasks=tasks, split="val", ids=ids, order=order)

    def features(
        self, encoders: Sequence[nn.Module], split: SplitName, *, mine: Callable[[int], bool] = lambda _: True
    ) -> list[Features | None]:
        """As validation sees images."""
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
                self.notes.append(f"{num_bad} features of {split} images were not finite, and are zeros now.")
            checked.append(whole)
        return checked

    def num_images(self, split: SplitName) -> int:
        return len(self.data.rows(self.selection(split, "sequential")))


def rows_of(found: Features, ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Features:
    """Returns the rows of these ids, without a copy when it is all of them."""
    mine_N = torch.from_numpy(np.isin(found.id_N.cpu().numpy(), ids)).to(found.h_NF.device)
    return found if bool(mine_N.all()) else found[mine_N]


def hits(plan: Plan, val: Features, guess: Callable[[int, Features], Tensor]) -> Hits:
    """Counts what is right. `guess`: from a group's number and validation rows to labels [M, 5], -1 for none."""
    top1, top5 = [0] * len(plan.columns), [0] * len(plan.columns)
    for number, group in enumerate(plan.groups):
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
    """Returns, by encoder and setting, what one rank has, on all of them. `shape`: settings of each encoder."""
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


def from_features(
    contenders: Sequence[ProbedEncoder[ProbeSettings]],
    bench: Bench,
    guess: Callable[[Features, Features, ProbeSettings], Tensor],
) -> list[list[Hits]]:
    """Makes one pass over the validation and one over the training images; the ranks share the encoders.

    `guess`: from training rows, validation rows and settings to labels [M, 5], -1 for none.
    """

    def mine(e: int) -> bool:
        return e % bench.world.size == bench.world.rank

    encoders = [contender.encoder for contender in contenders]
    val_E, train_E = (bench.features(encoders, split, mine=mine) for split in ("val", "train"))
    found: dict[tuple[int, int], Hits] = {}
    for e, (train, val) in enumerate(zip(train_E, val_E, strict=True)):
        if train is None or val is None:
            continue
        for s, settings in enumerate(contenders[e].settings):

            def of_group(
                group: int, rows: Features, train: Features = train, settings: ProbeSettings = settings
            ) -> Tensor:
                return guess(rows_of(train, bench.plan.groups[group].train_ids), rows, settings)

            found[e, s] = hits(bench.plan, val, of_group)
    return on_all_ranks(found, [len(item.settings) for item in contenders], len(bench.plan.columns), bench.world)
