"""Everything that decides a run, as frozen data. A recipe fills it, and the command line overrides it by dotted names.

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

    source: str = "any"  # data set that the run must be given, by its name in fastcssl-prep; or any
    scenario: ScenarioKind = "any"  # how the data must be split into tasks
    num_tasks: int = 0  # number of tasks that the data must have; 0 accepts any number


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewsConfig:
    """How images are cropped and augmented into views."""

    policy: str = "pnr-moco-imagenet"  # (cassle|pnr)-METHOD-(cifar|imagenet); METHOD-(cifar|imagenet): the method's own
    size_px: int | None = None  # side of the first view; the other views scale with it; None: the policy's own sizes
    min_scale: float | None = None  # smallest share of the image that a crop may show; None: the policy's own

    def __post_init__(self) -> None:
        if self.min_scale is not None and not 0 < self.min_scale <= 1:
            raise ValueError(f"views.min_scale is {self.min_scale}; give a share above 0, at most 1.")
        if self.size_px is not None and self.size_px < 1:
            raise ValueError(f"views.size_px is {self.size_px}; give at least 1.")

    def views(self) -> Policy:
        """Returns the views of each image that a run trains on."""
        views = named_policy(self.policy).views
        views = views if self.size_px is None else with_size(views, self.size_px)
        return views if self.min_scale is None else with_min_scale(views, self.min_scale)

    def probe_view(self) -> Policy:
        """Returns the single view used to probe the encoder, as large as the first training view."""
        return with_size(policy(f"probe-val-{named_policy(self.policy).family}"), self.views()[0].size_px)


def named_policy(name: str) -> NamedPolicy:
    """Returns the authors' policy of this name or, for METHOD-FAMILY, the policy that the method itself declares."""
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
        raise UserError(
            f"The method {method} declares no views for {family} images. Its views() must return at least one."
        )
    return NamedPolicy(views=views, family=family)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How this process runs. Nothing here changes the results, so a run may be resumed with other values."""

    checkpoint_minutes: float = 10.0  # minutes between two checkpoints
    keep_checkpoints: int = 2  # number of recent checkpoints to keep; the one at each task's end is always kept
    stop_after_task: int | None = None  # stop after this task, counted from 0
    log_every: int = 10  # steps between two lines of metrics
    tensorboard: bool = False  # also write TensorBoard events to RUN/tensorboard
    wandb: str | None = None  # Weights & Biases project to log to as well; None: do not
    num_threads: int | None = None  # loader threads; None: one per core, divided among the ranks of a machine
    prefetch: int = 3  # batches that the loader prepares ahead
    device: Literal["auto", "cpu", "cuda"] = "auto"
    profile: int = 0  # number of steps to trace with torch's profiler, into RUN/profile

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
    epochs: int | tuple[int, ...]  # epochs per task, or a list with one number for each task, such as 100,50,50
    batch_size: int  # images per step, over all ranks and micro-batches
    method: MethodConfig
    strategy: StrategyConfig
    seed: int = 5  # seed of the weights, the order of images and the views
    accumulate: int = 1  # micro-batches per step
    expect: ExpectConfig = field(default_factory=ExpectConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    scope: Literal["global", "local"] = "global"  # losses see the samples of all ranks together, or of each separately
    precision: Precision = "auto"  # type of the forward pass; auto: bf16 if supported, else fp16 on GPUs, fp32 on CPUs
    compile: str = "off"  # off, or a torch.compile back end such as inductor
    loader: str = "auto"
    augment: Augment = "fused"  # implementation of the colour and blur augmentations; dali needs --loader dali
    only_task: int | None = None  # train only this task of the manifest
    online_probe: str = "off"  # "every=E" epochs, "every=E,parity", or "off"
    probe_lr: float = 0.1  # learning rate of the parity probe; does not scale with the batch size
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for key, least in (("batch_size", 2), ("accumulate", 1), ("seed", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} is {getattr(self, key)}; give at least {least}.")
        if not isinstance(self.epochs, int):
            object.__setattr__(self, "epochs", tuple(self.epochs))  # a list, as read back from JSON, would not hash
        if min(self.epochs_listed, default=0) < 1:
            raise ValueError(f"epochs is {','.join(map(str, self.epochs_listed)) or 'empty'}; give at least 1.")
        if not 0 < self.probe_lr < math.inf:
            raise ValueError(f"probe_lr is {self.probe_lr}; it must be finite and above 0.")
        self._check_views()
        ProbePlan.parse(self.online_probe)

    def _check_views(self) -> None:
        """Raises UserError unless the policy has as many views as the method and the strategy take."""
        method, strategy = methods.method_of(self.method), strategies.strategy_of(self.strategy)
        name, count = self.views.policy, len(self.views.views())
        own = f"{method.name}-{named_policy(name).family}"
        of_method = f"Use --views.policy {own}." if name != own else "Make its num_views and its views() agree."
        of_strategy = f"Use a --views.policy of {strategy.num_views} views, or another strategy, such as finetune."
        for part, remedy in ((method, of_method), (strategy, of_strategy)):
            if part.num_views not in (None, count):
                raise UserError(
                    f"{part.name} takes exactly {part.num_views} views of an image, but the policy {name} has {count}. "
                    f"{remedy}"
                )

    @property
    def epochs_listed(self) -> tuple[int, ...]:
        """Returns the epochs as a list: a single number, or one number for each task of the data."""
        return (self.epochs,) if isinstance(self.epochs, int) else self.epochs

    def epochs_of(self, task: int) -> int:
        """Returns the epochs of a task of the data, counted from 0."""
        return self.epochs if isinstance(self.epochs, int) else self.epochs[task]

    @property
    def probe(self) -> ProbePlan:
        """Returns the plan that says when and how to probe the encoder during training."""
        return ProbePlan.parse(self.online_probe)

    def identity(self) -> dict[str, Any]:
        """Returns the values that a checkpoint must share with this configuration to be resumed."""
        values: dict[str, Any] = plain(self)
        del values["run"]
        # The clean probe changes nothing in the run; the references' parity probe moves the running statistics.
        values["online_probe"] = "parity" if self.probe.kind == "parity" else "none"
        if self.probe.kind != "parity":
            del values["probe_lr"]
        return values


def plain(config: Any) -> Any:
    """Returns the configuration as nested dictionaries, lists, strings and numbers, for JSON and checkpoints."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [plain(item) for item in config]
    if isinstance(config, enum.Enum):
        return config.value
    return str(config) if isinstance(config, Path) else config
