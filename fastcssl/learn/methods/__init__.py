"""Self-supervised methods, one file each. A method never sees tasks, strategies or optimisers.

N samples on this rank, G over all ranks, D embedding width, F feature width, K bank rows, M rows of a loss.

A method turns views into `Embeddings` (`forward`) and those into a scalar (`loss`). A strategy may ask it how to
pull a prediction to a frozen embedding (`align`) or push it from one (`repel`), both in the method's own units. A
contrastive method also shows the rows of its loss (`rows`): a strategy stacks its own under them and sweeps once.

To add one: a module here, or in a package with an entry point in the group "fastcssl.methods", that holds a `Method`
subclass as METHOD. The conformance suite finds it.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fastcssl import ops
from fastcssl.data.policies import pair
from fastcssl.data.views import Family, Policy
from fastcssl.distributed.world import World, synchronised
from fastcssl.learn.memory import AtTaskStart, Bank, Initial, Memory
from fastcssl.learn.nets import Online
from fastcssl.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a step is given: this rank's part of a batch."""

    views: tuple[Tensor, ...]  # each [N, 3, size, size]
    label: Tensor  # int64 [N]; only supervised methods look at it
    id: Tensor  # int64 [N], of the samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeddings:
    """One of each for a view. `target` and `prediction` belong to the methods that have them."""

    h: tuple[Tensor, ...]  # [N, F] of the encoder
    z: tuple[Tensor, ...]  # [N, D] of the projector
    target: tuple[Tensor, ...] = ()  # [N, D] of the slow copy, without gradient
    prediction: tuple[Tensor, ...] = ()  # [N, D] of the method's own predictor
    label: Tensor | None = None


Push = tuple[Bank, Tensor]  # a bank, and the keys [G, D] that go there once it was swept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of a contrastive loss that share their negatives. See `ops.info_nce` for what they mean."""

    query_MD: Tensor
    positive_MD: Tensor
    keys: tuple[Tensor, ...]  # each [K, D]
    filled: tuple[Tensor | None, ...]
    temperature: float | Tensor
    own_M: Tensor | None = None  # the key that row i must not see, in each of `keys`
    positive_in_denominator: bool = True

    def loss_M(self, pushes: Sequence[Push | None] = ()) -> Tensor:
        """Returns the loss of each row. `pushes`, one for each of `keys`: its bank, and what that gets afterwards."""
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
        """Returns these rows, and as many others under them against the same negatives."""
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
    at_task_start: AtTaskStart = "keep"  # prefill: with embeddings of the new task's images
    initial: Initial = "empty"  # random: full of random directions, as in the references
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of the keys; the shorter take half the memory

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"method.bank.size is {self.size}; give at least one row, and at least the batch size.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig:
    """What every method has. One with fields of its own checks them in its own `__post_init__`, after this one."""

    hidden: int = 2048  # width of the projector's hidden layer
    dim: int = 128  # width of the embedding

    def __post_init__(self) -> None:
        for key, width in (("hidden", self.hidden), ("dim", self.dim)):
            if width < 1:
                raise ValueError(f"method.{key} is {width}; give a width of at least 1.")

    @property
    def bank(self) -> BankConfig | None:
        """Returns the settings of its banks, or None: a method that keeps keys has a field of this name."""
        return None


def check_temperatures(**values: float) -> None:
    """Raises ValueError unless all of these settings of a method are finite and above 0."""
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"method.{key} is {value}; give a number above 0.")


def check_ema(**values: float) -> None:
    """Raises ValueError unless all of these weights of a slow copy are from 0 to 1."""
    for key, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"method.{key} is {value}; give a share from 0 to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a method or a strategy is built: everything about the run that it may know."""

    world: World = field(default_factory=World)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    amp_dtype: torch.dtype | None = None  # what a step computes in, if not in float32
    accumulate: int = 1  # micro-batches of a step


class Method(nn.Module):
    name: ClassVar[str]
    Config: ClassVar[type[MethodConfig]]
    config: MethodConfig
    contrastive: ClassVar[bool] = False  # it has rows
    in_batch: ClassVar[bool] = False  # its loss couples the samples of a batch, so smaller batches change it
    supervised: ClassVar[bool] = False  # it reads labels
    predictive: ClassVar[bool] = False  # it predicts embeddings; CaSSLe's release then speeds its predictor up
    num_views: ClassVar[int | None] = None  # that its loss takes; None: any number

    def __init__(self, encoder: nn.Module, projector: nn.Module, setting: Setting, *, normalise: bool = False) -> None:
        super().__init__()
        self.setting, self.world = setting, setting.world
        self.online: Online = synchronised(Online(encoder, projector, normalise=normalise), self.world, setting.device)
        self.banks: tuple[Bank, ...] = ()  # one a view, for methods that keep keys
        self.copies: dict[str, Memory] = {}  # everything outside the module that a checkpoint must hold

    @classmethod
    def views(cls, family: Family) -> Policy:
        """Returns how it sees images of this family, where the authors' tables do not know it: any number of views.

        Each view has a size of its own. The policy's name is METHOD-FAMILY, such as --views.policy mine-imagenet.
        """
        return pair(family)

    @abstractmethod
    def forward(self, inputs: Inputs) -> Embeddings:
        """Returns the embeddings of a batch, one for each view."""

    @abstractmethod
    def loss(self, e: Embeddings) -> Tensor:
        """Returns the method's own loss, a scalar: the mean over this rank's samples."""

    def rows(self, e: Embeddings) -> list[Rows]:
        """Returns a contrastive method's groups of rows: its loss is the mean over groups of the mean over their rows.

        With banks: one group a view, its queries against the bank of the other view. Without: one group, views stacked.
        """
        raise NotImplementedError(f"{self.name} is not contrastive")

    @abstractmethod
    def align(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...]) -> Tensor:
        """Returns how far predictions p are from frozen embeddings f of the same views, in this method's units."""

    def repel(self, p: tuple[Tensor, ...], f: tuple[Tensor, ...], form: str) -> Tensor:  # noqa: ARG002
        """Returns how far p is from the pseudo-negatives f, which PNR subtracts as often as it adds `align`."""
        return self.align(p, f)

    def keys(self, e: Embeddings) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Returns what each of the banks is given of a batch, gathered over ranks."""
        return ()

    def remember(self, e: Embeddings) -> None:
        """Gives the keys of a batch to the banks, after its sweep."""
        for bank, keys_GD in zip(self.banks, self.keys(e), strict=True):
            bank.push(keys_GD)

    def loss_then_remember(self, e: Embeddings) -> Tensor:
        """Returns the loss and remembers the keys, in one for methods that sweep the banks they write."""
        loss = self.loss(e)
        self.remember(e)
        return loss

    def after_step(self, step: int, num_steps: int) -> None:
        """Updates slow copies after a step of the optimiser, counted from 0 within the task."""

    def move(self) -> None:
        """Moves everything to the training device, in channels-last memory."""
        self.to(self.setting.device)
        self.to(memory_format=torch.channels_last)
        for item in self.copies.values():
            item.to(self.setting.device)


def ema_momentum(base: float, final: float, step: int, num_steps: int) -> float:
    """Returns the weight at a step: from `base` to `final` along a half cosine, anew with each task."""
    return final - (final - base) * (math.cos(math.pi * step / max(1, num_steps)) + 1) / 2


def contrast(groups: list[Rows], pushes: Sequence[Sequence[Push]] = ()) -> Tensor:
    """Returns the mean over groups; `pushes`: those of each group's sweep."""
    losses = [rows.loss_M(then) for rows, then in zip(groups, pushes or [()] * len(groups), strict=True)]
    return torch.stack([loss_M.mean() for loss_M in losses]).mean()


_PLUGINS: Plugins[Method] = Plugins("method", __name__, group="fastcssl.methods")
names, find, method_of = _PLUGINS.names, _PLUGINS.find, _PLUGINS.of


def build(config: MethodConfig, encoder: nn.Module, setting: Setting) -> Method:
    """Builds the method of a configuration on its device and returns it."""
    method = method_of(config)(config, encoder, setting)  # type: ignore[arg-type]
    method.move()
    return method
