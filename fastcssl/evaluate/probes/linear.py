"""The paper's linear probe: a linear layer on a frozen encoder, trained by SGD on random crops and flips.

It trains for 100 epochs without weight decay, and divides the learning rate by ten at 60 % and 80 % of them. Momentum
is 0.9 as in CaSSLe; PNR's released code has 0. The encoder is in eval mode.

All encoders and all settings train at the same time. An encoder's features of a chunk of images are computed once. Each
batch size cuts the same stream of rows into its own batches, so a classifier sees the same batches as if it trained
alone. The last, incomplete batch of an epoch is dropped, as in the references.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastcssl.errors import UserError
from fastcssl.evaluate.features import Features, embed, full_float32
from fastcssl.evaluate.probes import Bench, Hits, ProbedEncoder, hits
from fastcssl.evaluate.probes.cached import guesses
from fastcssl.learn.nets import modes, seeded

DROPS = (0.6, 0.8)  # shares of the epochs
LEARNING_RATES = {"moco": 3.0, "byol": 3.0, "simclr": 1.0, "supcon": 1.0, "vicreg": 0.3, "barlow": 0.1}
OTHER_LEARNING_RATE = 0.3  # for methods that the papers do not cover


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSettings:
    """The settings of a linear probe."""

    lr: float
    batch_size: int = 256  # over all ranks; it does not scale the learning rate
    momentum: float = 0.9
    epochs: int = 100
    seed: int = 0  # seed of the order, the crops and the initial weights

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and 0 <= self.momentum < 1 and self.batch_size >= 1 and self.epochs >= 1):
            raise UserError(
                f"A probe cannot have lr {self.lr:g}, momentum {self.momentum:g}, batch size {self.batch_size} and "
                f"{self.epochs} epochs. Give an lr above 0, a momentum of at least 0 and below 1, and at least 1 for "
                "the others."
            )

    def lr_at(self, epoch: int) -> float:
        """Returns the learning rate in an epoch."""
        return self.lr * 0.1 ** sum(epoch >= drop for drop in self.drops)

    @property
    def drops(self) -> tuple[int, ...]:
        """Returns the epochs at whose start the learning rate is divided by ten."""
        return tuple(round(share * self.epochs) for share in DROPS)


class Head:
    """A linear layer and its SGD with momentum, without autograd. The arithmetic is that of torch's SGD."""

    def __init__(self, num_features: int, num_classes: int, settings: LinearSettings, device: torch.device) -> None:
        with seeded(settings.seed, "linear probe"):
            layer = nn.Linear(num_features, num_classes)
        self.settings = settings
        self.weight_CF, self.bias_C = layer.weight.detach().to(device), layer.bias.detach().to(device)
        self._weight_velocity_CF, self._bias_velocity_C = (torch.zeros_like(x) for x in (self.weight_CF, self.bias_C))

    def step(self, h_BF: Tensor, class_B: Tensor, lr: float) -> None:
        """Makes one step. The gradient of the mean cross-entropy of softmax is (p - onehot) / B."""
        error_BC = torch.addmm(self.bias_C, h_BF, self.weight_CF.T).softmax(dim=1)
        error_BC.scatter_add_(1, class_B[:, None], error_BC.new_full((len(class_B), 1), -1.0))
        error_BC /= len(class_B)
        self._weight_velocity_CF.addmm_(error_BC.T, h_BF, beta=self.settings.momentum)
        self._bias_velocity_C.mul_(self.settings.momentum).add_(error_BC.sum(dim=0))
        self.weight_CF.sub_(self._weight_velocity_CF, alpha=lr)
        self.bias_C.sub_(self._bias_velocity_C, alpha=lr)

    @property
    def is_finite(self) -> bool:
        return bool(self.weight_CF.isfinite().all() and self.bias_C.isfinite().all())

    def state(self) -> list[Tensor]:
        return [self.weight_CF, self.bias_C, self._weight_velocity_CF, self._bias_velocity_C]

    def load(self, state: Sequence[Tensor]) -> None:
        for mine, saved in zip(self.state(), state, strict=True):
            mine.copy_(saved)


class Batches:
    """Cuts a stream of rows into batches of one size. A buffer gives every batch the same memory alignment."""

    def __init__(self, batch_size: int, num_features: int, device: torch.device) -> None:
        self._h_BF = torch.empty(batch_size, num_features, device=device)
        self._class_B = torch.empty(batch_size, dtype=torch.int64, device=device)
        self._filled = 0

    def add(self, h_NF: Tensor, class_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Adds rows and yields the batches that they complete. The next batch overwrites the one before."""
        begin, size = 0, len(self._class_B)
        while begin < len(class_N):
            count = min(size - self._filled, len(class_N) - begin)
            rows = slice(self._filled, self._filled + count)
            self._h_BF[rows], self._class_B[rows] = h_NF[begin : begin + count], class_N[begin : begin + count]
            begin, self._filled = begin + count, self._filled + count
            if self._filled == size:
                yield self._h_BF, self._class_B
                self._filled = 0

    def clear(self) -> None:
        self._filled = 0

    def state(self) -> list[Tensor]:
        return [self._h_BF[: self._filled], self._class_B[: self._filled]]

    def load(self, state: Sequence[Tensor]) -> None:
        self._filled = len(state[1])
        self._h_BF[: self._filled], self._class_B[: self._filled] = state[0], state[1]


@dataclass(slots=True, eq=False)
class _Lane:
    """The heads of one encoder and one group that use the same batch size."""

    batches: Batches
    heads: list[Head]


class Training:
    """The state of the training: all heads, and the current epoch and batch.

    lanes[encoder][group] holds one lane per batch size.
    """

    def __init__(self, contenders: Sequence[ProbedEncoder[LinearSettings]], bench: Bench) -> None:
        self.contenders = contenders
        self.epoch = self.batch = 0
        self.heads: list[list[list[Head]]] = []  # [encoder][setting][group]
        self.lanes: list[list[list[_Lane]]] = []
        for contender in contenders:
            num_features = int(contender.encoder.num_features)  # type: ignore[arg-type]
            by_setting = [
                [Head(num_features, len(group.labels), settings, bench.device) for group in bench.plan.groups]
                for settings in contender.settings
            ]
            self.heads.append(by_setting)
            lanes = []
            for number, group in enumerate(bench.plan.groups):
                by_size: dict[int, _Lane] = {}
                for settings, heads in (
                    zip(contender.settings, by_setting, strict=True) if contender.needs(number) else ()
                ):
                    # A group may have fewer images than one batch, which would be dropped as incomplete.
                    size = min(settings.batch_size, len(group.train_ids))
                    if size not in by_size:
                        by_size[size] = _Lane(Batches(size, num_features, bench.device), [])
                    by_size[size].heads.append(heads[number])
                lanes.append(list(by_size.values()))
            self.lanes.append(lanes)

    def step(self, e: int, group: int, h_NF: Tensor, class_N: Tensor) -> None:
        """Trains the heads of an encoder and a group on rows of features."""
        for lane in self.lanes[e][group]:
            for h_BF, class_B in lane.batches.add(h_NF, class_N):
                for head in lane.heads:
                    head.step(h_BF, class_B, head.settings.lr_at(self.epoch))

    def end_epoch(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        for lane in self._all_lanes():
            lane.batches.clear()

    def _all_lanes(self) -> Iterator[_Lane]:
        return (lane for lanes in self.lanes for by_group in lanes for lane in by_group)

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "heads": [head.state() for lane in self._all_lanes() for head in lane.heads],
            "batches": [lane.batches.state() for lane in self._all_lanes()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]
        heads = [head for lane in self._all_lanes() for head in lane.heads]
        for head, saved in zip(heads, state["heads"], strict=True):
            head.load(saved)
        for lane, saved in zip(self._all_lanes(), state["batches"], strict=True):
            lane.batches.load(saved)


def run(
    contenders: Sequence[ProbedEncoder[LinearSettings]],
    bench: Bench,
    *,
    state: dict[str, Any] | None = None,
    after_batch: Callable[[Training], None] = lambda _: None,
) -> list[list[Hits]]:
    """Trains all classifiers and returns their hits, [encoder][setting].

    `state`: the state of an interrupted run, to continue from. `after_batch` may save the state, and may raise an error
    to stop. It is called once more after the last epoch.
    """
    training = train(contenders, bench, state=state, after_batch=after_batch)
    encoders = [contender.encoder for contender in contenders]
    labels = [torch.from_numpy(group.labels).to(bench.device) for group in bench.plan.groups]
    found = []
    for by_setting, val, contender in zip(training.heads, bench.features(encoders, "val"), contenders, strict=True):
        assert val is not None
        found.append([_hits(heads, val, labels, bench, contender) for heads in by_setting])
    return found


def train(
    contenders: Sequence[ProbedEncoder[LinearSettings]],
    bench: Bench,
    *,
    state: dict[str, Any] | None = None,
    after_batch: Callable[[Training], None] = lambda _: None,
) -> Training:
    """Trains all classifiers and returns them. The arguments are those of `run`."""
    (num_epochs,) = {settings.epochs for contender in contenders for settings in contender.settings}
    training = Training(contenders, bench)
    if state is not None:
        training.load(state)
    encoders = [contender.encoder for contender in contenders]
    with (
        bench.open_loader("train", bench.views.train) as loader,
        torch.no_grad(),
        full_float32(),
        modes(encoders, training=False),
    ):
        stream = loader.open(bench.selection("train", "shuffled"))
        members = Members(bench)
        if training.batch:
            position = stream.state_dict() | {"epoch": training.epoch, "batch": training.batch}
            stream.load_state_dict(position)
        for epoch in range(training.epoch, num_epochs):
            for batch in stream.epoch(epoch):
                label_N, id_N = (bench.world.gather_keys(x) for x in (batch.label, batch.id))
                num_valid = min(len(id_N), stream.num_samples - training.batch * len(id_N))
                views = batch.views
                if bench.world.size == 1:  # padding comes last; several ranks need equal numbers of rows
                    label_N, id_N, views = label_N[:num_valid], id_N[:num_valid], tuple(x[:num_valid] for x in views)
                parts = members.of(label_N, id_N)
                for e, encoder in enumerate(encoders):
                    h_NF = embed(encoder, views, device=bench.device, amp_dtype=bench.amp_dtype)
                    h_NF = bench.world.gather_keys(h_NF)
                    for group, (rows, class_N) in enumerate(parts):
                        training.step(e, group, h_NF[rows], class_N)
                bench.on_images(num_valid)
                training.batch += 1
                after_batch(training)
            training.end_epoch()
    after_batch(training)
    return training


class Members:
    """Finds the rows of a batch that belong to each group, and their classes within the group.

    A row may belong to several groups, or to none.
    """

    def __init__(self, bench: Bench) -> None:
        self._groups: list[tuple[Tensor, Tensor]] = []
        for group in bench.plan.groups:
            class_of_label = torch.full((len(bench.data.manifest.classes),), -1, dtype=torch.int64)
            class_of_label[torch.from_numpy(group.labels)] = torch.arange(len(group.labels))
            self._groups.append((torch.from_numpy(group.train_ids).to(bench.device), class_of_label.to(bench.device)))

    def of(self, label_N: Tensor, id_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns for each group a mask of its rows, and the classes of those rows."""
        found = []
        for id_S, class_of_label in self._groups:
            place_N = torch.searchsorted(id_S, id_N).clamp_(max=len(id_S) - 1)
            mine_N = id_S[place_N] == id_N
            found.append((mine_N, class_of_label[label_N[mine_N]]))
        return found


def _hits(
    heads: Sequence[Head],
    val: Features,
    labels: Sequence[Tensor],
    bench: Bench,
    contender: ProbedEncoder[LinearSettings],
) -> Hits:
    """Counts the correct guesses. A classifier whose weights overflowed makes no guess."""

    def guess(group: int, rows: Features) -> Tensor:
        head = heads[group]
        if not head.is_finite:
            bench.notes.append(f"The classifier with learning rate {head.settings.lr:g} diverged; it counts as 0 %.")
            return torch.full((len(rows), 5), -1, device=rows.h_NF.device)
        return guesses(head.weight_CF, head.bias_C, labels[group], rows)

    return hits(bench.plan, val, guess, contender.needs)
