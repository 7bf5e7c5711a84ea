"""Defines the contract of self-supervised methods. Each method is one file. It never sees tasks or strategies.

N samples on this rank, G over all ranks, D embedding width, F feature width, K bank rows, M rows of a loss.

A method turns views into `Embeddings` (`forward`) and embeddings into a scalar (`loss`). A strategy may use it to pull
a prediction towards a frozen embedding (`align`) or to push it away from one (`repel`), both in the method's own units.
A contrastive method also exposes the rows of its loss (`rows`): a strategy can stack its own rows below them, so that
one sweep computes both.

To add a method, write a module that holds a `Method` subclass as METHOD. Put it here, or in a package with an entry
point in the group "fastcssl.methods". The conformance suite finds it.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fastcssl import ops
from fastcssl.data.policies import pair
from fastcssl.data.views import Family, Policy
from fastcssl.distributed.batchnorm import synchronised
from fastcssl.distributed.world import World
from fastcssl.learn.memory import AtTaskStart, Bank, Initial, Memory
from fastcssl.learn.nets import Online, ViewPass, adjacent
from fastcssl.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """The inputs of a step: this rank's part of a batch."""

    views: tuple[Tensor, ...]  # each [N, 3, size, size]
    label: Tensor  # int64 [N]; only supervised methods use it
    id: Tensor  # int64 [N], the sample ids

    def adjacent(self) -> "Inputs":
        """Returns the same inputs, with the views of each size side by side in memory, for `ViewPass` to take them."""
        return replace(self, views=adjacent(self.views))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeddings:
    """The embeddings of a batch, one tensor per view. Only some methods have `target` and `prediction`."""

    h: tuple[Tensor, ...]  # [N, F] of the encoder
    z: tuple[Tensor, ...]  # [N, D] of the projector
    target: tuple[Tensor, ...] = ()  # [N, D] of the slow copy, without gradient
    prediction: tuple[Tensor, ...] = ()  # [N, D] of the method's own predictor
    label: Tensor | None = None


Push = tuple[Bank, Tensor]  # a bank, and the keys [G, D] to write into it after its sweep


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of a contrastive loss that share their negatives. `ops.info_nce` explains the fields."""

    query_MD: Tensor
    positive_MD: Tensor
    keys: tuple[Tensor, ...]  # each [K, D]
    filled: tuple[Tensor | None, ...]
    temperature: float | Tensor
    own_M: Tensor | None = None  # the key that row i must not see, in each of `keys`
    positive_in_denominator: bool = True

    def loss_M(self, pushes: Sequence[Push | None] = ()) -> Tensor:
        """Returns the loss of each row. `pushes` has one entry per entry of `keys`: its bank, and the keys to add."""
        arguments = (self.query_MD, self.positive_MD, self.keys, self.temperature)
        options: dict[str, Any] = {
            "filled": self.filled,
            "own_M": self.own_M,
            "positive_in_denominator": self.positive_in_denominator,
        }
        if not pushes:
            return ops.info_nce(*arguments, **options)
        new = [None if push is None else push[1] for push in pushes]
        pointers = [None if push is None else push[0].pointer for push in pushes]
        return ops.info_nce_enqueue(*arguments, new, pointers, **options)

    def stacked(self, query_MD: Tensor, positive_MD: Tensor, temperature: float) -> "Rows":
        """Returns these rows with the same number of other rows below them, against the same negatives."""
        both: float | Tensor = temperature
        if isinstance(self.temperature, Tensor) or self.temperature != temperature:
            dtype = torch.promote_types(query_MD.dtype, torch.float32)
            mine_M, other_M = (x.new_ones(len(x), dtype=dtype) for x in (self.query_MD, query_MD))
            both = torch.cat([mine_M * self.temperature, other_M * temperature])
        return Rows(
            query_MD=torch.cat([self.query_MD, query_MD]),
            positive_MD=torch.cat([self.positive_MD, positive_MD]),
            keys=self.keys,
            filled=self.filled,
            temperature=both,
            own_M=None if self.own_M is None else torch.cat([self.own_M, self.own_M]),
            positive_in_denominator=self.positive_in_denominator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BankConfig:
    """The keys that a method keeps of earlier batches."""

    size: int = 65536  # rows; the "queue size" of the papers
    at_task_start: AtTaskStart = "keep"  # prefill: fill it with embeddings of the new task's images
    initial: Initial = "empty"  # random: full of random directions, as in CaSSLe and PNR
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # type of the keys; 16-bit types halve the memory

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"method.bank.size is {self.size}; give at least one row, and at least the batch size.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """The settings of every method. A subclass checks its own fields in its `__post_init__`, after calling this one."""

    hidden: int = 2048  # width of the projector's hidden layer
    dim: int = 128  # width of the embedding

    def __post_init__(self) -> None:
        for key, width in (("hidden", self.hidden), ("dim", self.dim)):
            if width < 1:
                raise ValueError(f"method.{key} is {width}; give a width of at least 1.")

    @property
    def bank(self) -> BankConfig | None:
        """The settings of its banks, or None. A method that keeps keys has a field of this name instead."""
        return None


def check_temperatures(**values: float) -> None:
    """Raises ValueError unless all these settings of a method are finite and above 0."""
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"method.{key} is {value}; give a number above 0.")


def check_ema(**values: float) -> None:
    """Raises ValueError unless all these weights of a slow copy are between 0 and 1."""
    for key, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"method.{key} is {value}; give a share from 0 to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about a run that a method or a strategy may know."""

    world: World = field(default_factory=World)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    amp_dtype: torch.dtype | None = None  # the type in which a step computes, if not float32
    accumulate: int = 1  # micro-batches per step


class Method(nn.Module):
    """A self-supervised method: its networks, its loss and its banks."""

    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]]
    config: MethodConfig
    contrastive: ClassVar[bool] = False  # it implements `rows`
    in_batch: ClassVar[bool] = False  # its loss couples the samples of a batch, so smaller batches change it
    supervised: ClassVar[bool] = False  # it reads labels
    predictive: ClassVar[bool] = False  # it predicts embeddings; CaSSLe's release then raises the lr of g
    num_views: ClassVar[int | None] = None  # the number that its loss takes; None: any number

    def __init__(self, encoder: nn.Module, projector: nn.Module, setting: Setting, *, normalise: bool = False) -> None:
        super().__init__()
        self.setting, self.world = setting, setting.world
        self.online: Online = synchronised(Online(encoder, projector, normalise=normalise), self.world)
        self.each_view = ViewPass(self.online)
        self.banks: tuple[Bank, ...] = ()  # one per view, for methods that keep keys
        self.copies: dict[str, Memory] = {}  # all state outside the module that a checkpoint must hold

    @classmethod
    def views(cls, family: Family) -> Policy:
        """Returns the method's views of images of this family, for a method that is not in the authors' tables.

        There may be any number of views, each of its own size. The policy's name is METHOD-FAMILY, such as
        --views.policy mine-imagenet.
        """
        return pair(family)

    @abstractmethod
    def forward(self, inputs: Inputs) -> Embeddings:
        """Returns the embeddings of a batch, one per view."""

    @abstractmethod
    def loss(self, e: Embeddings) -> Tensor:
        """Returns the method's own loss, a scalar: the mean over this rank's samples."""

    def rows(self, e: Embeddings) -> list[Rows]:
        """Returns a contrastive method's groups of rows. The loss is the mean over groups of each group's mean.

        With banks, there is one group per view: its queries against the bank of the other view. Without banks, there is
        one group with the stacked views.
        """
        raise NotImplementedError(f"{self.name} is not contrastive")

    @abstractmethod
    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        """Returns the distance of predictions p from frozen embeddings f of the same views, in the method's units."""

    def repel(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...], form: str) -> Tensor:  # noqa: ARG002
        """Returns the distance of p from the pseudo-negatives f. PNR subtracts it, just as it adds `align`."""
        return self.align(p, f)

    def keys(self, e: Embeddings) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Returns the keys of a batch for each bank, gathered over ranks."""
        return ()

    def remember(self, e: Embeddings) -> None:
        """Adds the keys of a batch to the banks, after the sweep."""
        for bank, keys_GD in zip(self.banks, self.keys(e), strict=True):
            bank.push(keys_GD)

    def loss_then_remember(self, e: Embeddings) -> Tensor:
        """Returns the loss and remembers the keys. Methods that sweep the banks they write may do both in one pass."""
        loss = self.loss(e)
        self.remember(e)
        return loss

    def after_step(self, step: int, num_steps: int) -> None:
        """Updates slow copies after a step of the optimiser. `step` counts from 0 within the task."""

    def move(self) -> None:
        """Moves everything to the training device, in channels-last memory."""
        self.to(self.setting.device)
        self.to(memory_format=torch.channels_last)
        for item in self.copies.values():
            item.to(self.setting.device)


def ema_momentum(base: float, final: float, step: int, num_steps: int) -> float:
    """Returns the EMA's weight at a step: from `base` to `final` along a half cosine, which restarts with each task."""
    return final - (final - base) * (math.cos(math.pi * step / max(1, num_steps)) + 1) / 2


def contrast(groups: list[Rows], pushes: Sequence[Sequence[Push]] = ()) -> Tensor:
    """Returns the mean loss over groups. `pushes` has the pushes of each group's sweep."""
    losses = [rows.loss_M(then) for rows, then in zip(groups, pushes or [()] * len(groups), strict=True)]
    return torch.stack([loss_M.mean() for loss_M in losses]).mean()


_PLUGINS: Plugins[Method] = Plugins("method", __name__, group="fastcssl.methods")
names, find, method_of = _PLUGINS.names, _PLUGINS.find, _PLUGINS.of


def build(config: MethodConfig, encoder: nn.Module, setting: Setting) -> Method:
    """Builds the method of a configuration on its device and returns it."""
    method = method_of(config)(config, encoder, setting)  # type: ignore[arg-type]
    method.move()
    return method
