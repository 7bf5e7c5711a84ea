"""What an encoder has learnt: its features of a data set, and what k-NN and a linear classifier make of them.

Features are extracted once and cached, so everything after `features` is arithmetic on matrices and never sees the
encoder again. All of it is in full float32 and the same on every call; accuracies are shares, 0..1.

N: training rows, M: validation rows, F: feature width, C: classes, k: neighbours.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcssl.dist import World
from fastcssl.loaders.stream import Stream

Metric = Literal["cosine", "euclidean"]

_TRAIN_CHUNK, _VAL_CHUNK = 8192, 1024  # rows: 32 MB of scores and 64 MB of keys at a time
_MAX_ELEMENTS = 1 << 24  # of any other temporary


# ---- Features --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """One row a sample, in the order of ids, no id twice."""

    h_NF: Tensor  # float32
    label_N: Tensor  # int64
    id_N: Tensor  # int64

    def __len__(self) -> int:
        return len(self.h_NF)

    def __getitem__(self, rows_N: Tensor) -> "Features":
        """Some of the rows, by a mask or by ascending indices."""
        return Features(h_NF=self.h_NF[rows_N], label_N=self.label_N[rows_N], id_N=self.id_N[rows_N])


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode for a while. Afterwards each submodule has its own flag back, also where they differed."""
    flags = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def features(
    encoder: nn.Module,
    stream: Stream,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    epoch: int = 0,
    world: World | None = None,
    keep_on: torch.device | str = "cpu",
) -> Features:
    """Every sample of a finite stream of one view, through the encoder in eval mode: no BN statistic moves.

    Each rank takes its share and all of them get all rows. A sample that could not be decoded is left out: the
    stream's replacement for it comes by itself too, and counts once. `epoch` only matters to a random policy.
    """
    device, world = torch.device(device), world or World()
    num_samples = _num_samples(stream)
    label_N, id_N = (torch.empty(num_samples, dtype=torch.int64, device=keep_on) for _ in range(2))
    h_NF: Tensor | None = None
    filled = 0
    # no_grad, not inference_mode: a head may be trained on these.
    with torch.no_grad(), mode(encoder, training=False):
        for batch in stream.epoch(epoch):
            h_BF = embed(encoder, batch.views, device=device, amp_dtype=amp_dtype)
            # Padding makes the ranks' parts equal, so it goes only after they are joined.
            h_BF, label_B, id_B = (world.gather_keys(x) for x in (h_BF, batch.label, batch.id))
            h_BF, label_B, id_B = (x.to(keep_on) for x in (h_BF, label_B, id_B))
            valid_B = id_B >= 0
            if h_NF is None:
                h_NF = torch.empty(num_samples, h_BF.shape[1], device=keep_on)
            rows = slice(filled, filled := filled + int(valid_B.sum()))
            h_NF[rows], label_N[rows], id_N[rows] = h_BF[valid_B], label_B[valid_B], id_B[valid_B]
    if h_NF is None or filled != num_samples:
        raise ValueError(
            f"The stream gave {filled} of its {num_samples} samples. Open its loader with last='pad' to get them all."
        )
    return _in_order(Features(h_NF=h_NF, label_N=label_N, id_N=id_N))


def embed(
    encoder: nn.Module, views: tuple[Tensor, ...], *, device: torch.device, amp_dtype: torch.dtype | None
) -> Tensor:
    """The encoder's output for a batch of one view, in float32; in whichever mode and grad mode the caller set."""
    if len(views) != 1:
        raise ValueError(f"Features are of one view, but the batch has {len(views)}. Use a probe-val policy.")
    view = views[0].to(device, non_blocking=True)
    if amp_dtype is None:
        view = view.float()  # the loader may serve a shorter type
    # Uncached: casts made without gradient must not be found by a training forward in an enclosing autocast.
    with nullcontext() if amp_dtype is None else torch.autocast(device.type, amp_dtype, cache_enabled=False):
        h_BF: Tensor = encoder(view)
    return h_BF.float()


def _num_samples(stream: Stream) -> int:
    if len(stream) == sys.maxsize:
        raise ValueError("An endless stream has no last sample. Open the selection with order='sequential'.")
    return stream.num_samples


def _in_order(found: Features) -> Features:
    if bool((found.id_N[1:] > found.id_N[:-1]).all()):
        return found  # as a sequential stream gives them; no second copy of what may be gigabytes
    id_N, order_N = torch.sort(found.id_N, stable=True)
    first_N = torch.ones_like(id_N, dtype=torch.bool)
    first_N[1:] = id_N[1:] != id_N[:-1]
    return found[order_N[first_N]]


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products without TF32 or bfloat16 shortcuts, whatever the training chose."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _check(name: str, found: Features, num_classes: int | None = None) -> None:
    if not len(found):
        raise ValueError(f"There are no {name} features to evaluate. Choose tasks that have {name} samples.")
    if not bool(found.h_NF.isfinite().all()):
        raise ValueError(f"Some {name} features are not finite. Pass them through `finite` first.")
    low, high = int(found.label_N.min()), int(found.label_N.max())
    if num_classes is not None and (low < 0 or high >= num_classes):
        raise ValueError(f"The {name} labels span {low}..{high}, outside the {num_classes} classes.")


def finite(found: Features) -> tuple[Features, int]:
    """Rows with a NaN or an infinity become zeros, and how many those were: an overflow must not end a run."""
    bad_N = ~found.h_NF.isfinite().all(dim=1)
    num_bad = int(bad_N.sum())
    if num_bad == 0:
        return found, 0
    h_NF = found.h_NF.clone()
    h_NF[bad_N] = 0
    return Features(h_NF=h_NF, label_N=found.label_N, id_N=found.id_N), num_bad


def top1(predicted_M: Tensor, val: Features) -> float:
    """NaN for no rows at all."""
    return int((predicted_M == val.label_N).sum()) / len(val) if len(val) else math.nan


# ---- k nearest neighbours --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnnResult:
    top1: float
    top5: float
    predictions: Tensor  # int64 [M], on the features' device


def knn(
    train: Features,
    val: Features,
    *,
    num_classes: int,
    k: int = 20,
    metric: Metric = "cosine",
    temperature: float = 0.07,
    device: torch.device | str | None = None,
    train_chunk: int = _TRAIN_CHUNK,
    val_chunk: int = _VAL_CHUNK,
) -> KnnResult:
    """Each validation row takes the class for which its k nearest training rows weigh most.

    The weight of a neighbour is exp(s / temperature) for cosine similarity s, 1 / (d + 1e-5) for Euclidean distance d.
    Of equally near rows the lower index is nearer; of equally weighted classes the lower label wins. A class that got
    no vote is no guess, also when that leaves fewer than five. `device`: where to compute, the features' own if None.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"'{metric}' is not a metric of k-NN. Use {' or '.join(get_args(Metric))}.")
    if k < 1 or temperature <= 0:
        raise ValueError(f"k-NN needs k >= 1 and a temperature above 0, not k = {k} and {temperature:g}.")
    _check("train", train, num_classes)
    _check("val", val, num_classes)
    home = val.h_NF.device
    device = home if device is None else torch.device(device)
    k = min(k, len(train))
    val_MF, label_M = val.h_NF.to(device), val.label_N.to(device)
    if metric == "cosine":
        val_MF = F.normalize(val_MF, dim=1)
    with torch.no_grad(), full_float32():
        neighbour_Mk = _nearest(train.h_NF, val_MF, k, metric, train_chunk, val_chunk)
        rows = max(1, min(val_chunk, _MAX_ELEMENTS // (k * val_MF.shape[1]), _MAX_ELEMENTS // num_classes))
        guesses = []
        for begin in range(0, len(val_MF), rows):
            neighbour_Bk = neighbour_Mk[begin : begin + rows]
            near_BkF = train.h_NF[neighbour_Bk.to(train.h_NF.device)].to(device)
            weight_Bk = _weights(val_MF[begin : begin + rows], near_BkF, metric, temperature)
            label_Bk = train.label_N[neighbour_Bk.to(train.label_N.device)].to(device)
            guesses.append(_guesses(weight_Bk, label_Bk, num_classes))
    guess_M5 = torch.cat(guesses)
    hit_M5 = guess_M5 == label_M[:, None]
    num_val = len(val)
    return KnnResult(
        top1=int(hit_M5[:, 0].sum()) / num_val,
        top5=int(hit_M5.any(dim=1).sum()) / num_val,
        predictions=guess_M5[:, 0].to(home),
    )


def _nearest(train_NF: Tensor, val_MF: Tensor, k: int, metric: Metric, train_chunk: int, val_chunk: int) -> Tensor:
    """Indices [M, k] of the nearest training rows, nearest first. One pass over the training rows."""
    device = val_MF.device
    best_Mk = torch.full((len(val_MF), k), torch.iinfo(torch.int64).min, device=device)
    for begin in range(0, len(train_NF), train_chunk):
        train_CF = train_NF[begin : begin + train_chunk].to(device)
        index_C = torch.arange(begin, begin + len(train_CF), device=device)
        if metric == "cosine":
            train_CF = F.normalize(train_CF, dim=1)
            bias_C = torch.zeros(len(train_CF), device=device)
        else:  # d^2 = |v|^2 + |t|^2 - 2 v.t, of which |v|^2 is the same along a row
            bias_C = train_CF.square().sum(dim=1).mul_(-0.5)
        for at in range(0, len(val_MF), val_chunk):
            score_BC = torch.addmm(bias_C, val_MF[at : at + val_chunk], train_CF.T)
            found_Bk = _keys(score_BC, index_C).topk(min(k, len(train_CF)), dim=1).values
            both = torch.cat((best_Mk[at : at + val_chunk], found_Bk), dim=1)
            best_Mk[at : at + val_chunk] = both.topk(k, dim=1).values
    return _LOW_BITS - (best_Mk & _LOW_BITS)


_LOW_BITS = (1 << 32) - 1


def _keys(score_BC: Tensor, index_C: Tensor) -> Tensor:
    """Score and index as one int64 that sorts by falling score, then by rising index. No two are equal, so that topk,
    which may take any of several equal values, has no choice."""
    bits = score_BC.add_(0.0).view(torch.int32)  # adding turns -0.0 into 0.0
    bits.bitwise_xor_((bits >> 31) & 0x7FFFFFFF)  # the order of floats becomes that of integers
    return bits.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - index_C)


def _weights(val_BF: Tensor, near_BkF: Tensor, metric: Metric, temperature: float) -> Tensor:
    """From the differences themselves: what the matrix product lost to cancellation would show in 1 / d."""
    if metric == "euclidean":
        return 1 / ((val_BF[:, None] - near_BkF).square().sum(dim=2).sqrt() + 1e-5)
    similarity_Bk = (val_BF[:, None] * F.normalize(near_BkF, dim=2)).sum(dim=2)
    # Relative to the nearest, which changes no vote and cannot overflow.
    return ((similarity_Bk - similarity_Bk.amax(dim=1, keepdim=True)) / temperature).exp()


def _guesses(weight_Bk: Tensor, label_Bk: Tensor, num_classes: int) -> Tensor:
    """The five heaviest classes [B, 5], -1 where fewer got a vote."""
    votes_BC = weight_Bk.new_zeros(len(weight_Bk), num_classes)
    for j in range(weight_Bk.shape[1]):  # one neighbour at a time: a scatter of all has no fixed order of addition
        label_B1 = label_Bk[:, j : j + 1]
        votes_BC.scatter_(1, label_B1, votes_BC.gather(1, label_B1) + weight_Bk[:, j : j + 1])
    votes_BC, class_BC = votes_BC.sort(dim=1, descending=True, stable=True)
    guess_B5 = class_BC[:, :5].masked_fill(votes_BC[:, :5] == 0, -1)
    return F.pad(guess_B5, (0, 5 - guess_B5.shape[1]), value=-1)


# ---- A linear head ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearHead:
    """A classifier of raw features: the standardisation it was fitted on is part of it. C: the classes it met."""

    weight_CF: Tensor
    bias_C: Tensor
    label_C: Tensor
    num_iterations: int  # that the fit took
    loss: float  # mean cross-entropy of the training rows + penalty

    def predict(self, found: Features) -> Tensor:
        """The most likely label of every row, int64 on the features' device."""
        weight_FC, home = self.weight_CF.T, found.h_NF.device
        with torch.no_grad(), full_float32():
            parts = [
                torch.addmm(self.bias_C, h_BF.to(weight_FC.device), weight_FC).argmax(dim=1)
                for h_BF in torch.split(found.h_NF, _VAL_CHUNK)
            ]
        return self.label_C[torch.cat(parts)].to(home)


def fit_linear(
    train: Features, *, strength: float = 1.0, max_iterations: int = 100, device: torch.device | str | None = None
) -> LinearHead:
    """Multinomial logistic regression on standardised features: full-batch L-BFGS from zero, so nothing is random.

    Minimises mean cross-entropy + |W|^2 / (2 strength N), the objective of scikit-learn's LogisticRegression with
    C = strength. The standardised features must fit on the device.
    """
    _check("train", train)
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
            num_iterations=int(solver.state[theta].get("n_iter", 0)),
            loss=objective(found)[0],
        )


class _Objective:
    """Value and gradient of the penalised cross-entropy, in chunks: the logits of all rows are never held."""

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
    """Mean and 1 / standard deviation of each feature, summed in float64; a constant feature is not scaled."""
    parts = torch.split(h_NF, max(1, _MAX_ELEMENTS // h_NF.shape[1]))
    mean_F = torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts]).sum(dim=0) / len(h_NF)
    variance_F = torch.stack([(part - mean_F).square().sum(dim=0) for part in parts]).sum(dim=0) / len(h_NF)
    std_F = variance_F.sqrt()
    constant_F = std_F <= 1e-6 * mean_F.abs() + 1e-12
    return mean_F.float(), torch.where(constant_F, 1.0, 1 / std_F).float()
