"""What moves the weights: LARS as the reference scripts run it, torch's SGD and AdamW, or NVIDIA apex's fused SGD.

LARS (You et al., arXiv:1708.03888) in its LARC form. For a weight w with gradient u and weight decay d:
    ratio = eta |w| / (|u| + d |w| + 1e-8), with clip min(ratio / lr, 1);    u <- (u + d w) ratio
then SGD with momentum and no decay. Where |w| or |u| is zero, u stays as it is and there is no decay either.
The learning rate is set from outside, by `set_lr`; schedule.py says to what.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from dataprep.suggest import nearest
from fastcssl.errors import UserError

OptimizerName = Literal["lars", "sgd", "adamw"]
OptimizerBackend = Literal["foreach", "apex"]
Schedule = Literal["warmup-cosine", "cosine", "constant"]
ScheduleUnit = Literal["epoch", "step"]

_EPS = 1e-8
_GROUP_KEYS = ("params", "name", "lr_scale", "weight_decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    name: OptimizerName = "lars"
    lr: float = 0.6  # for a global batch of 256, and in proportion for others
    weight_decay: float = 1e-4  # of all tensors but those excluded
    momentum: float = 0.9  # of lars and sgd
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw
    eta: float = 0.02  # of lars
    clip: bool = True  # of lars: it slows a tensor down but never speeds it up
    exclude_bias_and_norm: bool = True  # 1-D tensors get neither LARS's scaling nor weight decay
    implementation: OptimizerBackend = "foreach"  # apex: its FusedSGD, for sgd
    schedule: Schedule = "warmup-cosine"
    warmup_epochs: int = 10  # of each task
    warmup_start_lr: float = 0.003  # not scaled with the batch, nor is min_lr
    min_lr: float = 0.0  # at the end of a task
    schedule_unit: ScheduleUnit = "epoch"  # step: the same curve, followed within epochs too

    def __post_init__(self) -> None:
        for what, word, known in (
            ("name", self.name, get_args(OptimizerName)),
            ("implementation", self.implementation, get_args(OptimizerBackend)),
            ("schedule", self.schedule, get_args(Schedule)),
            ("schedule_unit", self.schedule_unit, get_args(ScheduleUnit)),
        ):
            if word not in known:
                raise ValueError(f"There is no optim.{what} {word!r}. {nearest(word, known)}")
        for what, value in (
            ("lr", self.lr),
            ("weight_decay", self.weight_decay),
            ("warmup_epochs", self.warmup_epochs),
            ("warmup_start_lr", self.warmup_start_lr),
            ("min_lr", self.min_lr),
        ):
            if not 0 <= value < math.inf:  # nan is refused too
                raise ValueError(f"optim.{what} is {value}; it must be finite and at least 0.")
        for what, value in (("momentum", self.momentum), *(("betas", beta) for beta in self.betas)):
            if not 0 <= value < 1:
                raise ValueError(f"optim.{what} has {value}; it must be at least 0 and below 1.")
        if not 0 < self.eta < math.inf:
            raise ValueError(f"optim.eta is {self.eta}; it must be finite and above 0.")
        if self.implementation == "apex" and self.name != "sgd":
            raise ValueError(
                f"optim.implementation 'apex' cannot run {self.name!r}, only 'sgd'; "
                f"use optim.name 'sgd' or optim.implementation 'foreach'."
            )


class Lars(torch.optim.Optimizer):
    """A group with adapt=False is plain SGD, weight decay included. The host never waits for the device.

    Gradients must be unscaled by the time of the step, which GradScaler sees to by itself.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.02,
        clip: bool = True,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "eta": eta, "clip": clip, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            updates = [param.grad for param in params]
            weight_decay, momentum = group["weight_decay"], group["momentum"]
            if group["adapt"]:
                settings = {key: group[key] for key in ("lr", "weight_decay", "eta", "clip")}
                updates, weight_decay = _lars_updates(params, updates, **settings), 0.0
            buffers = [self.state[param].get("momentum_buffer") if momentum else None for param in params]
            sgd(
                params,
                updates,
                buffers,
                foreach=True,
                weight_decay=weight_decay,
                momentum=momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            if momentum:
                for param, buffer in zip(params, buffers, strict=True):
                    self.state[param]["momentum_buffer"] = buffer
        return loss


def _lars_updates(
    params: list[Tensor], grads: list[Tensor], *, lr: float, weight_decay: float, eta: float, clip: bool
) -> list[Tensor]:
    """lars_update_plain for all tensors at once (P of them share a device and a type), the norms staying there."""
    updates = list(torch._foreach_add(grads, params, alpha=weight_decay))
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, param in enumerate(params):
        alike.setdefault((param.device, param.dtype), []).append(number)
    for (_, dtype), numbers in alike.items():
        precise = torch.promote_types(dtype, torch.float32)
        weight_P = torch.stack(torch._foreach_norm([params[n] for n in numbers], 2, precise))
        gradient_P = torch.stack(torch._foreach_norm([grads[n] for n in numbers], 2, precise))
        ratio_P = eta * weight_P / (gradient_P + weight_decay * weight_P + _EPS)
        if clip:
            ratio_P = (ratio_P / lr).clamp(max=1)
        # No gradient: 0 also undoes the decay added above. No weight: that decay was zero.
        ratio_P = torch.where(gradient_P == 0, 0.0, ratio_P)
        ratio_P = torch.where(weight_P == 0, 1.0, ratio_P)
        torch._foreach_mul_([updates[n] for n in numbers], ratio_P.unbind())
    return updates


def lars_update_plain(
    weight: Tensor, gradient: Tensor, *, lr: float, weight_decay: float, eta: float, clip: bool
) -> Tensor:
    """What LARS makes of one gradient ahead of momentum: the definition, in numbers on the host."""
    weight_norm, gradient_norm = float(weight.norm()), float(gradient.norm())
    if weight_norm == 0 or gradient_norm == 0:
        return gradient.clone()
    ratio = eta * weight_norm / (gradient_norm + weight_decay * weight_norm + _EPS)
    if clip:
        ratio = min(ratio / lr, 1.0) if lr else 1.0
    return (gradient + weight_decay * weight) * ratio


def build_optimizer(groups: Sequence[Mapping[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """Each group: its params and name; if wanted, lr_scale (a factor on every lr that is set) and its own weight_decay.

    Where 1-D tensors are excluded, those of a group become another one, called "NAME 1-D".
    """
    split = [part for group in groups for part in _split(group, config)]
    if not split:
        raise ValueError(f"The {len(groups)} groups hold no parameters; there is nothing to optimise.")
    optimizer = _make(split, config)
    optimizer.register_load_state_dict_pre_hook(_fit_state)
    return optimizer


def _split(group: Mapping[str, Any], config: OptimConfig) -> list[dict[str, Any]]:
    for key in group:
        if key not in _GROUP_KEYS:
            raise ValueError(f"A parameter group cannot have {key!r}. {nearest(key, _GROUP_KEYS)}")
    settings = {
        "lr_scale": group.get("lr_scale", 1.0),
        "lr": config.lr * group.get("lr_scale", 1.0),
        "weight_decay": group.get("weight_decay", config.weight_decay),
    }
    name, params = group["name"], list(group["params"])
    whole, excluded = params, []
    if config.exclude_bias_and_norm:
        whole, excluded = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    parts = [
        {**settings, "params": whole, "name": name},
        {**settings, "params": excluded, "name": f"{name} 1-D", "weight_decay": 0.0, "adapt": False},
    ]
    if config.name != "lars":
        parts[1].pop("adapt")
    return [part for part in parts if part["params"]]


def _make(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    if config.name == "lars":
        return Lars(groups, config.lr, momentum=config.momentum, eta=config.eta, clip=config.clip)
    if config.name == "adamw":
        fused = all(param.is_cuda for group in groups for param in group["params"])
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, foreach=not fused, fused=fused)
    if config.implementation == "apex":
        return _apex_sgd(groups, config)
    # Not fused: a first step that GradScaler skips would leave its momentum uninitialised, and a parameter whose first
    # gradient comes late would stop it.
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def _apex_sgd(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    for param in (param for group in groups for param in group["params"]):
        # It would pass over other types without a word.
        if param.device.type == "cpu" or param.dtype not in (torch.float32, torch.float16):
            raise UserError(
                f"apex's FusedSGD takes float32 and float16 parameters on a GPU, but one is {param.dtype} on "
                f"{param.device}. Use --optim.implementation foreach."
            )
    try:
        fused_sgd = importlib.import_module("apex.optimizers").FusedSGD
        optimizer: torch.optim.Optimizer = fused_sgd(groups, lr=config.lr, momentum=config.momentum)
    except Exception as error:  # PyPI's package and half-built ones fail in every way
        raise UserError(
            "--optim.implementation apex needs FusedSGD of NVIDIA's apex with its CUDA extensions, and trying it gave "
            f"{type(error).__name__}: {error}. PyPI's 'apex' is an unrelated package: uninstall that and build "
            "https://github.com/NVIDIA/apex from source (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
            "--no-build-isolation .), or use --optim.implementation foreach."
        ) from error
    return optimizer


def _fit_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A saved state belongs to groups of the same names, and goes on with this machine's way of computing."""
    saved, names = (
        [group.get("name") for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != names:
        raise ValueError(f"The saved optimiser has the groups {saved}, this one {names}; it cannot go on.")
    here = {key: optimizer.defaults[key] for key in ("foreach", "fused") if key in optimizer.defaults}
    return {**state, "param_groups": [{**group, **here} for group in state["param_groups"]]}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Which optimiser really runs, for the header of a run."""
    kind, group = type(optimizer), optimizer.param_groups[0]
    if isinstance(optimizer, Lars):
        return "LARS (foreach)"
    if kind.__module__.split(".")[0] == "apex":
        return f"apex {kind.__name__}"
    how = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "one tensor at a time"
    return f"torch {kind.__name__} ({how})"


# ---- The schedule ----------------------------------------------------------------------------------------------------


def lr_peak(config: OptimConfig, batch_size: int) -> float:
    """`batch_size` is global. Only this is scaled, neither warmup_start_lr nor min_lr."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    return config.lr * batch_size / 256


def lr_at(config: OptimConfig, peak: float, epoch: float, num_epochs: int) -> float:
    """`epoch` counts from the start of the task; its fraction counts only where schedule_unit is "step".

    warmup-cosine is Lightning Bolts' curve. With w warm-up epochs a line leads from warmup_start_lr in epoch 0 to the
    peak in epoch w - 1, so epochs w - 1 and w both have the peak; then half a cosine reaches min_lr at num_epochs.
    With w = 1 epoch 0 has warmup_start_lr and epoch 1 the peak; with w = 0 it is cosine (Bolts would still start low).
    A task of w epochs or fewer ends within the warm-up, which is not compressed. cosine has no warm-up.
    The peak is the highest that ever is: a warmup_start_lr or min_lr above it counts as the peak.
    Past num_epochs the rate stays where it ended.
    """
    if num_epochs < 1 or not 0 <= epoch < math.inf:
        raise ValueError(f"epoch is {epoch} of {num_epochs}; it must be finite and at least 0, of at least 1.")
    if config.schedule == "constant":
        return peak
    at = min(math.floor(epoch) if config.schedule_unit == "epoch" else epoch, num_epochs)
    num_warmup = config.warmup_epochs if config.schedule == "warmup-cosine" else 0
    if at < num_warmup:
        start = min(config.warmup_start_lr, peak)
        return min(start + at * (peak - start) / max(num_warmup - 1, 1), peak)
    if at == num_warmup:  # which may be the end too: then there is no cosine
        return peak
    end = min(config.min_lr, peak)
    return end + (peak - end) * (1 + math.cos(math.pi * (at - num_warmup) / (num_epochs - num_warmup))) / 2
