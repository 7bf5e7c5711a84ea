"""Defines the contract of strategies against forgetting. Each strategy is one file.

A strategy adds terms, rows or inputs; it does not change the method. On the first task, every strategy trains only the
method's own loss.

To add a strategy, write a module that holds a `Strategy` subclass as STRATEGY. Put it here, or in a package with an
entry point in the group "fastcssl.strategies". The conformance suite finds it.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from fastcssl.data.loader import Stream
from fastcssl.data.prepared import Selection
from fastcssl.distributed.batchnorm import synchronised
from fastcssl.learn.memory import Bank, FrozenCopy
from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.nets import ViewPass, mlp, seeded
from fastcssl.plugins import Plugins

Frozen = Literal["eval", "batch"]  # how the frozen network's BatchNorm normalises


class Kept(Protocol):
    """State outside the module that a checkpoint must hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurrentTask:
    """The current task of a run, as a strategy sees it."""

    index: int  # among the tasks that this run trains, from 0
    tasks: tuple[int, ...]  # the manifest's tasks whose data this task holds (several in joint training)
    earlier: tuple[int, ...]  # the manifest's tasks that were trained before
    open: Callable[[Selection], Stream]  # opens the training loader for any selection


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """The base of all strategies' settings. A subclass checks its fields in its `__post_init__`."""

    @property
    def budget(self) -> int | None:
        """How many samples of earlier tasks it keeps, or None. A strategy that replays has a field of this name."""
        return None


class Strategy(nn.Module):
    """A strategy against forgetting: the terms it trains, and what it keeps from task to task."""

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]]
    union: ClassVar[bool] = False  # all tasks are trained as one
    replays: ClassVar[bool] = False  # it reads a second stream while a task is trained
    num_views: ClassVar[int | None] = None  # the number that its terms take; None: any that the method takes

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__()
        self.config, self.setting, self.world = config, setting, setting.world
        self.banks: tuple[Bank, ...] = ()
        self.copies: dict[str, Kept] = {}  # may grow with the tasks

    @classmethod
    def check(cls, config: StrategyConfig, method: type[Method]) -> None:
        """Raises UserError when this configuration makes no sense with the method."""

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        """Prepares for a task, before its first step. A loaded state may overwrite values, but shapes are set here."""

    @abstractmethod
    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        """Returns named scalars, whose sum is the loss that is trained."""

    def after_step(self, method: Method) -> None:
        """Runs after each step of the optimiser."""

    def end_task(self, task: CurrentTask, method: Method) -> None:
        """Runs after the last step of a task, and stores what later tasks need from it."""

    def lr_scale(self, method: Method) -> float:  # noqa: ARG002
        """Returns the learning rate of the strategy's own parameters, as a multiple of the method's."""
        return 1.0


class Distilling(Strategy):
    """The base of strategies with a frozen copy of the previous task's network and a predictor g.

    g maps the new embedding space to the frozen one. As in the references, it keeps its weights from task to task.
    """

    predictor_hidden: ClassVar[int] = 2048  # for every method

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.g: nn.Module | None = None
        self._predict_each: ViewPass | None = None
        self.frozen: FrozenCopy | None = None

    def freeze(self, method: Method, how: Frozen) -> None:
        """Stores a frozen copy of the current network."""
        self.frozen = FrozenCopy(method.online, batch_statistics=how == "batch")
        self.copies["frozen"] = self.frozen

    def add_predictor(self, method: Method, dim: int) -> None:
        """Builds g, unless an earlier task already did."""
        if self.g is None:
            with seeded(self.setting.seed, "g"):
                g = mlp((dim, self.predictor_hidden, dim), norm=True)
            like = next(method.parameters())
            self.g = synchronised(g, self.world).to(device=like.device, dtype=like.dtype)
            self._predict_each = ViewPass(self.g)

    def predictions(self, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns g applied to the embedding of each view."""
        assert self._predict_each is not None
        predictions: tuple[Tensor, ...] = self._predict_each(z)
        return predictions

    def frozen_embeddings(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the frozen network's embedding of each view."""
        assert self.frozen is not None
        _, f = self.frozen.each(inputs.views)
        embeddings: tuple[Tensor, ...] = f
        return embeddings


_PLUGINS: Plugins[Strategy] = Plugins("strategy", __name__, group="fastcssl.strategies")
names, find, strategy_of = _PLUGINS.names, _PLUGINS.find, _PLUGINS.of


def build(config: StrategyConfig, setting: Setting) -> Strategy:
    """Builds the strategy of a configuration and returns it."""
    return strategy_of(config)(config, setting)
