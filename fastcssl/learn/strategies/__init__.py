"""What is done against forgetting, one file each. A strategy adds terms, rows or inputs; it does not edit the method.

On the first task every strategy trains the method's own loss alone.

To add one: a module here, or in a package with an entry point in the group "fastcssl.strategies", that holds a
`Strategy` subclass as STRATEGY. The conformance suite finds it.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from fastcssl.data.loader import Stream
from fastcssl.data.prepared import Selection
from fastcssl.distributed.world import synchronised
from fastcssl.learn.memory import Bank, FrozenCopy
from fastcssl.learn.methods import Inputs, Method, Setting
from fastcssl.learn.nets import mlp, seeded
from fastcssl.plugins import Plugins

Frozen = Literal["eval", "batch"]  # how the frozen network's BatchNorm normalises


class Kept(Protocol):
    """Anything outside the module that a checkpoint must hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CurrentTask:
    """Where the run stands, for a strategy."""

    index: int  # among the tasks this run trains, from 0
    tasks: tuple[int, ...]  # of the manifest, whose data this task holds (several for joint training)
    earlier: tuple[int, ...]  # of the manifest, trained before
    open: Callable[[Selection], Stream]  # the training loader, for any selection


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConfig:
    """What every strategy has: nothing. One with fields checks them in its own `__post_init__`."""

    @property
    def budget(self) -> int | None:
        """Returns how many samples of earlier tasks it keeps, or None: one that replays has a field of this name."""
        return None


class Strategy(nn.Module):
    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]]
    union: ClassVar[bool] = False  # all tasks are trained as one
    replays: ClassVar[bool] = False  # it reads a second stream while a task is trained
    num_views: ClassVar[int | None] = None  # that its terms take; None: as many as the method

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__()
        self.config, self.setting, self.world = config, setting, setting.world
        self.banks: tuple[Bank, ...] = ()
        self.copies: dict[str, Kept] = {}  # may grow with the tasks

    @classmethod
    def check(cls, config: StrategyConfig, method: type[Method]) -> None:
        """Raises UserError when this configuration makes no sense with the method."""

    def begin_task(self, task: CurrentTask, method: Method) -> None:
        """Prepares for the first step of a task, or for a state that is loaded then: it decides shapes, not values."""

    @abstractmethod
    def terms(self, method: Method, inputs: Inputs) -> dict[str, Tensor]:
        """Returns named scalars whose sum is trained."""

    def after_step(self, method: Method) -> None:
        """Does what is due after each step of the optimiser."""

    def end_task(self, task: CurrentTask, method: Method) -> None:
        """Stores what is needed of a task, after its last step."""

    def lr_scale(self, method: Method) -> float:  # noqa: ARG002
        """Returns the learning rate of the strategy's own parameters, as a multiple of the method's."""
        return 1.0


class Distilling(Strategy):
    """Those that hold a frozen copy of the previous task's network, and a predictor g from the new space to its.

    g keeps its weights from task to task, as in the references.
    """

    predictor_hidden: ClassVar[int] = 2048  # for every method

    def __init__(self, config: StrategyConfig, setting: Setting) -> None:
        super().__init__(config, setting)
        self.g: nn.Module | None = None
        self.frozen: FrozenCopy | None = None

    def freeze(self, method: Method, how: Frozen) -> None:
        """Keeps a frozen copy of the network as it is now."""
        self.frozen = FrozenCopy(method.online, batch_statistics=how == "batch")
        self.copies["frozen"] = self.frozen

    def add_predictor(self, method: Method, dim: int) -> None:
        """Builds g, unless an earlier task did."""
        if self.g is None:
            with seeded(self.setting.seed, "g"):
                g = mlp((dim, self.predictor_hidden, dim), norm=True)
            like = next(method.parameters())
            self.g = synchronised(g, self.world, self.setting.device).to(device=like.device, dtype=like.dtype)

    def predictions(self, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns g of the embedding of each view."""
        assert self.g is not None
        return tuple(self.g(z_ND) for z_ND in z)

    def frozen_embeddings(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Returns the frozen network's embedding of each view."""
        assert self.frozen is not None
        return tuple(self.frozen(view)[1] for view in inputs.views)


_PLUGINS: Plugins[Strategy] = Plugins("strategy", __name__, group="fastcssl.strategies")
names, find, strategy_of = _PLUGINS.names, _PLUGINS.find, _PLUGINS.of


def build(config: StrategyConfig, setting: Setting) -> Strategy:
    """Builds the strategy of a configuration and returns it."""
    return strategy_of(config)(config, setting)
