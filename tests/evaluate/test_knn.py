"""Features, k nearest neighbours against plain loops, and the linear head against autograd."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcssl.evaluate.features import Features, embed, features, finite, full_float32, top1
from fastcssl.evaluate.probes.cached import fit_linear
from fastcssl.evaluate.probes.knn import KnnMetric, _keys, knn

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
METRICS: tuple[KnnMetric, ...] = ("cosine", "euclidean")


def rows(h_NF: Tensor, label_N: Tensor) -> Features:
    return Features(h_NF=h_NF.float(), label_N=label_N, id_N=torch.arange(len(h_NF)))


def drawn(num_rows: int, num_features: int, num_classes: int, seed: int, *, whole: bool = False) -> Features:
    """Features that cluster by class; `whole`: few different ones, whose products and norms are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    label_N = torch.randint(num_classes, (num_rows,), generator=generator)
    if whole:
        sign = torch.randint(2, (num_rows, 4), generator=generator) * 2 - 1
        return rows(sign * 2.0 ** torch.randint(3, (num_rows, 1), generator=generator), label_N)
    centre_CF = torch.randn(num_classes, num_features, generator=torch.Generator().manual_seed(1))
    return rows(centre_CF[label_N] + 1.5 * torch.randn(num_rows, num_features, generator=generator), label_N)


def by_loops(
    train: Features, val: Features, *, k: int, metric: KnnMetric, num_classes: int, temperature: float = 0.07
) -> tuple[list[int], float, float]:
    """Predictions, top-1 and top-5, in float64 and with nothing but loops and sorted()."""
    predictions, hits1, hits5 = [], 0, 0
    train_NF, val_MF = (part.h_NF.double().numpy() for part in (train, val))
    for v, label in zip(val_MF, val.label_N.tolist(), strict=True):
        near = []
        for index, t in enumerate(train_NF):
            if metric == "cosine":
                s = float(v @ t) / (math.sqrt(float(v @ v)) * math.sqrt(float(t @ t)))
                near.append((-s, index, math.exp(s / temperature)))
            else:
                d = math.sqrt(float(np.sum((v - t) ** 2)))
                near.append((d, index, 1 / (d + 1e-5)))
        votes: dict[int, float] = {}
        for _, index, weight in sorted(near)[:k]:
            of = int(train.label_N[index])
            votes[of] = votes.get(of, 0.0) + weight
        guesses = sorted(votes, key=lambda c: (-votes[c], c))[:5]
        assert max(guesses) < num_classes
        predictions.append(guesses[0])
        hits1 += guesses[0] == label
        hits5 += label in guesses
    return predictions, hits1 / len(val), hits5 / len(val)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_agrees_with_plain_loops(metric: KnnMetric, k: int) -> None:
    train, val = drawn(150, 12, 9, 0), drawn(40, 12, 9, 2)
    predictions, top1, top5 = by_loops(train, val, k=k, metric=metric, num_classes=9)
    found = knn(train, val, k=k, metric=metric, num_classes=9)
    assert found.predictions.tolist() == predictions
    assert (found.top1, found.top5) == (top1, top5)
    assert 0.2 < top1 < top5 or k == 1  # a problem neither trivial nor hopeless


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("train_chunk", "val_chunk"), [(1, 64), (3, 9), (7, 64), (64, 64), (1000, 1)])
def test_ties_go_to_the_lower_index_in_every_chunking(metric: KnnMetric, train_chunk: int, val_chunk: int) -> None:
    train, val = drawn(60, 4, 6, 3, whole=True), drawn(25, 4, 6, 4, whole=True)
    for k in (1, 4, 11):
        predictions, top1, top5 = by_loops(train, val, k=k, metric=metric, num_classes=6)
        chunks = {"train_chunk": train_chunk, "val_chunk": val_chunk}
        found = knn(train, val, k=k, metric=metric, num_classes=6, **chunks)
        assert found.predictions.tolist() == predictions
        assert (found.top1, found.top5) == (top1, top5)


def test_of_twins_the_first_decides() -> None:
    label_N = torch.tensor([3, 0, 0, 1, 2, 2])
    train, val = rows(torch.ones(6, 4), label_N), rows(torch.ones(1, 4), torch.tensor([0]))
    assert [int(knn(train, val, k=k, num_classes=4).predictions) for k in (1, 2, 3, 6)] == [3, 0, 0, 0]
    backwards = rows(train.h_NF, label_N.flip(0))
    assert int(knn(backwards, val, k=2, num_classes=4).predictions) == 2


@pytest.mark.parametrize("metric", METRICS)
def test_more_neighbours_than_there_are(metric: KnnMetric) -> None:
    train, val = drawn(7, 12, 4, 5), drawn(9, 12, 4, 6)
    predictions, top1, _ = by_loops(train, val, k=7, metric=metric, num_classes=4)
    for chunk in (2, 100):
        found = knn(train, val, k=50, metric=metric, num_classes=4, train_chunk=chunk)
        assert found.predictions.tolist() == predictions and found.top1 == top1


def test_keys_sort_as_scores_then_indices() -> None:
    score_C = torch.tensor([-0.0, 0.0, -1.5, 1e-40, 3.0, -math.inf, 3.0, -1e-40, math.inf, 2.9999998])
    key_C = _keys(score_C[None].clone(), torch.arange(10))[0]
    wanted = sorted(range(10), key=lambda i: (-float(score_C[i]), i))
    assert key_C.argsort(descending=True).tolist() == wanted
    assert len(key_C.unique()) == 10


def test_small_distances_survive_large_features() -> None:
    """0.04 from one row and 2.8 from 29 others, whose weights add up to less. In float32, |a|^2 + |b|^2 - 2ab of such
    features is wrong by about 0.06, and the square of the small distance is 0.0016."""
    generator = torch.Generator().manual_seed(0)
    h_NF = 100 + 0.25 * torch.randn(30, 64, generator=generator)
    near_NF = h_NF + 0.005 * torch.randn(30, 64, generator=generator)
    for number in range(10):
        train = rows(h_NF, (torch.arange(30) == number).long())
        val = rows(near_NF[number : number + 1], torch.tensor([1]))
        assert knn(train, val, k=30, metric="euclidean", num_classes=2).top1 == 1, number


def test_a_class_without_a_vote_is_no_guess() -> None:
    train = rows(torch.eye(3), torch.tensor([7, 8, 9]))
    val = rows(torch.eye(3), torch.tensor([0, 8, 9]))
    found = knn(train, val, k=1, num_classes=10)
    assert found.predictions.tolist() == [7, 8, 9]
    assert found.top1 == found.top5 == 2 / 3  # label 0 has no vote, although it would be next in a sort


def test_the_temperature_weighs() -> None:
    near, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.3], [1.0, -0.3]])
    train = rows(torch.cat((near, far)), torch.tensor([0, 1, 1]))
    val = rows(near, torch.tensor([0]))
    assert int(knn(train, val, k=3, num_classes=2, temperature=0.01).predictions) == 0
    assert int(knn(train, val, k=3, num_classes=2, temperature=10.0).predictions) == 1


def test_matrix_products_are_in_full_float32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(ZeroDivisionError), full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_bad_requests() -> None:
    some = drawn(5, 3, 4, 0)
    none = some[torch.zeros(5, dtype=torch.bool)]
    broken = rows(torch.tensor([[1.0, math.nan, 0.0]]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"'cosin' is not a metric.*cosine or euclidean"):
        knn(some, some, num_classes=4, metric="cosin")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="k >= 1"):
        knn(some, some, num_classes=4, k=0)
    with pytest.raises(ValueError, match="no val features"):
        knn(some, none, num_classes=4)
    with pytest.raises(ValueError, match="train features are not finite"):
        knn(broken, some, num_classes=4)
    with pytest.raises(ValueError, match="outside the 1 classes"):
        knn(some, some, num_classes=1)


# ---- Features


def small_encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def fake_stream(*batches: tuple[list[int], int], num_samples: int, length: int = 1) -> Any:
    """Batches of (ids, views); the image of sample i is full of i, its label is i + 100."""
    made = []
    for ids, num_views in batches:
        id_N = torch.tensor(ids)
        images = id_N.float()[:, None, None, None].expand(-1, 3, 8, 8)
        made.append(SimpleNamespace(views=(images,) * num_views, label=id_N + 100, id=id_N, valid=id_N >= 0))

    class Fake:
        def __init__(self) -> None:
            self.num_samples = num_samples

        def __len__(self) -> int:
            return length

        def epoch(self, _: int) -> Any:
            return iter(made)

    return Fake()


MEAN = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_features_restore_flags_and_leave_statistics() -> None:
    encoder = small_encoder()
    encoder[1].eval()  # as a frozen layer would be
    flags, before = [m.training for m in encoder.modules()], state_of(encoder)
    stream = fake_stream(([3, 1, -1], 1), num_samples=2)
    found = features(encoder, stream, device=CPU)
    assert found.id_N.tolist() == [1, 3] and not found.h_NF.requires_grad
    assert [m.training for m in encoder.modules()] == flags and not all(flags)
    after = state_of(encoder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(ValueError, match="one view per image, but the batch has 2"):
        features(encoder, fake_stream(([3, 1], 2), num_samples=2), device=CPU)
    assert [m.training for m in encoder.modules()] == flags  # also after a failure


def test_a_replacement_counts_once() -> None:
    """The stream gives a replacement for what cannot be decoded, and the same sample again in its own place."""
    found = features(MEAN, fake_stream(([0, 4, 2], 1), ([3, 4, -1], 1), num_samples=5), device=CPU)
    assert found.id_N.tolist() == [0, 2, 3, 4] and found.h_NF[:, 0].tolist() == [0.0, 2.0, 3.0, 4.0]
    assert found.label_N.tolist() == [100, 102, 103, 104]


def test_features_under_autocast_and_from_short_views() -> None:
    stream = fake_stream(([0, 1, 2], 1), num_samples=3)
    plain = features(small_encoder(), stream, device=CPU)
    short = features(small_encoder(), stream, device=CPU, amp_dtype=torch.bfloat16)
    assert short.h_NF.dtype == torch.float32 and not torch.equal(plain.h_NF, short.h_NF)
    torch.testing.assert_close(plain.h_NF, short.h_NF, rtol=0.05, atol=0.05)
    view = torch.ones(1, 3, 8, 8, dtype=torch.bfloat16)
    assert embed(small_encoder(), (view,), device=CPU, amp_dtype=None).dtype == torch.float32


def test_overflow_is_zeroed_and_counted() -> None:
    h_NF = torch.tensor([[1.0, 2.0], [math.inf, 0.0], [0.0, math.nan]])
    found, num_bad = finite(Features(h_NF=h_NF, label_N=torch.arange(3), id_N=torch.arange(3)))
    assert num_bad == 2 and found.h_NF.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert math.isinf(h_NF[1, 0])


# ---- The linear head


def clusters(num_rows: int, *, spread: float, seed: int = 0) -> Features:
    """Five classes around the corners of a simplex, then stretched and shifted, and one feature that says nothing."""
    generator = torch.Generator().manual_seed(seed)
    label_N = torch.randint(5, (num_rows,), generator=generator)
    h_NF = torch.eye(5)[label_N] + spread * torch.randn(num_rows, 5, generator=generator)
    h_NF = torch.cat((h_NF * 10.0 ** torch.arange(-2, 3) + 50, torch.full((num_rows, 1), 7.0)), dim=1)
    return Features(h_NF=h_NF, label_N=label_N * 3, id_N=torch.arange(num_rows))  # labels with gaps


def test_the_head_separates_what_is_separable_and_repeats_itself() -> None:
    train, val = clusters(200, spread=0.1), clusters(100, spread=0.1, seed=1)
    head, again = fit_linear(train), fit_linear(train)
    assert top1(head.predict(val), val) == 1.0
    assert torch.equal(head.weight_CF, again.weight_CF) and torch.equal(head.bias_C, again.bias_C)
    assert head.label_C.tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("strength", [1.0, 0.1])
def test_the_head_is_the_optimum_of_the_penalised_likelihood(strength: float) -> None:
    """By autograd in float64, on features standardised another way."""
    train = clusters(300, spread=0.8)
    head = fit_linear(train, strength=strength)
    h_NF = train.h_NF.double()
    std_F, mean_F = torch.std_mean(h_NF, dim=0, correction=0)
    std_F[5] = 1  # the constant one
    weight_CF = (head.weight_CF.double() * std_F).requires_grad_()
    bias_C = (head.bias_C.double() + head.weight_CF.double() @ mean_F).requires_grad_()
    logits_NC = ((h_NF - mean_F) / std_F) @ weight_CF.T + bias_C
    loss = F.cross_entropy(logits_NC, train.label_N // 3) + weight_CF.square().sum() / (2 * strength * len(train))
    loss.backward()
    assert weight_CF.grad is not None and bias_C.grad is not None
    assert weight_CF.grad.abs().max() < 1e-4 and bias_C.grad.abs().max() < 1e-4
    assert 0.1 < loss.item() == pytest.approx(head.loss, rel=1e-4)
    assert 0.5 < top1(head.predict(train), train) < 1.0
