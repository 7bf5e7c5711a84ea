"""Every loss that is trained, value and gradient, against its published formula written out row by row in float64.

The formulas here share nothing with the package but the networks: from the weights and a batch, `Scene` makes its own
embeddings, and autograd goes from the formula's value to every weight.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prep_ok
from lab import BATCH, Lab
from torch import Tensor, nn

from fastcssl.distributed.batchnorm import synchronised
from fastcssl.distributed.world import World
from fastcssl.learn.methods import BankConfig
from fastcssl.learn.step import Step, optimise
from fastcssl.learn.strategies import Distilling

pytestmark = pytest.mark.usefixtures("one_thread")

BANK = 70  # of which the current model has filled 48 when it is measured, the frozen one 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperatures:
    own: float = 0.2
    align: float = 0.2  # CaSSLe's
    stability: float = 0.2  # of PNR's L2


USUAL = Temperatures()  # the defaults, which a bench leaves alone
UNEQUAL = Temperatures(own=0.3, align=0.45, stability=0.15)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("strategies") / "data"
    prep_ok("build", "synthetic:classes=20,train=4,val=2", "--scenario", "class", "--tasks", 2, "--out", out)
    return out


Benches = Callable[..., "Bench"]


@pytest.fixture
def bench(data: Path) -> Iterator[Benches]:
    with ExitStack() as stack:

        def make(method: str, strategy: str, **options: Any) -> Bench:
            made = Bench(method, strategy, data, **options)
            stack.callback(made.lab.close)
            return made

        yield make


class Bench:
    """A method under a strategy, one step into its second task, before a batch that is known."""

    def __init__(
        self, method: str, strategy: str, data: Path, t: Temperatures = USUAL, *, initial: Any = "empty", **own: Any
    ) -> None:
        settings: dict[str, Any] = {"bank": BankConfig(size=BANK, initial=initial)} if method == "moco" else {}
        if t is not USUAL and method != "byol":
            settings |= {"temperature": t.own, "align_temperature": t.align}
            own |= {"temperature": t.stability} if strategy == "pnr" else {}
        self.lab = Lab(method, strategy, data, method_config=settings, strategy_config=own)
        self.previous = copy.deepcopy(self.lab.method.online)  # the second task begins; nothing has moved yet
        self.previous.train(own.get("frozen") == "batch")
        self.lab.train()
        for bank in (*self.lab.method.banks, *self.lab.strategy.banks):
            bank.rows_KD[int(bank.filled) :] = torch.nan  # what was never written must not count
        self.inputs = next(self.lab.inputs)

    def expected(self, formula: "Formula", t: Temperatures = USUAL) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Terms, and the gradient of their sum with respect to every weight."""
        terms = formula(Scene(self), t)
        weights = self.lab.parameters()
        found = torch.autograd.grad(sum(terms.values()), list(weights.values()), allow_unused=True)
        gradients = (torch.zeros_like(p) if g is None else g for p, g in zip(weights.values(), found, strict=True))
        return {name: term.detach() for name, term in terms.items()}, dict(zip(weights, gradients, strict=True))


class Scene:
    """The embeddings of a bench's batch, a pair of views each, and what its banks hold."""

    def __init__(self, bench: Bench) -> None:
        method, strategy, views = bench.lab.method, bench.lab.strategy, bench.inputs.views
        is_unit = method.name == "moco"  # whose embeddings are of unit length by definition

        def embedded(network: Any) -> tuple[Tensor, Tensor]:
            first, second = (network.projector(network.encoder(view)) for view in views)
            return (unit(first), unit(second)) if is_unit else (first, second)

        self.z = embedded(method.online)
        with torch.no_grad():
            self.f = embedded(bench.previous)
            if hasattr(method, "slow"):
                self.k = embedded(method.slow.module)
        if isinstance(strategy, Distilling) and strategy.g is not None:
            self.p = (strategy.g(self.z[0]), strategy.g(self.z[1]))
        if method.name == "byol":
            self.own_p = (method.predictor(self.z[0]), method.predictor(self.z[1]))
        self.current, self.frozen = (
            tuple(bank.rows_KD[: int(bank.filled)].clone() for bank in banks)
            for banks in (method.banks, strategy.banks)
        )


# ---- The formulas ----------------------------------------------------------------------------------------------------

Formula = Callable[[Scene, Temperatures], dict[str, Tensor]]


def unit(z: Tensor) -> Tensor:
    return z / (z * z).sum(dim=-1, keepdim=True).sqrt()


def nce(query: Tensor, positive: Tensor, negatives: Tensor, tau: float, *, positive_below: bool) -> Tensor:
    """-log exp(q.positive / tau) / sum, for one query; positive_below: the positive is a term of the sum too."""
    pull = torch.exp(torch.dot(query, positive) / tau)
    below = torch.exp(torch.einsum("d,kd->k", query, negatives) / tau).sum()
    return -torch.log(pull / (below + pull if positive_below else below))


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def moco(s: Scene, t: Temperatures) -> Tensor:
    """1/2 [NCE(q1, k2, bank of view 2) + NCE(q2, k1, bank of view 1)]."""

    def side(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
        return mean([nce(q[i], k[i], bank, t.own, positive_below=True) for i in range(BATCH)])

    return (side(s.z[0], s.k[1], s.current[1]) + side(s.z[1], s.k[0], s.current[0])) / 2


def nt_xent(s: Scene, t: Temperatures) -> Tensor:
    z = unit(torch.cat(s.z))
    rows = []
    for i in range(2 * BATCH):
        others = [j for j in range(2 * BATCH) if j != i]  # the positive is one of them
        rows.append(nce(z[i], z[(i + BATCH) % (2 * BATCH)], z[others], t.own, positive_below=False))
    return mean(rows)


def two_minus_two_cosines(a: Tensor, b: Tensor) -> Tensor:
    cosines = [torch.dot(x, y) / (torch.dot(x, x) * torch.dot(y, y)).sqrt() for x, y in zip(a, b, strict=True)]
    return 2 - 2 * mean(cosines)


def byol(s: Scene, _: Temperatures) -> Tensor:
    """The two directions are summed."""
    return two_minus_two_cosines(s.own_p[0], s.k[1]) + two_minus_two_cosines(s.own_p[1], s.k[0])


OWN: dict[str, Callable[[Scene, Temperatures], Tensor]] = {"moco": moco, "simclr": nt_xent, "byol": byol}


def contrastive_align(s: Scene, t: Temperatures) -> Tensor:
    """CaSSLe: 1/2 [E(p, f) + E(f, p)] among all 2 N of the batch, the positive and the other view included."""
    p, f = unit(torch.cat(s.p)), unit(torch.cat(s.f))

    def direction(a: Tensor, b: Tensor) -> Tensor:
        return mean([nce(a[i], b[i], b, t.align, positive_below=False) for i in range(2 * BATCH)])

    return (direction(p, f) + direction(f, p)) / 2


def predictive_align(s: Scene, _: Temperatures) -> Tensor:
    """CaSSLe: the mean over views."""
    return (two_minus_two_cosines(s.p[0], s.f[0]) + two_minus_two_cosines(s.p[1], s.f[1])) / 2


def finetune(method: str) -> Formula:
    return lambda s, t: {"loss": OWN[method](s, t)}


def cassle(method: str, weight: float = 1.0) -> Formula:
    align = predictive_align if method == "byol" else contrastive_align
    return lambda s, t: {"loss": OWN[method](s, t), "align": weight * align(s, t)}


def moco_pnr(*, pn1: bool = True, pn2: bool = True) -> Formula:
    """As released: a view's negatives are the other view's banks, and the positive is in both denominators."""

    def formula(s: Scene, t: Temperatures) -> dict[str, Tensor]:
        p, l1, l2 = tuple(unit(x) for x in s.p), [], []
        for v, o in ((0, 1), (1, 0)):
            first = torch.cat([s.current[o], s.frozen[o]]) if pn1 else s.current[o]
            second = torch.cat([s.current[o], s.frozen[o]]) if pn2 else s.frozen[o]
            l1.append(mean([nce(s.z[v][i], s.k[o][i], first, t.own, positive_below=True) for i in range(BATCH)]))
            l2.append(mean([nce(p[v][i], s.f[v][i], second, t.stability, positive_below=True) for i in range(BATCH)]))
        return {"plasticity": (l1[0] + l1[1]) / 2, "stability": (l2[0] + l2[1]) / 2}

    return formula


def moco_pnr_of_the_paper(*, pn1: bool = True, pn2: bool = True) -> Formula:
    """Both views of both models' banks and one's own other view, frozen; L2's positive is not in its denominator."""

    def formula(s: Scene, t: Temperatures) -> dict[str, Tensor]:
        p, l1, l2 = tuple(unit(x) for x in s.p), [], []
        current, frozen = torch.cat(s.current), torch.cat(s.frozen)
        for v, o in ((0, 1), (1, 0)):
            for i in range(BATCH):
                theirs = torch.cat([frozen, s.f[o][i : i + 1]])
                first = torch.cat([current, theirs]) if pn1 else current
                second = torch.cat([current, theirs]) if pn2 else theirs
                l1.append(nce(s.z[v][i], s.k[o][i], first, t.own, positive_below=True))
                l2.append(nce(p[v][i], s.f[v][i], second, t.stability, positive_below=False))
        return {"plasticity": mean(l1), "stability": mean(l2)}

    return formula


def simclr_pnr(*, pn1: bool = True, pn2: bool = True) -> Formula:
    """All but the main diagonal of four blocks: 4 N - 2 terms, L1's positive among them and L2's not."""

    def formula(s: Scene, t: Temperatures) -> dict[str, Tensor]:
        z, p, f = unit(torch.cat(s.z)), unit(torch.cat(s.p)), unit(torch.cat(s.f))
        l1, l2 = [], []
        for i in range(2 * BATCH):
            others = [j for j in range(2 * BATCH) if j != i]
            both = torch.cat([z[others], f[others]])
            assert len(both) == 4 * BATCH - 2
            partner = z[(i + BATCH) % (2 * BATCH)]
            l1.append(nce(z[i], partner, both if pn1 else z[others], t.own, positive_below=False))
            l2.append(nce(p[i], f[i], both if pn2 else f[others], t.stability, positive_below=False))
        return {"plasticity": mean(l1), "stability": mean(l2)}

    return formula


def byol_pnr(weight: float, align_weight: float = 1.0) -> Formula:
    """CaSSLe's terms, minus the squared distance of unit vectors to the frozen embedding of the other view."""

    def formula(s: Scene, t: Temperatures) -> dict[str, Tensor]:
        repel = [((unit(s.p[v]) - unit(s.f[1 - v])) ** 2).sum(dim=1).mean() for v in (0, 1)]
        return {
            "loss": byol(s, t),
            "align": align_weight * predictive_align(s, t),
            "repel": -weight * (repel[0] + repel[1]) / 2,
        }

    return formula


# ---- Values and gradients --------------------------------------------------------------------------------------------

OFF = {"pn1": False}, {"pn2": False}, {"pn1": False, "pn2": False}
CASES: list[tuple[str, str, dict[str, Any], Formula, Temperatures]] = [
    *((method, "finetune", {}, finetune(method), UNEQUAL) for method in OWN),
    *((method, "cassle", {}, cassle(method), UNEQUAL) for method in OWN),
    *((method, "cassle", {"weight": 0.5, "frozen": "batch"}, cassle(method, 0.5), USUAL) for method in OWN),
    *(("moco", "pnr", {"form": "code"} | off, moco_pnr(**off), UNEQUAL) for off in ({}, *OFF)),
    *(("moco", "pnr", {"form": "paper"} | off, moco_pnr_of_the_paper(**off), UNEQUAL) for off in ({}, *OFF)),
    *(("simclr", "pnr", {"form": "code"} | off, simclr_pnr(**off), UNEQUAL) for off in ({}, *OFF)),
    ("moco", "pnr", {}, moco_pnr(), USUAL),  # the form is the code's unless told otherwise
    ("moco", "pnr", {"form": "paper"}, moco_pnr_of_the_paper(), USUAL),
    ("moco", "pnr", {"frozen": "batch"}, moco_pnr(), USUAL),
    ("moco", "pnr", {"initial": "random"}, moco_pnr(), USUAL),
    ("simclr", "pnr", {}, simclr_pnr(), USUAL),
    ("simclr", "pnr", {"form": "paper"}, simclr_pnr(), USUAL),
    ("byol", "pnr", {}, byol_pnr(1.0), USUAL),
    ("byol", "pnr", {"weight": 0.7, "align_weight": 1.25}, byol_pnr(0.7, 1.25), USUAL),
    ("byol", "pnr", {"weight": 0.7, "form": "paper"}, byol_pnr(0.7), USUAL),
    ("byol", "pnr", {"pn2": False}, cassle("byol"), USUAL),
]


def name_of(case: tuple[Any, ...]) -> str:
    settings = ",".join(f"{key}={value}" for key, value in case[2].items())
    return "-".join(filter(None, (case[0], case[1], settings, "" if case[4] is USUAL else "unequal temperatures")))


@pytest.mark.parametrize(("method", "strategy", "own", "formula", "t"), CASES, ids=map(name_of, CASES))
def test_value_and_gradient(
    method: str, strategy: str, own: dict[str, Any], formula: Formula, t: Temperatures, bench: Benches
) -> None:
    made = bench(method, strategy, t=t, **own)
    terms, gradients = made.expected(formula, t)
    found = made.lab.backward(made.inputs)
    assert set(found) == set(terms)
    for name, value in terms.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, p in made.lab.parameters().items():
        assert p.grad is not None, name
        close = {"rtol": 1e-8, "atol": 1e-11 * largest}
        torch.testing.assert_close(p.grad, gradients[name], **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("method", "strategy", "formula"), [("moco", "cassle", cassle("moco")), ("byol", "pnr", byol_pnr(1))]
)
def test_what_is_trained_is_the_sum_of_the_terms(method: str, strategy: str, formula: Formula, bench: Benches) -> None:
    made = bench(method, strategy)
    step, before = made.lab.step, {name: p.detach().clone() for name, p in made.lab.parameters().items()}
    terms, gradients = made.expected(formula)
    found = optimise(step, made.inputs, torch.optim.SGD(step.parameters(), lr=0.5), torch.amp.GradScaler(enabled=False))
    torch.testing.assert_close(found, terms)
    for name, p in made.lab.parameters().items():
        torch.testing.assert_close(p.detach(), before[name] - 0.5 * gradients[name], rtol=1e-9, atol=1e-12)


# ---- Banks -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_not_among_its_own_negatives(data: Path) -> None:
    lab = Lab("moco", "finetune", data, first_task_steps=0)
    assert float(lab.backward()["loss"]) == 0, "the banks are empty until the first batch has been swept"
    assert all(not p.grad.any() for p in lab.parameters().values())
    assert float(lab.backward()["loss"]) > 1
    lab.close()


@pytest.mark.parametrize("strategy", ["finetune", "cassle", "pnr"])
def test_each_view_goes_to_its_own_bank_of_its_own_model(strategy: str, bench: Benches) -> None:
    made = bench("moco", strategy)
    scene = Scene(made)
    filled = [int(bank.filled) for bank in (*made.lab.method.banks, *made.lab.strategy.banks)]
    assert filled == [3 * BATCH, 3 * BATCH] + ([BATCH, BATCH] if strategy == "pnr" else [])
    made.lab.backward(made.inputs)
    pairs = [(scene.current, scene.k, made.lab.method.banks), (scene.frozen, scene.f, made.lab.strategy.banks)]
    for before, keys, banks in pairs[: 2 if strategy == "pnr" else 1]:
        for bank, old, new in zip(banks, before, keys, strict=True):
            expected = torch.cat([old, new])
            assert int(bank.filled) == int(bank.pointer) == len(expected)
            torch.testing.assert_close(bank.rows_KD[: len(expected)], expected, rtol=0, atol=1e-13)


def test_banks_take_the_rows_of_all_ranks_in_their_order(bench: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the scope is local, where `gather` would return this rank's rows alone."""
    made = bench("moco", "pnr")
    scene = Scene(made)
    monkeypatch.setattr(World, "gather_keys", lambda _, x: torch.cat([-x.detach(), x.detach()]))
    made.lab.backward(made.inputs)
    for keys, banks in ((scene.k, made.lab.method.banks), (scene.f, made.lab.strategy.banks)):
        for new, bank in zip(keys, banks, strict=True):
            order = torch.arange(int(bank.pointer) - 2 * BATCH, int(bank.pointer)) % BANK
            torch.testing.assert_close(bank.rows_KD[order], torch.cat([-new, new]), rtol=0, atol=1e-13)


# ---- From task to task -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["cassle", "pnr"])
def test_a_third_task_freezes_anew_and_keeps_the_rest(strategy: str, bench: Benches) -> None:
    made = bench("moco", strategy)
    lab, mine = made.lab, made.lab.strategy
    assert type(mine).predictor_hidden == 2048
    wide = mine.predictor_hidden  # the bench has it narrower
    expected = nn.Sequential(nn.Linear(8, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, 8))
    assert str(mine.g) == str(synchronised(expected, World()))
    g, banks = copy.deepcopy(mine.g.state_dict()), mine.banks
    rows = [bank.rows_KD.clone() for bank in banks]
    mine.end_task(lab.task(1), lab.method)
    lab.begin(2)
    assert all(torch.equal(value, mine.g.state_dict()[key]) for key, value in g.items())
    assert mine.banks is banks
    assert all(torch.equal(bank.rows_KD.nan_to_num(), old.nan_to_num()) for bank, old in zip(banks, rows, strict=True))
    frozen, online = mine.frozen.module.state_dict(), lab.method.online.state_dict()
    assert all(torch.equal(frozen[key], value) for key, value in online.items())
    assert mine.copies["frozen"] is mine.frozen


@pytest.mark.parametrize(
    ("method", "strategy", "faster"),
    [("byol", "cassle", 4.0), ("moco", "cassle", 1), ("simclr", "cassle", 1), ("byol", "pnr", 1)],
)
def test_cassle_speeds_byols_g_up_when_it_weighs_less(
    method: str, strategy: str, faster: float, bench: Benches
) -> None:
    lab = bench(method, strategy).lab
    for weight, scale in {1.0: 1.0, 0.25: faster, 2.0: 1.0, 0.0: 1.0}.items():
        lab.strategy.config = dataclasses.replace(lab.strategy.config, weight=weight)
        theirs, its_own = Step(lab.method, lab.strategy).groups()
        assert its_own["lr_scale"] == scale and theirs.get("lr_scale", 1.0) == 1.0
        assert [id(p) for p in its_own["params"]] == [id(p) for p in lab.strategy.g.parameters()]
        assert [id(p) for p in theirs["params"]] == [id(p) for p in lab.method.parameters()]
