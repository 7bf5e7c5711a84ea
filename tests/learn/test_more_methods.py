"""Barlow Twins, VICReg, SupCon and the strategies beside CaSSLe and PNR, against their formulas written another way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import BATCH, Lab, batches, followed
from processes import run
from small_runs import prepared
from test_losses import assert_same, barlow_formula, contrast_formula, cosine_formula, normal, vicreg_formula
from torch import Tensor
from torch.nn import functional

from fastcssl.data.draws import Reserved
from fastcssl.data.prepared import Selection
from fastcssl.distributed.world import World
from fastcssl.errors import UserError
from fastcssl.learn import methods, strategies
from fastcssl.learn.methods import Embeddings, Inputs

N, D = 6, 5
LABEL = torch.tensor([0, 1, 0, 2, 1, 0])


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("more") / "data")


@pytest.fixture
def lab(data: Path) -> Any:
    """Makes labs, and closes them."""
    torch.set_num_threads(1)
    made = []

    def make(method: str, strategy: str = "finetune", **settings: Any) -> Lab:
        made.append(Lab(method, strategy, data, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def embeddings() -> tuple[Tensor, ...]:
    """z1, z2, p1, p2, f1, f2: those of a sample are alike, and none is centred."""
    common = normal(N, D, seed=1)
    return tuple(common + 0.7 * normal(N, D, seed=seed) + normal(D, seed=9) for seed in range(2, 8))


def valued(function: Callable[..., Tensor]) -> list[Tensor]:
    """The value, and the gradient by each embedding, 0 for those that it does not look at."""
    leaves = [x.clone().requires_grad_() for x in embeddings()]
    value = function(*leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return [value.detach(), *(torch.zeros(N, D).double() if g is None else g for g in gradients)]


# ---- Formulas, term by term ------------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def supcon_formula(z1: Tensor, z2: Tensor, temperature: float = 0.1) -> Tensor:
    z, label = unit(torch.cat([z1, z2])), torch.cat([LABEL, LABEL])
    total = torch.zeros((), dtype=torch.float64)
    for i in range(2 * N):
        others = [j for j in range(2 * N) if j != i]
        below = sum(torch.exp(z[i] @ z[j] / temperature) for j in others)
        positives = [j for j in others if label[j] == label[i]]
        total = total - sum(torch.log(torch.exp(z[i] @ z[j] / temperature) / below) for j in positives) / len(positives)
    return total / (2 * N)


def supcon_pnr_formula(
    z1: Tensor, z2: Tensor, p1: Tensor, p2: Tensor, f1: Tensor, f2: Tensor, *, exclude: bool, pn1: bool, pn2: bool
) -> Tensor:
    """Section by section: L1 with label positives at 0.1, L2 of SimCLR at 0.2."""
    z, p, f = (unit(torch.cat(pair)) for pair in ((z1, z2), (p1, p2), (f1, f2)))
    label = torch.cat([LABEL, LABEL])
    total = torch.zeros((), dtype=torch.float64)
    for i in range(2 * N):
        others = [j for j in range(2 * N) if j != i]
        negatives = [j for j in others if not exclude or label[j] != label[i]]
        below = sum(torch.exp(z[i] @ z[j] / 0.1) for j in others)
        if pn1:
            below = below + sum(torch.exp(z[i] @ f[j] / 0.1) for j in negatives)
        positives = [j for j in others if label[j] == label[i]]
        l1 = -sum(z[i] @ z[j] / 0.1 for j in positives) / len(positives) + torch.log(below)
        below = sum(torch.exp(p[i] @ f[j] / 0.2) for j in negatives)
        if pn2:
            below = below + sum(torch.exp(p[i] @ z[j] / 0.2) for j in negatives)
        total = total + l1 - p[i] @ f[i] / 0.2 + torch.log(below)
    return total / (2 * N)


def mse(a: Tensor, b: Tensor) -> Tensor:
    return functional.mse_loss(a, b)


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "barlow": barlow_formula,
    "vicreg": vicreg_formula,
    "supcon": supcon_formula,
    "byol": lambda z1, z2: 4 - 2 * cosine_formula(z1, z2) - 2 * cosine_formula(z2, z1),
}
ALIGN: dict[str, Callable[..., Tensor]] = {
    "barlow": lambda p1, p2, f1, f2: (barlow_formula(p1, f1) + barlow_formula(p2, f2)) / 2,
    "vicreg": lambda p1, p2, f1, f2: 25 * (mse(p1, f1) + mse(p2, f2)) / 2,
    "supcon": lambda p1, p2, f1, f2: contrast_formula(torch.cat([p1, p2]), torch.cat([f1, f2]), 0.2),
    "byol": lambda p1, p2, f1, f2: 2 - cosine_formula(p1, f1) - cosine_formula(p2, f2),
}
# What is added to the loss, with the sign: PNR's last term, for a weight of 1.
REPELLED: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("barlow", "code"): lambda p1, p2, f1, f2: (cosine_formula(p1, f2) + cosine_formula(p2, f1)) / 2,
    ("barlow", "paper"): lambda p1, p2, f1, f2: (
        -((unit(p1) - unit(f2)).square().sum(1).mean() + (unit(p2) - unit(f1)).square().sum(1).mean()) / 2
    ),
    ("vicreg", "code"): lambda p1, p2, f1, f2: -(mse(p1, f2) + mse(p2, f1)) / 2,
    ("vicreg", "paper"): lambda p1, p2, f1, f2: -(mse(p1, f2) + mse(p2, f1)) / 2,
    ("byol", "code"): lambda p1, p2, f1, f2: -(2 - cosine_formula(p1, f2) - cosine_formula(p2, f1)),
    ("byol", "paper"): lambda p1, p2, f1, f2: (
        -((unit(p1) - unit(f2)).square().sum(1).mean() + (unit(p2) - unit(f1)).square().sum(1).mean()) / 2
    ),
}


def embedded(z1: Tensor, z2: Tensor) -> Embeddings:
    """BYOL's predictor and slow network stand for themselves."""
    return Embeddings(h=(z1, z2), z=(z1, z2), target=(z1, z2), prediction=(z1, z2), label=LABEL)


@pytest.mark.parametrize("method", ["barlow", "vicreg", "supcon"])
def test_own_loss_and_align(method: str, lab: Any) -> None:
    made = lab(method).method
    assert_same(valued(lambda z1, z2, *_: made.loss(embedded(z1, z2))), valued(lambda z1, z2, *_: OWN[method](z1, z2)))
    assert_same(
        valued(lambda _, __, p1, p2, f1, f2: made.align((p1, p2), (f1, f2))),
        valued(lambda _, __, *pf: ALIGN[method](*pf)),
    )


def pnr_total(lab: Lab) -> Callable[..., Tensor]:
    def total(z1: Tensor, z2: Tensor, p1: Tensor, p2: Tensor, f1: Tensor, f2: Tensor) -> Tensor:
        """What PNR trains when network, predictor and frozen network give these."""
        strategy, method = lab.strategy, lab.method
        strategy.predictions = lambda _: (p1, p2)  # type: ignore[method-assign,assignment]
        strategy.frozen_embeddings = lambda _: (f1, f2)  # type: ignore[method-assign,assignment]
        method.forward = lambda _: embedded(z1, z2)  # type: ignore[method-assign,assignment]
        return torch.stack(list(strategy.terms(method, next(lab.inputs)).values())).sum()

    return total


@pytest.mark.parametrize(("method", "form"), REPELLED)
@pytest.mark.parametrize("pn2", [True, False])
def test_pnr_without_negatives(method: str, form: str, pn2: bool, lab: Any) -> None:
    made = lab(method, "pnr", strategy_config={"form": form, "weight": 0.6, "align_weight": 1.3, "pn2": pn2})

    def formula(z1: Tensor, z2: Tensor, *pf: Tensor) -> Tensor:
        repelled = 0.6 * REPELLED[method, form](*pf) if pn2 else 0
        return OWN[method](z1, z2) + 1.3 * ALIGN[method](*pf) + repelled

    assert_same(valued(pnr_total(made)), valued(formula))


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("pn1", "pn2"), [(True, True), (False, True), (True, False)])
def test_pnr_with_labels(exclude: bool, pn1: bool, pn2: bool, lab: Any) -> None:
    options = {"exclude_same_label": exclude, "pn1": pn1, "pn2": pn2}
    made = lab("supcon", "pnr", strategy_config=options)
    formula = lambda *x: supcon_pnr_formula(*x, exclude=exclude, pn1=pn1, pn2=pn2)  # noqa: E731
    assert_same(valued(pnr_total(made)), valued(formula))


def test_a_batch_of_one_label_leaves_no_negatives(lab: Any) -> None:
    """L2 then has an empty denominator: no loss, no gradient, nothing that is not finite."""
    made = lab("supcon", "pnr", strategy_config={"exclude_same_label": True})
    inputs = next(batches())
    terms = made.backward(Inputs(views=inputs.views, label=torch.zeros_like(inputs.label), id=inputs.id))
    assert terms["stability"] == 0 and terms["plasticity"] > 0
    assert all(p.grad.isfinite().all() for p in made.method.parameters())


def test_labels_are_needed_to_exclude_them() -> None:
    config = strategies.find("pnr").Config(exclude_same_label=True)
    with pytest.raises(UserError, match="simclr does not use labels"):
        strategies.find("pnr").check(config, methods.find("simclr"))
    strategies.find("pnr").check(config, methods.find("supcon"))


def test_excluded_labels_and_barlows_options_on_ranks(data: Path) -> None:
    torch.set_num_threads(1)
    options = {"strategy_config": {"exclude_same_label": True}}
    alone = followed(World(), "supcon", "pnr", data, options, 0)
    for found in run(2, followed, "supcon", "pnr", data, options, 0):
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-8, atol=1e-11)
    options = {"method_config": {"gradient": "reference", "scale": 0.3}}
    alone = followed(World(), "barlow", "finetune", data, options, 0)
    for found in run(2, followed, "barlow", "finetune", data, options, 0):
        assert not torch.allclose(
            found["gradients"]["method.online.projector.6.weight"],
            alone["gradients"]["method.online.projector.6.weight"],
            rtol=0.1,
        )


# ---- Strategies ------------------------------------------------------------------------------------------------------


def terms_and_gradients(lab: Lab, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    terms = lab.backward(inputs)
    return terms, {name: p.grad.clone() for name, p in lab.method.online.named_parameters()}


def test_lessforget(lab: Any) -> None:
    made = lab("simclr", "lessforget", strategy_config={"weight": 0.7})
    made.train()
    inputs = next(made.inputs)
    frozen, encoder = made.strategy.frozen.module, made.method.online.encoder
    assert not torch.equal(frozen[0].weight, encoder[0].weight)
    plain = made.method.loss(made.method(inputs))
    away = [1 - cosine_formula(encoder(view), frozen(view).detach()) for view in inputs.views]
    expected = torch.autograd.grad(plain + 0.7 * sum(away) / 2, list(encoder.parameters()))
    terms, gradients = terms_and_gradients(made, inputs)
    torch.testing.assert_close(terms["features"], (0.7 * sum(away) / 2).detach())
    assert_same([gradients[f"encoder.{name}"] for name, _ in encoder.named_parameters()], expected)


def test_ewc_by_hand(lab: Any) -> None:
    made = lab("vicreg", "ewc", strategy_config={"weight": 0.3, "fisher_batches": 2})
    task, online = made.task(0), made.method.online
    # The Fisher of the task, with another's network in the same state.
    made.begin(1)
    weights = dict(online.named_parameters())
    squares = {name: torch.zeros_like(p) for name, p in weights.items()}
    seen = 0
    for batch in task.open(Selection(tasks=task.tasks)).epoch(Reserved.FISHER_EPOCH):
        made.step.zero_grad()
        made.method.loss(
            made.method(Inputs(views=tuple(v.double() for v in batch.views), label=batch.label, id=batch.id))
        ).backward()
        for name, p in weights.items():
            squares[name] += p.grad**2 / 2
        seen += 1
    assert seen == 2
    fisher = torch.cat([square.flatten() for square in squares.values()])
    assert_same([made.strategy.importance.fisher_P], [fisher], rtol=1e-10)
    anchor = {name: p.detach().clone() for name, p in weights.items()}
    for _ in range(2):
        made.train()
    inputs = next(made.inputs)
    scale = fisher.numel() / fisher.sum()
    penalty = sum((scale * squares[name] * (p - anchor[name]) ** 2).sum() for name, p in weights.items()) * 0.3 / 2
    plain = made.method.loss(made.method(inputs))
    expected = torch.autograd.grad(plain + penalty, list(weights.values()))
    terms, gradients = terms_and_gradients(made, inputs)
    torch.testing.assert_close(terms["penalty"], penalty.detach())
    assert_same(list(gradients.values()), expected)
    # A second task: Fishers add up, the anchor moves on.
    made.strategy.end_task(made.task(1), made.method)
    second = made.strategy.fisher(made.task(1), made.method)
    assert_same([made.strategy.importance.fisher_P], [fisher + second])
    now = torch.cat([p.detach().flatten() for p in weights.values()])
    assert torch.equal(made.strategy.importance.anchor_P, now)


@pytest.mark.parametrize("method", ["byol", "moco"])
def test_the_fisher_leaves_no_trace(method: str, lab: Any) -> None:
    made = lab(method, "ewc")
    torch.manual_seed(3)
    before, drawn = made.state(), torch.get_rng_state()
    gradients = [p.grad.clone() for p in made.method.parameters()]
    made.strategy.fisher(made.task(0), made.method)
    now = made.state()
    for whose in ("method", "method_copies"):
        for (name, mine), other in zip(before[whose].items(), now[whose].values(), strict=True):
            for key, value in mine.items() if isinstance(mine, dict) else [(name, mine)]:
                assert torch.equal(value, other[key] if isinstance(other, dict) else other), (name, key)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(p.grad, g) for p, g in zip(made.method.parameters(), gradients, strict=True))


def replayed(lab: Lab, number: int) -> Inputs:
    """Batch `number` of the second task's replay, from the loader itself."""
    ids = lab.strategy.replay.id_B.numpy()  # type: ignore[union-attr]
    stream = lab.loader.open(Selection(tasks=(0,), ids=ids, order="endless"))
    stream.load_state_dict(stream.state_dict() | {"epoch": Reserved.REPLAY_EPOCH + 1, "batch": number})
    batch = next(stream.epoch(Reserved.REPLAY_EPOCH + 1))
    return Inputs(views=tuple(v.double() for v in batch.views), label=batch.label.clone(), id=batch.id.clone())


def test_der(lab: Any) -> None:
    made = lab("simclr", "der", strategy_config={"alpha": 0.4, "budget": 10})
    stored = {int(i): z for i, z in zip(made.strategy.replay.id_B, made.strategy.replay.z_BD, strict=True)}
    assert len(stored) == 10 and all(z.abs().sum() > 0 for z in stored.values())
    made.train()
    inputs, again = next(made.inputs), replayed(made, 1)
    online = made.method.online
    plain = made.method.loss(made.method(inputs))
    z = online(again.views[0])[1]
    term = sum(0.4 * (row - stored[int(i)]).square().sum() for row, i in zip(z, again.id, strict=True)) / BATCH
    expected = torch.autograd.grad(plain + term, list(online.parameters()))
    terms, gradients = terms_and_gradients(made, inputs)
    torch.testing.assert_close(terms["replay"], term.detach())
    assert_same(list(gradients.values()), expected)


def test_what_der_stores_is_the_end_of_the_task_in_eval_mode(lab: Any) -> None:
    made = lab("byol", "der", strategy_config={"budget": 10})
    ids = made.strategy.replay.id_B
    stream = made.loader.open(Selection(tasks=(0,), ids=ids.numpy(), order="endless"))
    batch = next(stream.epoch(Reserved.STORE_EPOCH))
    made.method.eval()
    z = made.method.online(batch.views[0].double())[1].detach()
    rows = torch.searchsorted(ids, batch.id)
    torch.testing.assert_close(made.strategy.replay.z_BD[rows[:10]], z[:10])
    assert sorted(batch.id[:10].tolist()) == ids.tolist()


@pytest.mark.parametrize("method", ["simclr", "supcon"])
def test_lump(method: str, lab: Any) -> None:
    made = lab(method, "lump", strategy_config={"alpha": 0.7, "budget": 10})
    made.train()
    share = float(made.strategy._drawn(next(batches())))
    assert 0 < share < 1
    inputs, again = next(made.inputs), replayed(made, 1)
    views = tuple(share * x + (1 - share) * b for x, b in zip(inputs.views, again.views, strict=True))
    online, loss = made.method.online, made.method.loss
    z = tuple(online(view)[1] for view in views)
    expected = loss(Embeddings(h=z, z=z, label=inputs.label))
    if method == "supcon":
        other = loss(Embeddings(h=z, z=z, label=again.label))
        assert abs(other - expected) > 1e-3
        expected = share * expected + (1 - share) * other
    by_hand = torch.autograd.grad(expected, list(online.parameters()))
    terms, gradients = terms_and_gradients(made, inputs)
    torch.testing.assert_close(terms["loss"], expected.detach())
    assert_same(list(gradients.values()), by_hand)


def test_lumps_shares_are_beta_distributed(lab: Any) -> None:
    strategy = lab("simclr", "lump", strategy_config={"alpha": 0.4}).strategy
    like, shares = next(batches()), []
    for number in range(4000):
        strategy.replay.batch = number
        shares.append(float(strategy._drawn(like)))
    drawn = torch.tensor(shares)
    # Var[Beta(a, a)] = 1 / (4 (2 a + 1)); four standard errors.
    assert abs(drawn.mean() - 0.5) < 4 * math.sqrt(1 / (4 * 1.8) / 4000)
    assert abs(drawn.var() - 1 / (4 * 1.8)) < 0.01
    assert len(set(shares)) == len(shares)
