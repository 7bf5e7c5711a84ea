"""Everything that decides a run, as frozen data. A recipe fills it, the command line overrides it by dotted names.

Derived values (peak learning rate, steps, local batch) are computed where they are used and never stored here.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dataprep.suggest import nearest
from fastcssl.config.probe_plan import ProbePlan
from fastcssl.data.loader import Augment
from fastcssl.data.policies import NAMED, NamedPolicy, policy
from fastcssl.data.views import Family, Policy, with_min_scale, with_size
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.methods import MethodConfig
from fastcssl.learn.optim import OptimConfig
from fastcssl.learn.precision import Precision
from fastcssl.learn.strategies import StrategyConfig

ScenarioKind = Literal["class", "data", "domain", "joint", "any"]
Resume = Literal["auto", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectConfig:
    """The data that a recipe is made for. "any" and 0 accept every data set."""

    source: str = "any"  # as fastcssl-prep names it
    scenario: ScenarioKind = "any"
    num_tasks: int = 0  # 0: any number


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsConfig:
    """How images are seen."""

    policy: str = "pnr-moco-imagenet"  # AUTHORS-METHOD-FAMILY: cassle or pnr, cifar or imagenet; or METHOD-FAMILY
    size_px: int | None = None  # side of a view, other sizes in proportion to the first; None: the policy's
    min_scale: float | None = None  # least share of the image that a crop shows; None: the policy's

    def __post_init__(self) -> None:
        if self.min_scale is not None and not 0 < self.min_scale <= 1:
            raise ValueError(f"views.min_scale is {self.min_scale}; give a share above 0, at most 1.")
        if self.size_px is not None and self.size_px < 1:
            raise ValueError(f"views.size_px is {self.size_px}; give at least 1.")

    def views(self) -> Policy:
        """Returns the views that an image is trained with."""
        views = named_policy(self.policy).views
        views = views if self.size_px is None else with_size(views, self.size_px)
        return views if self.min_scale is None else with_min_scale(views, self.min_scale)

    def probe_view(self) -> Policy:
        """Returns the one view of images that are only embedded, as large as the first view of training."""
        return with_size(policy(f"probe-val-{named_policy(self.policy).family}"), self.views()[0].size_px)


def named_policy(name: str) -> NamedPolicy:
    """Returns the authors' policy of this name or, for METHOD-FAMILY, the one that the method declares itself."""
    if name in NAMED:
        return NAMED[name]
    own: dict[str, tuple[str, Family]] = {
        f"{method}-{family}": (method, family) for method in methods.names() for family in get_args(Family)
    }
    if name not in own:
        raise ValueError(f"There is no view policy {name!r}. {nearest(name, (*NAMED, *own))}")
    method, family = own[name]
    views = tuple(methods.find(method).views(family))
    if not views:
        raise UserError(f"The method {method} declares no view of {family} images. Let its views() return one or more.")
    return NamedPolicy(views=views, family=family)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How this process runs it. None of it changes what is computed, so that a run may go on with other values."""

    checkpoint_minutes: float = 10.0
    keep_checkpoints: int = 2  # of the last ones; those of task ends stay
    stop_after_task: int | None = None  # counted from 0
    log_every: int = 10  # steps between two lines of metrics
    tensorboard: bool = False  # also write RUN/tensorboard
    wandb: str | None = None  # also log to this project of Weights & Biases
    num_threads: int | None = None  # of the loader; None: one a core, shared by the ranks of a machine
    prefetch: int = 3  # batches under way
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: int = 0  # steps to trace with torch's profiler, into RUN/profile

    def __post_init__(self) -> None:
        for key, least in (
            ("keep_checkpoints", 1),
            ("log_every", 1),
            ("checkpoint_minutes", 0),
            ("stop_after_task", 0),
        ):
            value = getattr(self, key)
            if value is not None and not value >= least:
                raise ValueError(f"{key} is {value}; give at least {least}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that decides a run. A recipe fills it."""

    recipe: str
    epochs: int  # a task
    batch_size: int  # over all ranks and micro-batches
    method: MethodConfig
    strategy: StrategyConfig
    seed: int = 5
    accumulate: int = 1  # micro-batches a step
    expect: ExpectConfig = field(default_factory=ExpectConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scope: Literal["global", "local"] = "global"  # whether losses look at the samples of all ranks or of each
    precision: Precision = "auto"  # of the forward pass; auto: bf16 where the hardware has it
    compile: str = "off"  # or a back end of torch.compile: "inductor"
    loader: str = "auto"
    augment: Augment = "fused"  # who does the photometry
    only_task: int | None = None  # train this task of the manifest alone
    online_probe: str = "off"  # "every=E" epochs, "every=E,parity", or "off"
    probe_lr: float = 0.1  # of the parity probe's layer; no batch size scales it
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for key, least in (("epochs", 1), ("batch_size", 2), ("accumulate", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} is {getattr(self, key)}; give at least {least}.")
        if not 0 < self.probe_lr < math.inf:
            raise ValueError(f"probe_lr is {self.probe_lr}; it must be finite and above 0.")
        self._check_views()
        ProbePlan.parse(self.online_probe)

    def _check_views(self) -> None:
        """Raises UserError unless the policy has as many views as the method and the strategy take."""
        method, strategy = methods.method_of(self.method), strategies.strategy_of(self.strategy)
        name, count = self.views.policy, len(self.views.views())
        own = f"{method.name}-{named_policy(name).family}"
        of_method = f"Use --views.policy {own}." if name != own else "Let its num_views and its views() agree."
        of_strategy = f"Use a --views.policy of {strategy.num_views} views, or another strategy, such as finetune."
        for part, remedy in ((method, of_method), (strategy, of_strategy)):
            if part.num_views not in (None, count):
                raise UserError(
                    f"{part.name} takes exactly {part.num_views} views of an image, but the policy {name} has {count}. "
                    f"{remedy}"
                )

    @property
    def probe(self) -> ProbePlan:
        """Returns when and how the encoder is probed while it trains."""
        return ProbePlan.parse(self.online_probe)

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree on to be continued."""
        values: dict[str, Any] = plain(self)
        del values["run"]
        # A clean probe only looks; the references' changes the running statistics.
        values["online_probe"] = "parity" if self.probe.kind == "parity" else "none"
        if self.probe.kind != "parity":
            del values["probe_lr"]
        return values


def plain(config: Any) -> Any:
    """Returns nested dictionaries, lists, strings and numbers, for JSON and checkpoints."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [plain(item) for item in config]
    if isinstance(config, enum.Enum):
        return config.value
    return str(config) if isinstance(config, Path) else config
