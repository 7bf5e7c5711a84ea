"""What every method must do under every strategy. Newcomers are found by name and tested here unedited."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import prep_ok
from lab import Lab, batches
from torch.nn import functional

from fastcssl.learn import methods, strategies

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = [(m, s) for m in methods.names() for s in strategies.names()]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of 48 images, for strategies that look at data of their own."""
    out = tmp_path_factory.mktemp("lab") / "data"
    prep_ok("build", "synthetic:classes=20,train=8,val=2", "--scenario", "class", "--tasks", 4, "--out", out)
    return out


def _kept(lab: Lab) -> dict[str, Any]:
    return {
        f"{whose}.{name}": copy.deepcopy(item.state_dict())
        for whose, part in (("method", lab.method), ("strategy", lab.strategy))
        for name, item in part.copies.items()
    }


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_gradients_reach_all_that_is_trained_and_nothing_else(method: str, strategy: str, data: Path) -> None:
    lab = Lab(method, strategy, data)
    kept = _kept(lab)
    lab.train()  # a bank may be empty before, and its rows without gradient
    terms = lab.backward()
    for name, value in terms.items():
        assert value.shape == () and value.isfinite(), name
    for name, p in lab.parameters().items():
        assert p.grad is not None and p.grad.abs().sum() > 0, f"{name} gets no gradient"
    for item in (*lab.method.copies.values(), *lab.strategy.copies.values()):
        if hasattr(item, "module"):
            for p in item.module.parameters():
                assert p.grad is None and not p.requires_grad
    assert set(_kept(lab)) == set(kept)
    lab.close()


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_what_is_frozen_does_not_move(method: str, strategy: str, data: Path) -> None:
    lab = Lab(method, strategy, data)
    frozen = {name: state for name, state in _kept(lab).items() if name.endswith(".frozen")}
    before = {name: p.clone() for name, p in lab.parameters().items()}
    for _ in range(3):
        lab.step.train()
        lab.train()
    now = _kept(lab)
    for name, state in frozen.items():
        for key, value in state.items():
            assert torch.equal(value, now[name][key]), f"{name}.{key} moved"
    for name, p in lab.parameters().items():
        # A bias under a BatchNorm has no effect, and so no gradient but rounding.
        assert not torch.equal(p, before[name]) or name.endswith("bias"), f"{name} did not move"
    lab.close()


@pytest.mark.parametrize(("method", "strategy"), [(m, s) for m, s in PAIRS if s != "finetune"])
def test_the_first_task_is_finetuning(method: str, strategy: str, data: Path) -> None:
    mine, plain = (Lab(method, name, data, first_task_steps=0) for name in (strategy, "finetune"))
    for _ in range(3):
        a, b = mine.train(), plain.train()
        assert float(sum(a.values())) == float(sum(b.values()))
    for (name, p), q in zip(mine.parameters().items(), plain.parameters().values(), strict=True):
        assert torch.equal(p, q), name
    mine.close()
    plain.close()


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_a_state_in_the_middle_of_a_task_goes_on_bit_for_bit(method: str, strategy: str, data: Path) -> None:
    lab = Lab(method, strategy, data)
    lab.train()
    state, num_steps = lab.state(), lab.num_steps
    ahead = [next(lab.inputs) for _ in range(3)]
    lab.inputs = iter(ahead)
    expected = [lab.train() for _ in range(3)]

    # Another process: nothing but the state and the next batches is known.
    other = Lab(method, strategy, data, first_task_steps=1)
    other.method.load_state_dict(state["method"])
    other.strategy.load_state_dict(state["strategy"])
    for whose, part in (("method", other.method), ("strategy", other.strategy)):
        assert set(part.copies) == set(state[f"{whose}_copies"])
        for name, item in part.copies.items():
            item.load_state_dict(state[f"{whose}_copies"][name])
    other.num_steps, other.inputs = num_steps, iter(ahead)
    for terms in expected:
        again = other.train()
        assert {k: float(v) for k, v in again.items()} == {k: float(v) for k, v in terms.items()}
    for (name, p), q in zip(lab.parameters().items(), other.parameters().values(), strict=True):
        assert torch.equal(p, q), name
    lab.close()
    other.close()


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_the_same_seed_gives_the_same_run(method: str, strategy: str, data: Path) -> None:
    runs = []
    for noise in (1, 2):
        torch.manual_seed(noise)  # the global generator must not matter
        lab = Lab(method, strategy, data)
        runs.append([{k: float(v) for k, v in lab.train().items()} for _ in range(3)])
        lab.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", methods.names())
def test_align_is_lower_for_the_right_pairs(method: str, data: Path) -> None:
    lab = Lab(method, "finetune", data)
    generator = torch.Generator().manual_seed(0)
    views = tuple(torch.randn(12, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    shuffled = tuple(z_ND.roll(1, dims=0) for z_ND in views)
    assert lab.method.align(views, views) < lab.method.align(shuffled, views)
    lab.close()


@pytest.mark.parametrize("method", methods.names())
def test_descent_on_align_turns_predictions_to_their_targets(method: str, data: Path) -> None:
    lab = Lab(method, "finetune", data)
    generator = torch.Generator().manual_seed(0)
    p, f = ([torch.randn(12, 8, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(2))
    before = functional.cosine_similarity(torch.cat(p), torch.cat(f)).mean()
    for _ in range(30):
        leaves = tuple(x.requires_grad_() for x in p)
        gradients = torch.autograd.grad(lab.method.align(leaves, tuple(f)), leaves)
        p = [(x - 0.5 * g).detach() for x, g in zip(leaves, gradients, strict=True)]
    after = functional.cosine_similarity(torch.cat(p), torch.cat(f)).mean()
    assert after > before + 0.05
    lab.close()


@pytest.mark.parametrize("method", methods.names())
def test_a_compiled_step_is_the_same(method: str, data: Path) -> None:
    """Forward and backward graphs by torch.compile, bank writes included."""
    plain, compiled = (Lab(method, "pnr", data) for _ in range(2))
    compiled.step.compile(backend="aot_eager")
    for _ in range(3):
        a, b = plain.train(), compiled.train()
        assert {k: float(v) for k, v in b.items()} == pytest.approx({k: float(v) for k, v in a.items()}, rel=1e-9)
    for name, rows in plain.banks().items():
        torch.testing.assert_close(compiled.banks()[name], rows)
    plain.close()
    compiled.close()


def test_the_batches_of_ranks_are_parts_of_the_whole() -> None:
    whole = next(batches())
    parts = [next(batches(rank, 4)) for rank in range(4)]
    for view in (0, 1):
        assert torch.equal(torch.cat([part.views[view] for part in parts]), whole.views[view])
