"""A linear classifier on cached features: logistic regression, solved to convergence.

It is orders of magnitude faster than SGD on augmented images, because the encoder sees each image once.
benchmarks/evaluate.py measures how far the two differ.

It computes in full float32 and returns the same result on every call. N: training rows, M: validation rows, F: feature
width, C: classes.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcssl.evaluate.features import Features, check, full_float32
from fastcssl.evaluate.probes import Bench

_VAL_CHUNK = 1024
_MAX_ELEMENTS = 1 << 24  # largest size of a temporary tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearHead:
    """A classifier of raw features, with the standardisation of its fit included. C: the classes it was fitted to."""

    weight_CF: Tensor
    bias_C: Tensor
    label_C: Tensor
    loss: float  # mean cross-entropy of the training rows + penalty

    def predict(self, found: Features) -> Tensor:
        """Returns the most likely label of each row, as int64 on the features' device."""
        return self.guess(found)[:, 0]

    def guess(self, found: Features) -> Tensor:
        """Returns the five most likely labels of each row, most likely first, and -1 if there are fewer classes."""
        return guesses(self.weight_CF, self.bias_C, self.label_C, found)


def guesses(weight_CF: Tensor, bias_C: Tensor, label_C: Tensor, found: Features) -> Tensor:
    """Returns the five most likely labels [M, 5] of each row by a linear layer. The lower class wins a tie."""
    weight_FC, home = weight_CF.T, found.h_NF.device
    num_guesses = min(5, len(label_C))
    with torch.no_grad(), full_float32():
        parts = [
            torch.addmm(bias_C, h_BF.to(weight_FC.device), weight_FC).sort(dim=1, descending=True, stable=True).indices
            for h_BF in torch.split(found.h_NF, max(1, min(_VAL_CHUNK, _MAX_ELEMENTS // len(label_C))))
        ]
    guess_M = label_C[torch.cat([part[:, :num_guesses] for part in parts])].to(home)
    return F.pad(guess_M, (0, 5 - num_guesses), value=-1)


def fit_linear(
    train: Features, *, strength: float = 1.0, max_iterations: int = 100, device: torch.device | str | None = None
) -> LinearHead:
    """Fits multinomial logistic regression to standardised features by full-batch L-BFGS, starting from zero.

    It minimises mean cross-entropy + |W|^2 / (2 strength N), the objective of scikit-learn's LogisticRegression with
    C = strength. Nothing in it is random. The standardised features must fit on the device.
    """
    check("train", train)
    device = torch.device(train.h_NF.device if device is None else device)
    mean_F, scale_F = (moment.to(device) for moment in _moments(train.h_NF))
    x_NF = (train.h_NF.to(device) - mean_F).mul_(scale_F)
    label_C, class_N = torch.unique(train.label_N.to(device), return_inverse=True)
    objective = _Objective(x_NF, class_N, len(label_C), 1 / (strength * len(train)))
    theta = torch.zeros(len(label_C), x_NF.shape[1] + 1, device=device, requires_grad=True)  # the last column is bias
    solver = torch.optim.LBFGS(
        [theta], max_iter=max_iterations, history_size=10, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        loss, theta.grad = objective(theta.detach())
        return loss

    with full_float32():
        solver.step(closure)  # type: ignore[no-untyped-call]
        found = theta.detach()
        weight_CF = found[:, :-1] * scale_F
        return LinearHead(
            weight_CF=weight_CF,
            bias_C=found[:, -1] - weight_CF @ mean_F,
            label_C=label_C,
            loss=objective(found)[0],
        )


class _Objective:
    """Computes the penalised cross-entropy and its gradient in chunks, without holding the logits of all rows."""

    def __init__(self, x_NF: Tensor, class_N: Tensor, num_classes: int, decay: float) -> None:
        self._x_NF, self._class_N, self._decay = x_NF, class_N, decay
        self._rows = max(1, _MAX_ELEMENTS // num_classes)

    def __call__(self, theta: Tensor) -> tuple[float, Tensor]:
        weight_CF, bias_C, num_rows = theta[:, :-1], theta[:, -1], len(self._x_NF)
        grad = torch.zeros_like(theta)
        total = theta.new_zeros((), dtype=torch.float64)
        for begin in range(0, num_rows, self._rows):
            x_BF, class_B = (part[begin : begin + self._rows] for part in (self._x_NF, self._class_N))
            log_p_BC = torch.addmm(bias_C, x_BF, weight_CF.T).log_softmax(dim=1)
            total -= log_p_BC.gather(1, class_B[:, None]).sum(dtype=torch.float64)
            error_BC = log_p_BC.exp_()
            error_BC.scatter_add_(1, class_B[:, None], error_BC.new_full((len(class_B), 1), -1.0))
            grad[:, :-1].addmm_(error_BC.T, x_BF)
            grad[:, -1] += error_BC.sum(dim=0)
        grad /= num_rows
        grad[:, :-1].add_(weight_CF, alpha=self._decay)
        penalty = 0.5 * self._decay * weight_CF.square().sum(dtype=torch.float64)
        return float(total / num_rows + penalty), grad


def _moments(h_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and 1 / standard deviation of each feature, summed in float64; 1 for a constant feature."""
    parts = torch.split(h_NF, max(1, _MAX_ELEMENTS // h_NF.shape[1]))
    mean_F = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts]).sum(dim=0) / len(h_NF)
    variance_F = torch.stack([(part - mean_F).square().sum(dim=0) for part in parts]).sum(dim=0) / len(h_NF)
    std_F = variance_F.sqrt()
    constant_F = std_F <= 1e-6 * mean_F.abs() + 1e-12
    return mean_F.float(), torch.where(constant_F, 1.0, 1 / std_F).float()


# ---- As a probe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSettings:
    """The settings of a classifier on cached features."""

    strength: float = 1.0  # scikit-learn's C
    max_iterations: int = 100


def guess(train: Features, val: Features, settings: CachedSettings, bench: Bench) -> Tensor:
    """Fits a classifier to the training rows and returns its guesses [M, 5] for the validation rows."""
    return fit_linear(train, device=bench.device, **asdict(settings)).guess(val)
