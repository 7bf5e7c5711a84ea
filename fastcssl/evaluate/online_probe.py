"""Probes the encoder during training.

The clean probe does not affect training: it computes features in eval mode, then trains k-NN and a linear classifier on
the cached features. No weight, BatchNorm statistic or random number of the training changes. The parity probe is that
of the references, and is for comparison only. It streams labelled images of all tasks, including those not yet learnt,
through the encoder in train mode, so they leak into BatchNorm's running statistics.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcssl.config.probe_plan import ProbeKind
from fastcssl.data.loader import Batch, Loader, LoaderConfig
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import Policy
from fastcssl.distributed.world import World
from fastcssl.evaluate.features import Features, embed, features, finite, top1
from fastcssl.evaluate.probes.cached import fit_linear
from fastcssl.evaluate.probes.knn import KnnMetric, knn
from fastcssl.evaluate.scopes import drawn_by_class
from fastcssl.learn.nets import mode, seeded
from fastcssl.learn.optim import OptimConfig, build_optimizer, lr_at, set_lr

MAX_TRAIN = 130_000  # all of ImageNet-100, 130 images per class of ImageNet-1k


# ---- Results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAccuracy:
    """Accuracies on the validation images of one task, among the classes of all tasks."""

    task: int
    num_val: int
    linear_top1: float
    knn_top1: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Accuracies as shares in 0..1, over the images of all tasks together, so that each image counts the same."""

    kind: ProbeKind
    linear_top1: float
    knn_top1: float | None  # None: the parity probe has no k-NN
    knn_top5: float | None
    per_task: tuple[TaskAccuracy, ...]
    num_train: int  # images that the classifiers were trained on
    num_train_all: int  # images available; more than num_train if a subset was taken
    num_val: int
    num_not_finite: int  # images whose features overflowed and were replaced by zeros
    seconds: float


def _per_task(
    data: Prepared, tasks: tuple[int, ...], val: Features, linear_M: Tensor, knn_M: Tensor | None
) -> tuple[TaskAccuracy, ...]:
    """Returns the accuracies on each task.

    Sample ids give the task, because labels do not in data- and domain-incremental scenarios.
    """
    id_M = val.id_N.numpy()
    found = []
    for task in tasks:
        mine_M = torch.from_numpy(np.isin(id_M, list(data.manifest.tasks[task].val.iter_ids())))
        part = val[mine_M]
        found.append(
            TaskAccuracy(
                task=task,
                num_val=len(part),
                linear_top1=top1(linear_M[mine_M], part),
                knn_top1=None if knn_M is None else top1(knn_M[mine_M], part),
            )
        )
    return tuple(found)


def _of_rank_0(found: Tensor, device: torch.device, world: World) -> Tensor:
    """Returns the values of rank 0 on every rank, because ranks on different GPUs may round differently."""
    return world.collect(found.to(device))[0].cpu()


# ---- The clean probe -------------------------------------------------------------------------------------------------


def stratified_ids(data: Prepared, tasks: tuple[int, ...], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns the sorted ids of `count` training samples of the tasks, the same share of each class.

    Every class has at least one sample if `count` allows. A sample's draw depends only on (seed, id), so a larger
    subset contains a smaller one.
    """
    rows = data.table[data.rows(Selection(tasks=tasks))]
    draw_S, order_S, place_S, _, count_C = drawn_by_class(rows, seed)
    share_S = place_S / np.repeat(count_C, count_C)
    chosen = order_S[np.lexsort((draw_S[order_S], share_S))[:count]]
    ids: npt.NDArray[np.int64] = np.sort(rows["id"][chosen])
    return ids


def probe(
    encoder: nn.Module,
    data: Prepared,
    config: LoaderConfig,
    *,
    view: Policy,
    tasks: tuple[int, ...] | None = None,
    k: int = 20,
    metric: KnnMetric = "cosine",
    max_train: int | None = MAX_TRAIN,
    amp_dtype: torch.dtype | None = None,
    world: World | None = None,
) -> ProbeResult:
    """Returns the accuracy of k-NN and of a linear classifier on features of one `view`.

    Both choose among the classes of `tasks`, or of all tasks if None. `config` is that of the run, which gives the
    device, back end, threads, batch size and seed. Every rank must call this, and every rank gets the same result.
    """
    began = time.perf_counter()
    world, device = world or World(), torch.device(config.device)
    tasks = tuple(range(len(data.manifest.tasks))) if tasks is None else tasks
    num_train_all = len(data.rows(Selection(tasks=tasks)))
    ids = None
    if max_train is not None and max_train < num_train_all:
        ids = stratified_ids(data, tasks, max_train, config.seed)
    with Loader(data, replace(config, policy=view, last="pad"), world) as loader:

        def embedded(selection: Selection) -> tuple[Features, int]:
            stream = loader.open(selection)
            return finite(features(encoder, stream, device=device, amp_dtype=amp_dtype, world=world))

        train, num_bad_train = embedded(Selection(tasks=tasks, ids=ids, order="sequential"))
        val, num_bad_val = embedded(Selection(tasks=tasks, split="val", order="sequential"))
    near = knn(train, val, num_classes=len(data.manifest.classes), k=k, metric=metric, device=device)
    head = fit_linear(train, device=device)
    knn_M, linear_M = (_of_rank_0(found, device, world) for found in (near.predictions, head.predict(val)))
    knn_top5 = _of_rank_0(torch.tensor([near.top5], dtype=torch.float64), device, world)
    return ProbeResult(
        kind="clean",
        linear_top1=top1(linear_M, val),
        knn_top1=top1(knn_M, val),
        knn_top5=float(knn_top5),
        per_task=_per_task(data, tasks, val, linear_M, knn_M),
        num_train=len(train),
        num_train_all=num_train_all,
        num_val=len(val),
        num_not_finite=num_bad_train + num_bad_val,
        seconds=time.perf_counter() - began,
    )


# ---- The references' probe -------------------------------------------------------------------------------------------


class ParityProbe:
    """The references' probe: a linear layer that trains together with the encoder on labelled images of all tasks.

    Each step takes one batch of the probe's own stream, augmented like the last view of the training policy, through
    the encoder in train mode without gradient. This leaks the images into the BatchNorm statistics, as it does there.

    The references add the probe's cross-entropy to the training loss. Here the layer has an optimiser of its own, which
    makes the same steps: the features are detached, SGD updates each element independently, and LARS each tensor. The
    one difference is that a loss scaler that skips a step also skips the layer's step there, but not here.

    The stream restarts in every epoch, as in the references. The layer's weights are kept between tasks, its momentum
    is not.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        data: Prepared,
        config: LoaderConfig,
        *,
        view: Policy,
        optim: OptimConfig,
        lr: float = 0.1,
        amp_dtype: torch.dtype | None = None,
        world: World | None = None,
    ) -> None:
        """Takes the run's `config` and `optim`. `view`: for validation. `lr`: the peak, whatever the batch size."""
        self._data, self._config, self._view = data, config, view
        self._optim = replace(optim, lr=lr, weight_decay=0.0)
        self._amp_dtype, self._world = amp_dtype, world or World()
        self._device = torch.device(config.device)
        with seeded(config.seed, "parity probe"):
            self.head = nn.Linear(num_features, num_classes).to(self._device)
        # Another seed: with the run's own, both streams of an epoch would show a sample with the same crop.
        self._loader = Loader(data, replace(config, policy=config.policy[-1:], seed=config.seed + 1), self._world)
        self._tasks = tuple(range(len(data.manifest.tasks)))
        self._stream = self._loader.open(Selection(tasks=self._tasks, order="endless"))
        self.begin_task()

    def begin_task(self) -> None:
        """Starts a task with a new optimiser."""
        self._optimizer = build_optimizer([{"params": self.head.parameters(), "name": "parity probe"}], self._optim)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yields endless batches, with `epoch` counted over the whole run. Continues where a loaded state was taken."""
        return self._stream.epoch(epoch)

    def step(self, encoder: nn.Module, batch: Batch, *, epoch: float, num_epochs: int) -> Tensor:
        """Updates the layer once and returns the detached loss. `epoch`: counted within the task, for the schedule."""
        set_lr(self._optimizer, lr_at(self._optim, self._optim.lr, epoch, num_epochs))
        with torch.no_grad(), mode(encoder, training=True):
            h_NF = embed(encoder, batch.views, device=self._device, amp_dtype=self._amp_dtype)
        # Each rank uses the rows of all ranks and makes the same step, so no gradient needs averaging.
        h_GF, label_G = self._world.gather_keys(h_NF), self._world.gather_keys(batch.label)
        self._optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = F.cross_entropy(self.head(h_GF), label_G)
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def validate(self, encoder: nn.Module) -> ProbeResult:
        """Returns the accuracy on the validation images of all tasks.

        The encoder is in eval mode, so it uses the BatchNorm statistics that the probe has changed.
        """
        began = time.perf_counter()
        with Loader(self._data, replace(self._config, policy=self._view, last="pad"), self._world) as loader:
            stream = loader.open(Selection(tasks=self._tasks, split="val", order="sequential"))
            found = features(encoder, stream, device=self._device, amp_dtype=self._amp_dtype, world=self._world)
        val, num_bad = finite(found)
        with torch.no_grad():
            predicted_M = torch.cat([self.head(h.to(self._device)).argmax(dim=1) for h in torch.split(val.h_NF, 1024)])
        linear_M = _of_rank_0(predicted_M, self._device, self._world)
        return ProbeResult(
            kind="parity",
            linear_top1=top1(linear_M, val),
            knn_top1=None,
            knn_top5=None,
            per_task=_per_task(self._data, self._tasks, val, linear_M, None),
            num_train=self._stream.num_samples,
            num_train_all=self._stream.num_samples,
            num_val=len(val),
            num_not_finite=num_bad,
            seconds=time.perf_counter() - began,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain containers of tensors, numbers and strings."""
        return {
            "head": dict(self.head.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "stream": self._stream.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._stream.load_state_dict(state["stream"])

    def close(self) -> None:
        self._loader.close()
