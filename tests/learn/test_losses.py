"""Each loss, value and gradient, against its formula written another way in float64; on one rank and on several."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fastcssl import ops
from fastcssl.distributed.world import World
from fastcssl.learn import losses

Loss = Callable[[Tensor, Tensor, Any], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Ranks:
    """Ranks as threads that share one graph of autograd, so that what their exchanges should give is plain to see."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def mean_loss(self, loss: Callable[[Any, Tensor], Tensor], num_total: int) -> Tensor:
        """The mean over ranks of loss(world, its rows)."""
        rows = torch.arange(num_total).chunk(self.size)
        with ThreadPoolExecutor(self.size) as pool:
            parts = list(pool.map(lambda rank: loss(Rank(rank, self), rows[rank]), range(self.size)))
        return torch.stack(parts).mean()

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class Rank:
    """What losses ask of a World."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.ranks, self.count = rank, ranks, ranks.size

    def gather(self, x_N: Tensor) -> Tensor:
        return torch.cat(self.ranks.exchange(self.rank, x_N))

    def total(self, x: Tensor) -> Tensor:
        return torch.stack(self.ranks.exchange(self.rank, x)).sum(dim=0)

    def first_row(self, num_local: int) -> int:
        return self.rank * num_local


# The formulas, on a whole batch.


def cosine_formula(a: Tensor, b: Tensor) -> Tensor:
    dots = [torch.dot(x, y) / (torch.dot(x, x) * torch.dot(y, y)).sqrt() for x, y in zip(a, b, strict=True)]
    return torch.stack(dots).mean()


def contrast_formula(p: Tensor, f: Tensor, temperature: float) -> Tensor:
    logits = (p / p.norm(dim=1, keepdim=True)) @ (f / f.norm(dim=1, keepdim=True)).T / temperature
    target = torch.arange(len(p))
    return 0.5 * (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target))


def barlow_formula(z1: Tensor, z2: Tensor, weight: float = 5e-3, scale: float = 0.1, num_parts: int = 1) -> Tensor:
    """Standardised in parts by torch's BatchNorm, then one correlation after the other."""
    standardise = torch.nn.BatchNorm1d(z1.shape[1], affine=False).double()
    u1, u2 = (torch.cat([standardise(part) for part in z.chunk(num_parts)]) for z in (z1, z2))
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(z1.shape[1]):
        for j in range(z1.shape[1]):
            c = torch.dot(u1[:, i], u2[:, j]) / len(z1)
            loss = loss + ((1 - c) ** 2 if i == j else weight * c**2)
    return scale * loss


def vicreg_formula(z1: Tensor, z2: Tensor, s: float = 25, v: float = 25, c: float = 1) -> Tensor:
    loss = s * functional.mse_loss(z1, z2)
    for z in (z1, z2):
        cov = torch.cov(z.T).reshape(z.shape[1], z.shape[1])
        off = [cov[i, j] ** 2 for i in range(len(cov)) for j in range(len(cov)) if i != j]
        loss = loss + v * functional.relu(1 - (z.var(dim=0, unbiased=True) + 1e-4).sqrt()).mean()
        loss = loss + c * sum(off, torch.zeros(())) / z.shape[1]
    return loss


PAIRS: dict[str, tuple[Loss, Callable[[Tensor, Tensor], Tensor]]] = {
    "cosine": (lambda a, b, _: losses.cosine(a, b), cosine_formula),
    "cosine_distance": (lambda a, b, _: losses.cosine_distance(a, b), lambda a, b: 2 - 2 * cosine_formula(a, b)),
    "mean_squared": (
        lambda a, b, _: losses.mean_squared(a, b),
        lambda a, b: sum((x - y) ** 2 for x, y in zip(a.flatten(), b.flatten(), strict=True)) / a.numel(),
    ),
    "symmetric_contrast": (
        lambda a, b, world: losses.symmetric_contrast(a, b, 0.3, world),
        lambda a, b: contrast_formula(a, b, 0.3),
    ),
    "barlow": (losses.barlow, barlow_formula),
    "barlow, other weights": (
        lambda a, b, world: losses.barlow(a, b, world, off_diagonal_weight=0.5, scale=0.025, gradient="reference"),
        lambda a, b: barlow_formula(a, b, 0.5, 0.025),
    ),
    "vicreg": (losses.vicreg, vicreg_formula),
    "vicreg, other weights": (
        lambda a, b, world: losses.vicreg(a, b, world, similarity=2, variance=3, covariance=5),
        lambda a, b: vicreg_formula(a, b, 2, 3, 5),
    ),
}
# On one rank `reference` is exact; on several it is meant not to be.
ACROSS_RANKS = [name for name in PAIRS if name != "barlow, other weights"]


def embeddings(num: int, dim: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two views: alike, neither centred nor of one length."""
    common = normal(num, dim, seed=1)
    return tuple(scale * (common + 0.5 * normal(num, dim, seed=seed) + normal(dim, seed=4)) for seed in (2, 3))  # type: ignore[return-value]


def with_gradients(loss: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    assert value.dim() == 0
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], atol: float = 1e-11, rtol: float = 1e-8) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("num", "dim", "scale"), [(7, 5, 1.0), (2, 1, 1.0), (4, 6, 1e-3), (12, 3, 20.0)])
def test_loss_is_its_formula(name: str, num: int, dim: int, scale: float) -> None:
    loss, formula = PAIRS[name]
    views = embeddings(num, dim, scale)
    assert_same(with_gradients(lambda a, b: loss(a, b, World()), *views), with_gradients(formula, *views))
    leaves = [x.requires_grad_() for x in views]
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, World()), leaves, eps=1e-6 * scale, atol=1e-4 / scale)


@pytest.mark.parametrize("name", ACROSS_RANKS)
def test_ranks_together_are_one_large_batch(name: str) -> None:
    """The mean of their losses, and its gradient. A scope of one rank looks at its own rows alone."""
    loss, formula = PAIRS[name]
    views = embeddings(12, 4)

    def on_ranks(a: Tensor, b: Tensor) -> Tensor:
        return Ranks(3).mean_loss(lambda world, rows: loss(a[rows], b[rows], world), 12)

    assert_same(with_gradients(on_ranks, *views), with_gradients(formula, *views))
    alone = loss(views[0][:4], views[1][:4], World(rank=1, size=3, scope="local"))
    assert_same([alone], [formula(views[0][:4], views[1][:4])])


def test_barlow_reference_is_the_released_gradient() -> None:
    """Parts standardised alone; the value is that of the mean C, the gradient a third of what it should be."""
    views = embeddings(12, 4)

    def on_ranks(a: Tensor, b: Tensor) -> Tensor:
        ranks = Ranks(3)
        return ranks.mean_loss(lambda world, r: losses.barlow(a[r], b[r], world, gradient="reference"), 12)

    ours = with_gradients(on_ranks, *views)
    value, *gradients = with_gradients(lambda a, b: barlow_formula(a, b, num_parts=3), *views)
    assert_same(ours, [value, *(gradient / 3 for gradient in gradients)])


# Rows that methods build: SimCLR's and SupCon's.


def own_rows(num_rows: int, first: int = 0) -> Tensor:
    return first + torch.arange(num_rows)


def nt_xent_formula(z: Tensor, temperature: float) -> Tensor:
    """Chen et al., equation 1, for rows [view 1; view 2]."""
    u = z / z.norm(dim=1, keepdim=True)
    similar, num = (u @ u.T / temperature).exp(), len(z)
    terms = []
    for i in range(num):
        others = sum(similar[i, k] for k in range(num) if k != i)
        terms.append(-torch.log(similar[i, (i + num // 2) % num] / others))
    return torch.stack(terms).mean()


def supcon_formula(z: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Khosla et al., equation 2: the mean over positives is outside of the logarithm."""
    u = z / z.norm(dim=1, keepdim=True)
    similar, num = (u @ u.T / temperature).exp(), len(z)
    terms = []
    for i in range(num):
        others = sum(similar[i, k] for k in range(num) if k != i)
        positives = [j for j in range(num) if j != i and label[j] == label[i]]
        terms.append(-sum(torch.log(similar[i, j] / others) for j in positives) / len(positives))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("impl", ["torch", "chunked"])
def test_nt_xent_by_info_nce(impl: Any) -> None:
    z = normal(10, 6)
    expected = with_gradients(lambda z: nt_xent_formula(z, 0.4), z)

    def ours(z: Tensor) -> Tensor:
        u = functional.normalize(z, dim=1)
        keys = u.detach() if impl == "chunked" else u
        options = {"own_M": own_rows(10), "positive_in_denominator": False, "impl": impl}
        return ops.info_nce(u, u.roll(5, dims=0), [keys], 0.4, **options).mean()

    result = with_gradients(ours, z)
    assert_same(result if impl == "torch" else result[:1], expected if impl == "torch" else expected[:1])


def supcon(z: Tensor, label: Tensor, world: Any) -> Tensor:
    u = functional.normalize(z, dim=1)
    u_G, own = world.gather(u), own_rows(len(z), world.first_row(len(z)))
    positive = losses.label_positive(label, u_G, world.gather(label), own)
    return ops.info_nce(u, positive, [u_G], 0.4, own_M=own, positive_in_denominator=False).mean()


def test_supcon_by_label_positive() -> None:
    z, label = normal(12, 5), torch.tensor([0, 1, 0, 2, 2, 1] * 2)
    expected = with_gradients(lambda z: supcon_formula(z, label, 0.4), z)
    assert_same(with_gradients(lambda z: supcon(z, label, World()), z), expected)
    on_ranks = with_gradients(lambda z: Ranks(2).mean_loss(lambda w, r: supcon(z[r], label[r], w), 12), z)
    assert_same(on_ranks, expected)


def test_supcon_without_shared_labels_is_nt_xent() -> None:
    z, label = normal(8, 5), torch.arange(4).repeat(2)
    assert_same(
        with_gradients(lambda z: supcon(z, label, World()), z), with_gradients(lambda z: nt_xent_formula(z, 0.4), z)
    )


def test_label_positive_leaves_out_the_row_itself() -> None:
    z = torch.tensor([[1.0, 0], [0, 1], [3, 0], [0, 5]])
    label = torch.tensor([0, 1, 0, 0])
    positive = losses.label_positive(label, z, label, own_rows(4))
    assert torch.equal(positive, torch.tensor([[1.5, 2.5], [0, 0], [0.5, 2.5], [2, 0]]))
    assert torch.equal(losses.label_positive(label[2:], z, label, own_rows(2, 2)), positive[2:])


@pytest.mark.parametrize("positive_in_denominator", [True, False])
def test_with_negative_adds_a_logit(positive_in_denominator: bool) -> None:
    inputs = normal(4, 5, seed=1), normal(4, 5, seed=2), normal(4, 5, seed=3)
    bank = normal(7, 5, seed=4)

    def ours(query: Tensor, positive: Tensor, extra: Tensor) -> Tensor:
        loss = ops.info_nce(query, positive, [bank], 0.5, positive_in_denominator=positive_in_denominator)
        logits = ((query * x).sum(dim=1) / 0.5 for x in (positive, extra))
        return losses.with_negative(loss, *logits).sum()

    def formula(query: Tensor, positive: Tensor, extra: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for q, p, e in zip(query, positive, extra, strict=True):
            keys = [*bank, e, p] if positive_in_denominator else [*bank, e]
            total = total - (q @ p / 0.5) + torch.stack([(q @ k / 0.5).exp() for k in keys]).sum().log()
        return total

    assert_same(with_gradients(ours, *inputs), with_gradients(formula, *inputs))


# What holds whatever the numbers are.


@pytest.mark.parametrize("name", PAIRS)
def test_order_of_samples_does_not_matter(name: str) -> None:
    loss, _ = PAIRS[name]
    a, b = embeddings(9, 4)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert_same([loss(a[order], b[order], World())], [loss(a, b, World())])
    assert not torch.allclose(loss(a[order], b, World()), loss(a, b, World()))


def test_barlow_forgets_scale_and_shift() -> None:
    a, b = embeddings(16, 5)
    scale, shift = torch.tensor([2.0, 0.5, 3, 1, 7]), torch.tensor([0.0, -4, 9, 100, 1])
    plain = losses.barlow(a, b, World())
    # Not to the last digit: the variance has an epsilon beside it.
    torch.testing.assert_close(losses.barlow(a * scale + shift, b * 3, World()), plain, atol=0, rtol=1e-4)
    assert losses.barlow(-a, b, World()) > plain
    assert_same([losses.barlow(-a, -b, World())], [plain])


def test_losses_at_their_optimum() -> None:
    square = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()  # columns centred, orthogonal
    assert losses.barlow(square, square, World()) < 1e-9
    assert losses.vicreg(square, square, World()) == 0  # every std is above 1
    assert losses.vicreg(square, square + torch.tensor([0, 0, 3.0]), World()) == pytest.approx(25 * 3.0)
    assert losses.cosine_distance(square, 5 * square) == pytest.approx(0, abs=1e-12)
    assert losses.cosine_distance(square, -square) == pytest.approx(4)
    assert losses.symmetric_contrast(square, square, 1e-3, World()) == pytest.approx(0, abs=1e-12)
    collapsed = torch.ones(4, 3).double()
    assert losses.symmetric_contrast(collapsed, collapsed, 0.2, World()) == pytest.approx(math.log(4))
    assert losses.vicreg(collapsed, collapsed, World()) == pytest.approx(25 * 2 * (1 - 0.01))


# Types and faults.


@pytest.mark.parametrize("name", PAIRS)
def test_autocast_changes_nothing(name: str) -> None:
    loss, _ = PAIRS[name]
    views = [x.bfloat16() for x in embeddings(16, 8)]
    plain = with_gradients(lambda a, b: loss(a.float(), b.float(), World()), *views)
    leaves = [x.requires_grad_() for x in views]
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(*leaves, World())
    assert value.dtype == torch.float32
    assert_same([value.detach(), *torch.autograd.grad(value, leaves)], plain, atol=0, rtol=0)


def test_label_positive_under_autocast() -> None:
    z, label = normal(6, 8).float(), torch.tensor([0, 1, 0, 1, 0, 0])
    plain = losses.label_positive(label, z, label, own_rows(6))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(losses.label_positive(label, z, label, own_rows(6)), plain)


@pytest.mark.parametrize("name", PAIRS)
def test_shapes_that_differ_are_refused(name: str) -> None:
    loss, _ = PAIRS[name]
    for other in (normal(1, 4), normal(6, 1), normal(6, 4, 1)):
        with pytest.raises(ValueError, match=r"\[N, D\] of one shape, but are \[6, 4\] and "):
            loss(normal(6, 4), other, World())


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="gradient is 'right'; use 'exact' or 'reference'"):
        losses.barlow(normal(4, 2), normal(4, 2), World(), gradient="right")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 samples, but the batch has 1"):
        losses.vicreg(normal(1, 2), normal(1, 2), World())
