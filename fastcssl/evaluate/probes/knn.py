"""Weighted k nearest neighbours on cached features. The training rows stream through the device in chunks.

It computes in full float32 and returns the same result on every call. N: training rows, M: validation rows, F: feature
width, C: classes, k: neighbours.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcssl.evaluate.features import Features, check, full_float32
from fastcssl.evaluate.probes import Bench

KnnMetric = Literal["cosine", "euclidean"]

_TRAIN_CHUNK, _VAL_CHUNK = 8192, 1024  # rows: 32 MB of scores and 64 MB of keys at a time
_MAX_ELEMENTS = 1 << 24  # largest size of any other temporary tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnnResult:
    """The accuracies and guesses of k-NN."""

    top1: float
    top5: float
    guess_M5: Tensor  # labels by falling weight, -1 if fewer classes got a vote; on the features' device

    @property
    def predictions(self) -> Tensor:
        return self.guess_M5[:, 0]


def knn(
    train: Features,
    val: Features,
    *,
    num_classes: int,
    k: int = 20,
    metric: KnnMetric = "cosine",
    temperature: float = 0.07,
    device: torch.device | str | None = None,
    train_chunk: int = _TRAIN_CHUNK,
    val_chunk: int = _VAL_CHUNK,
) -> KnnResult:
    """Returns the guesses for each validation row: the classes with the largest weight among its k nearest rows.

    The weight of a neighbour is exp(s / temperature) for cosine similarity s, 1 / (d + 1e-5) for Euclidean distance d.
    Among equally near rows, the lower index counts as nearer; among equally weighted classes, the lower label wins. A
    class without a vote is never guessed, even if that leaves fewer than five guesses. `device`: where to compute; None
    means the device of the features.
    """
    if metric not in get_args(KnnMetric):
        raise ValueError(f"'{metric}' is not a metric of k-NN. Use {' or '.join(get_args(KnnMetric))}.")
    if k < 1 or temperature <= 0:
        raise ValueError(f"k-NN needs k >= 1 and a temperature above 0, not k = {k} and {temperature:g}.")
    check("train", train, num_classes)
    check("val", val, num_classes)
    home = val.h_NF.device
    device = home if device is None else torch.device(device)
    val_MF = _prepared(val.h_NF.to(device), metric)
    with torch.no_grad(), full_float32():
        chunks = (part.to(device) for part in torch.split(train.h_NF, train_chunk))
        neighbour_Mk = _nearest(chunks, val_MF, min(k, len(train)), metric, val_chunk)
        guess_M5 = _vote(train, val_MF, neighbour_Mk, metric, temperature, num_classes, val_chunk)
    hit_M5 = guess_M5 == val.label_N.to(device)[:, None]
    num_val = len(val)
    return KnnResult(
        top1=int(hit_M5[:, 0].sum()) / num_val,
        top5=int(hit_M5.any(dim=1).sum()) / num_val,
        guess_M5=guess_M5.to(home),
    )


def _prepared(h_NF: Tensor, metric: KnnMetric) -> Tensor:
    return F.normalize(h_NF, dim=1) if metric == "cosine" else h_NF


def _nearest(
    chunks: Iterable[Tensor],
    val_MF: Tensor,
    k: int,
    metric: KnnMetric,
    val_chunk: int,
    is_mine: Callable[[int], bool] = lambda _: True,
) -> Tensor:
    """Returns the indices [M, k] of the nearest training rows, nearest first, in one pass over the training rows.

    `is_mine`: whether to look for the neighbours of a chunk of validation rows, by its number. The indices of the
    others are 0.
    """
    device, begin = val_MF.device, 0
    mine = [at for number, at in enumerate(range(0, len(val_MF), val_chunk)) if is_mine(number)]
    best_Mk = torch.full((len(val_MF), k), _LOW_BITS, device=device)  # the key of index 0
    for at in mine:
        best_Mk[at : at + val_chunk] = torch.iinfo(torch.int64).min
    for chunk_CF in chunks:
        train_CF = _prepared(chunk_CF, metric)
        index_C = torch.arange(begin, begin := begin + len(train_CF), device=device)
        if metric == "cosine":
            bias_C = torch.zeros(len(train_CF), device=device)
        else:  # d^2 = |v|^2 + |t|^2 - 2 v.t, where |v|^2 is the same along a row
            bias_C = train_CF.square().sum(dim=1).mul_(-0.5)
        for at in mine:
            score_BC = torch.addmm(bias_C, val_MF[at : at + val_chunk], train_CF.T)
            found_Bk = _keys(score_BC, index_C).topk(min(k, len(train_CF)), dim=1).values
            both = torch.cat((best_Mk[at : at + val_chunk], found_Bk), dim=1)
            best_Mk[at : at + val_chunk] = both.topk(k, dim=1).values
    return _LOW_BITS - (best_Mk & _LOW_BITS)


def _vote(
    train: Features,
    val_MF: Tensor,
    neighbour_Mk: Tensor,
    metric: KnnMetric,
    temperature: float,
    num_classes: int,
    val_chunk: int,
) -> Tensor:
    """Returns the guesses [M, 5] that the neighbours of each validation row vote for."""
    k, device = neighbour_Mk.shape[1], val_MF.device
    rows = max(1, min(val_chunk, _MAX_ELEMENTS // (k * val_MF.shape[1]), _MAX_ELEMENTS // num_classes))
    guesses = []
    for begin in range(0, len(val_MF), rows):
        neighbour_Bk = neighbour_Mk[begin : begin + rows]
        near_BkF = train.h_NF[neighbour_Bk.to(train.h_NF.device)].to(device)
        weight_Bk = _weights(val_MF[begin : begin + rows], near_BkF, metric, temperature)
        label_Bk = train.label_N[neighbour_Bk.to(train.label_N.device)].to(device)
        guesses.append(_guesses(weight_Bk, label_Bk, num_classes))
    return torch.cat(guesses)


_LOW_BITS = (1 << 32) - 1


def _keys(score_BC: Tensor, index_C: Tensor) -> Tensor:
    """Returns score and index as one int64, which sorts by falling score and then by rising index.

    All keys differ. This makes topk deterministic, which may return any of several equal values.
    """
    bits = score_BC.add_(0.0).view(torch.int32)  # adding turns -0.0 into 0.0
    bits.bitwise_xor_((bits >> 31) & 0x7FFFFFFF)  # the order of floats becomes that of integers
    return bits.long().bitwise_left_shift_(32).bitwise_or_(_LOW_BITS - index_C)


def _weights(val_BF: Tensor, near_BkF: Tensor, metric: KnnMetric, temperature: float) -> Tensor:
    """Returns the weights of the neighbours, computed from the differences.

    The matrix product of `_nearest` loses precision by cancellation, which would show in 1 / d.
    """
    if metric == "euclidean":
        return 1 / ((val_BF[:, None] - near_BkF).square().sum(dim=2).sqrt() + 1e-5)
    similarity_Bk = (val_BF[:, None] * F.normalize(near_BkF, dim=2)).sum(dim=2)
    # Relative to the nearest row, which does not change the vote and cannot overflow.
    return ((similarity_Bk - similarity_Bk.amax(dim=1, keepdim=True)) / temperature).exp()


def _guesses(weight_Bk: Tensor, label_Bk: Tensor, num_classes: int) -> Tensor:
    """Returns the five classes [B, 5] with the largest weights, and -1 if fewer got a vote."""
    votes_BC = weight_Bk.new_zeros(len(weight_Bk), num_classes)
    for j in range(weight_Bk.shape[1]):  # one neighbour at a time, because a scatter of all adds in no fixed order
        label_B1 = label_Bk[:, j : j + 1]
        votes_BC.scatter_(1, label_B1, votes_BC.gather(1, label_B1) + weight_Bk[:, j : j + 1])
    votes_BC, class_BC = votes_BC.sort(dim=1, descending=True, stable=True)
    guess_B5 = class_BC[:, :5].masked_fill(votes_BC[:, :5] == 0, -1)
    return F.pad(guess_B5, (0, 5 - guess_B5.shape[1]), value=-1)


# ---- As a probe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnnSettings:
    """The settings of k-NN."""

    k: int = 20
    metric: KnnMetric = "cosine"
    temperature: float = 0.07  # used by the cosine metric only


def guess(train: Features, val: Features, settings: KnnSettings, bench: Bench) -> Tensor:
    """Returns the guesses [M, 5] for the validation rows."""
    num_classes = len(bench.data.manifest.classes)
    return knn(train, val, num_classes=num_classes, device=bench.device, **asdict(settings)).guess_M5


def guess_on_all_ranks(
    train: Features | None, val: Features, settings: KnnSettings, bench: Bench, *, val_chunk: int = _VAL_CHUNK
) -> Tensor | None:
    """Returns what `guess` returns, with the search divided among the ranks by chunks of validation rows.

    All ranks call this with the same validation rows. One of them has the training rows and gets the guesses; the
    others pass None and get None. The training rows travel in chunks, so that no rank needs a second copy of them.
    """
    world, metric = bench.world, settings.metric
    num_train = world.agree(len(train) if train is not None else 0)
    val_MF = _prepared(val.h_NF.to(bench.device), metric)

    def chunks() -> Iterator[Tensor]:
        for begin in range(0, num_train, _TRAIN_CHUNK):
            if train is None:
                part_CF = val_MF.new_zeros(min(_TRAIN_CHUNK, num_train - begin), val_MF.shape[1])
            else:
                part_CF = train.h_NF[begin : begin + _TRAIN_CHUNK].to(bench.device, copy=True)
            yield world.add_over_ranks_(part_CF)

    with torch.no_grad(), full_float32():
        k = min(settings.k, num_train)
        found_Mk = _nearest(chunks(), val_MF, k, metric, val_chunk, lambda n: n % world.size == world.rank)
        neighbour_Mk = world.add_over_ranks_(found_Mk)
        if train is None:
            return None
        num_classes = len(bench.data.manifest.classes)
        return _vote(train, val_MF, neighbour_Mk, metric, settings.temperature, num_classes, val_chunk).to(
            val.h_NF.device
        )
