"""Builds the optimiser: LARS as in the reference scripts, torch's SGD and AdamW, or NVIDIA apex's fused SGD.

LARS (You et al., arXiv:1708.03888) in its LARC form. For a weight w with gradient u and weight decay d:
    ratio = eta |w| / (|u| + d |w| + 1e-8), with clip min(ratio / lr, 1);    u <- (u + d w) ratio
then SGD with momentum and no decay. Where |w| or |u| is zero, u does not change and there is no decay either.
The caller sets the learning rate with `set_lr`, to the value that `lr_at` gives.
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
    """The settings of the optimiser and of the learning rate's schedule."""

    name: OptimizerName = "lars"
    lr: float = 0.6  # for a global batch of 256; scaled in proportion to the batch size
    weight_decay: float = 1e-4  # of all tensors that are not excluded
    momentum: float = 0.9  # for lars and sgd
    betas: tuple[float, float] = (0.9, 0.999)  # for adamw
    eta: float = 0.02  # for lars: the trust coefficient
    clip: bool = True  # for lars: never raise a tensor's learning rate above lr
    exclude_bias_and_norm: bool = True  # no LARS scaling and no weight decay for 1-D tensors
    implementation: OptimizerBackend = "foreach"  # apex: FusedSGD of NVIDIA's apex, only for sgd
    schedule: Schedule = "warmup-cosine"
    warmup_epochs: int = 10  # at the start of each task
    warmup_start_lr: float = 0.003  # not scaled with the batch size
    min_lr: float = 0.0  # at the end of a task; not scaled with the batch size
    schedule_unit: ScheduleUnit = "epoch"  # step: update the learning rate within epochs too

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
            if not 0 <= value < math.inf:  # also rejects nan
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
    """LARS in its LARC form. A group with adapt=False gets plain SGD, including weight decay.

    The host never waits for the device. Gradients must be unscaled before the step; GradScaler does this.
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
    """Does lars_update_plain for all tensors together, on their device. P tensors share a device and a type."""
    updates = list(torch._foreach_add(grads, params, alpha=weight_decay))
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, param in enumerate(params):
        groups.setdefault((param.device, param.dtype), []).append(number)
    for (_, dtype), numbers in groups.items():
        precise = torch.promote_types(dtype, torch.float32)
        weight_P = torch.stack(torch._foreach_norm([params[n] for n in numbers], 2, precise))
        gradient_P = torch.stack(torch._foreach_norm([grads[n] for n in numbers], 2, precise))
        ratio_P = eta * weight_P / (gradient_P + weight_decay * weight_P + _EPS)
        if clip:
            ratio_P = (ratio_P / lr).clamp(max=1)
        # For a zero gradient, 0 also cancels the decay added above. For a zero weight, that decay was zero.
        ratio_P = torch.where(gradient_P == 0, 0.0, ratio_P)
        ratio_P = torch.where(weight_P == 0, 1.0, ratio_P)
        torch._foreach_mul_([updates[n] for n in numbers], ratio_P.unbind())
    return updates


def lars_update_plain(
    weight: Tensor, gradient: Tensor, *, lr: float, weight_decay: float, eta: float, clip: bool
) -> Tensor:
    """Returns LARS's update of one gradient before momentum. This is the definition, computed on the host."""
    weight_norm, gradient_norm = float(weight.norm()), float(gradient.norm())
    if weight_norm == 0 or gradient_norm == 0:
        return gradient.clone()
    ratio = eta * weight_norm / (gradient_norm + weight_decay * weight_norm + _EPS)
    if clip:
        ratio = min(ratio / lr, 1.0) if lr else 1.0
    return (gradient + weight_decay * weight) * ratio


def build_optimizer(groups: Sequence[Mapping[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """Returns the optimiser of a configuration for these groups of parameters.

    Each group has `params` and a `name`. It may have its own `weight_decay`, and an `lr_scale`, a factor on every
    learning rate that is set. Where 1-D tensors are excluded, those of a group form a second group, called "NAME 1-D".
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
    # Not fused: if GradScaler skips the first step, fused SGD leaves its momentum uninitialised, and it fails on a
    # parameter whose first gradient comes late.
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def _apex_sgd(groups: list[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    for param in (param for group in groups for param in group["params"]):
        # FusedSGD silently ignores other types.
        if param.device.type == "cpu" or param.dtype not in (torch.float32, torch.float16):
            raise UserError(
                f"apex's FusedSGD takes float32 and float16 parameters on a GPU, but one is {param.dtype} on "
                f"{param.device}. Use --optim.implementation foreach."
            )
    try:
        fused_sgd = importlib.import_module("apex.optimizers").FusedSGD
        optimizer: torch.optim.Optimizer = fused_sgd(groups, lr=config.lr, momentum=config.momentum)
    except Exception as error:  # PyPI's package and incomplete builds fail in many ways
        raise UserError(
            "--optim.implementation apex needs FusedSGD of NVIDIA's apex with its CUDA extensions, but it failed with "
            f"{type(error).__name__}: {error}. PyPI's 'apex' is an unrelated package: uninstall that and build "
            "https://github.com/NVIDIA/apex from source (APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
            "--no-build-isolation .), or use --optim.implementation foreach."
        ) from error
    return optimizer


def _fit_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Checks that a saved state has the same groups, and makes it use this machine's foreach or fused setting."""
    saved, names = (
        [group.get("name") for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != names:
        raise ValueError(f"The saved optimiser has the groups {saved}, this one has {names}; it cannot continue.")
    here = {key: optimizer.defaults[key] for key in ("foreach", "fused") if key in optimizer.defaults}
    return {**state, "param_groups": [{**group, **here} for group in state["param_groups"]]}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group, times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of the optimiser that really runs, for the header of a run."""
    kind, group = type(optimizer), optimizer.param_groups[0]
    if isinstance(optimizer, Lars):
        return "LARS (foreach)"
    if kind.__module__.split(".")[0] == "apex":
        return f"apex {kind.__name__}"
    how = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "one tensor at a time"
    return f"torch {kind.__name__} ({how})"


# ---- The schedule ----------------------------------------------------------------------------------------------------


def lr_peak(config: OptimConfig, batch_size: int) -> float:
    """Returns the peak learning rate for a global batch size. warmup_start_lr and min_lr are not scaled."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    return config.lr * batch_size / 256


def lr_at(config: OptimConfig, peak: float, epoch: float, num_epochs: int) -> float:
    """Returns the learning rate at a point in a task.

    `epoch` counts from the start of the task. Its fraction matters only where schedule_unit is "step".

    warmup-cosine is Lightning Bolts' curve. With w warm-up epochs, a line leads from warmup_start_lr in epoch 0 to the
    peak in epoch w - 1, so epochs w - 1 and w both have the peak. Then half a cosine reaches min_lr at num_epochs.
    With w = 1, epoch 0 has warmup_start_lr and epoch 1 has the peak. With w = 0, the curve is cosine (Bolts would still
    start low). A task of w epochs or fewer ends within the warm-up, which is not compressed. cosine has no warm-up.
    The rate never exceeds the peak: a warmup_start_lr or min_lr above the peak counts as the peak.
    After num_epochs the rate keeps its final value.
    """
    if num_epochs < 1 or not 0 <= epoch < math.inf:
        raise ValueError(
            f"epoch is {epoch} of {num_epochs}; give a finite epoch from 0 on, and at least 1 epoch in all."
        )
    if config.schedule == "constant":
        return peak
    at = min(math.floor(epoch) if config.schedule_unit == "epoch" else epoch, num_epochs)
    num_warmup = config.warmup_epochs if config.schedule == "warmup-cosine" else 0
    if at < num_warmup:
        start = min(config.warmup_start_lr, peak)
        return min(start + at * (peak - start) / max(num_warmup - 1, 1), peak)
    if at == num_warmup:  # may also be the end; then there is no cosine
        return peak
    end = min(config.min_lr, peak)
    return end + (peak - end) * (1 + math.cos(math.pi * (at - num_warmup) / (num_epochs - num_warmup))) / 2
