"""What is remembered besides the weights: slow copies against their formula, banks against a plain list of keys."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import SIZE_PX, as_float64, small, small_encoder
from torch import Tensor, nn

from fastcssl.learn import methods
from fastcssl.learn.memory import Bank, EmaCopy, FrozenCopy, fill
from fastcssl.learn.methods import BankConfig, Inputs, Method, Setting, ema_momentum

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int = 0) -> nn.Sequential:
    """With statistics that are not those of a new one."""
    made = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    change(made, seed)
    for _ in range(3):
        made(2 * normal(6, 5, seed=seed) + 1)
    return made


def change(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=100 * seed + number))


def images(num: int = 8, seed: int = 0) -> Inputs:
    views = tuple(normal(num, 3, SIZE_PX, SIZE_PX, seed=seed + view) for view in (0, 1))
    return Inputs(views=views, label=torch.zeros(num, dtype=torch.int64), id=torch.arange(num))


def method_of(name: str, **changes: Any) -> Method:
    config = dataclasses.replace(small(methods.find(name).Config()), **changes)
    found = methods.build(config, small_encoder(), Setting(seed=3))
    as_float64(found)
    return found


def snapshot(item: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in item.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


# ---- The slow copy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.5, 0.99, 0.9996, 1.0])
def test_ema_is_a_weighted_mean_of_parameters_and_nothing_else(tau: float) -> None:
    source = network(1)
    slow = EmaCopy(source)
    change(source, 2)
    source(normal(6, 5, seed=9))
    before, new = snapshot(slow), snapshot(source)
    slow.update(source, tau)
    after = slow.state_dict()
    parameters = {name for name, _ in source.named_parameters()}
    for key, old in before.items():
        if key not in parameters:
            assert torch.equal(after[key], old), f"{key} is a buffer"
        elif tau in (0.0, 1.0):
            assert torch.equal(after[key], old if tau else new[key]), key
        else:
            torch.testing.assert_close(after[key], tau * old + (1 - tau) * new[key], rtol=1e-14, atol=1e-15)
    assert same(snapshot(source), new), "the source must not move"


def test_ema_normalises_by_its_own_batches() -> None:
    source = network(1)
    slow = EmaCopy(source)
    source.eval()
    change(source, 2)
    kept, norm = snapshot(slow), slow.module[1]
    x_NC = normal(7, 5, seed=3)
    hidden_NC = x_NC @ kept["0.weight"].T + kept["0.bias"]
    out = slow(x_NC)
    variance_C, mean_C = torch.var_mean(hidden_NC, 0, correction=0)
    unit_NC = (hidden_NC - mean_C) / (variance_C + norm.eps).sqrt() * kept["1.weight"] + kept["1.bias"]
    torch.testing.assert_close(out, unit_NC.relu() @ kept["3.weight"].T + kept["3.bias"])
    torch.testing.assert_close(norm.running_mean, 0.9 * kept["1.running_mean"] + 0.1 * mean_C)
    torch.testing.assert_close(norm.running_var, 0.9 * kept["1.running_var"] + 0.1 * hidden_NC.var(0))
    assert int(norm.num_batches_tracked) == int(kept["1.num_batches_tracked"]) + 1
    assert not out.requires_grad and not any(p.requires_grad for p in slow.module.parameters())


def test_ema_starts_as_the_source_and_shares_no_memory() -> None:
    source = network(1)
    slow = EmaCopy(source.eval())
    assert same(snapshot(slow), snapshot(source))
    assert slow.module.training, "its statistics come from its own forward in train mode"
    kept = snapshot(slow)
    change(source, 2)
    source.train()(normal(6, 5))
    assert same(snapshot(slow), kept)


@pytest.mark.parametrize(("base", "final"), [(0.99, 1.0), (0.99, 0.999), (0.5, 0.5)])
def test_momentum_goes_from_base_to_final_on_a_half_cosine(base: float, final: float) -> None:
    at = [ema_momentum(base, final, step, 1000) for step in range(1001)]
    assert at[0] == pytest.approx(base, abs=1e-15)
    assert at[1000] == final
    assert at[500] == pytest.approx((base + final) / 2, abs=1e-15)
    assert at[250] == pytest.approx(final - (final - base) * (1 + math.sqrt(0.5)) / 2, abs=1e-15)
    assert at[333] == pytest.approx(final - (final - base) * (math.cos(math.pi * 0.333) + 1) / 2, abs=1e-15)
    assert all(earlier <= later for earlier, later in pairwise(at))


@pytest.mark.parametrize(("name", "final"), [("moco", 0.999), ("byol", 1.0)])
def test_methods_follow_the_schedule_and_begin_it_anew(name: str, final: float) -> None:
    method: Any = method_of(name)
    for number, (step, tau) in enumerate([(0, 0.99), (5, (0.99 + final) / 2), (10, final), (0, 0.99)]):
        change(method.online, number + 1)
        before = [p.clone() for p in method.slow.module.parameters()]
        method.after_step(step, 10)
        pairs = zip(before, method.online.parameters(), method.slow.module.parameters(), strict=True)
        for old, source, now in pairs:
            torch.testing.assert_close(now, tau * old + (1 - tau) * source, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["moco", "byol"])
def test_a_methods_slow_copy_moves_only_its_statistics_in_a_forward(name: str) -> None:
    method: Any = method_of(name)
    before = snapshot(method.slow)
    method.eval()  # which must not reach the copy
    e = method(images())
    assert len(e.target) == 2 and not any(k.requires_grad for k in e.target)
    moved = {key for key, value in method.slow.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key in before if "running" in key or "num_batches" in key}


# ---- The frozen copy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_nothing_moves_the_frozen_copy(batch_statistics: bool) -> None:
    source = network(1)
    frozen = FrozenCopy(source, batch_statistics=batch_statistics)
    assert same(snapshot(frozen), snapshot(source))
    x_NC = normal(7, 5, seed=3)
    kept, first = snapshot(frozen), frozen(x_NC)
    optimizer = torch.optim.SGD(source.parameters(), lr=1.0)
    source.train()
    (source(x_NC) - frozen(x_NC)).square().sum().backward()
    optimizer.step()
    source.eval()
    change(source, 2)
    assert torch.equal(frozen(x_NC), first) and not first.requires_grad
    now = snapshot(frozen)
    for key, value in kept.items():
        assert torch.equal(now[key], value), key
    assert all(p.grad is None and not p.requires_grad for p in frozen.module.parameters())
    assert [layer.momentum for layer in source if isinstance(layer, nn.BatchNorm1d)] == [0.1], "the source's own"


def test_a_frozen_copy_normalises_by_what_it_was_told() -> None:
    source = network(1)
    x_NC = normal(7, 5, seed=3)
    by_running, by_batch = FrozenCopy(source.train()), FrozenCopy(source.eval(), batch_statistics=True)
    evaluated, trained = copy.deepcopy(source).eval()(x_NC), copy.deepcopy(source).train()(x_NC)
    torch.testing.assert_close(by_running(x_NC), evaluated)
    torch.testing.assert_close(by_batch(x_NC), trained)
    assert not torch.allclose(evaluated, trained, atol=1e-3)
    by_batch(100 * x_NC + 5)
    torch.testing.assert_close(by_batch(x_NC), trained)


def test_train_and_the_optimiser_of_a_method_do_not_reach_its_copies() -> None:
    method: Any = method_of("moco")
    frozen = FrozenCopy(method.online)
    method.copies["frozen"] = frozen
    method.train()
    assert not frozen.module.training
    held = {id(x) for x in (*method.parameters(), *method.buffers())}
    for item in method.copies.values():
        tensors = [item.rows_KD] if isinstance(item, Bank) else [*item.module.parameters(), *item.module.buffers()]
        assert not held & {id(x) for x in tensors}


@pytest.mark.parametrize("kind", [EmaCopy, FrozenCopy])
def test_a_copys_state_goes_into_another(kind: Callable[[nn.Module], Any]) -> None:
    one, other = kind(network(1)), kind(network(2))
    assert not same(snapshot(one), snapshot(other))
    other.load_state_dict(snapshot(one))
    assert same(snapshot(one), snapshot(other))
    with pytest.raises(RuntimeError, match="size mismatch"):
        kind(nn.Sequential(nn.Linear(5, 7), *network(1)[1:])).load_state_dict(snapshot(one))
    one.to(torch.device("meta"))
    assert all(x.is_meta for x in one.state_dict().values())


# ---- Banks -----------------------------------------------------------------------------------------------------------


class Model:
    """A bank as anyone would write it: one key after the other into a list."""

    def __init__(self, rows: list[list[float]], filled: int) -> None:
        self.rows, self.pointer, self.filled = rows, 0, filled

    def push(self, keys: Tensor) -> None:
        for key in keys.tolist():
            length = math.sqrt(sum(x * x for x in key))
            self.rows[self.pointer] = [x / length for x in key]
            self.pointer = (self.pointer + 1) % len(self.rows)
            self.filled = min(self.filled + 1, len(self.rows))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9),
    initial=st.sampled_from(["empty", "random"]),
    actions=st.lists(st.one_of(st.integers(0, 30), st.sampled_from(["reset", "reload"])), max_size=8),
)
def test_a_bank_is_a_ring_of_the_last_keys(size: int, initial: Any, actions: list[Any]) -> None:
    bank = Bank(size, 3, view=0, initial=initial, seed=5, dtype=torch.float64)
    fresh = bank.rows_KD.tolist()
    model = Model(copy.deepcopy(fresh), size if initial == "random" else 0)
    for number, action in enumerate(actions):
        if action == "reset":
            bank.reset()
            model = Model(copy.deepcopy(fresh), size if initial == "random" else 0)
        elif action == "reload":
            state = snapshot(bank)
            bank = Bank(size, 3, view=0, initial=initial, seed=5, dtype=torch.float64)
            bank.push(normal(2, 3, seed=99))
            bank.load_state_dict(state)
        else:
            keys_GD = 3 * normal(action, 3, seed=number) + 0.1
            bank.push(keys_GD)
            model.push(keys_GD)
        assert (int(bank.pointer), int(bank.filled)) == (model.pointer, model.filled)
        torch.testing.assert_close(bank.rows_KD.tolist(), model.rows, rtol=1e-14, atol=1e-15)
    assert bank.pointer.dtype == bank.filled.dtype == torch.int64 and bank.pointer.dim() == bank.filled.dim() == 0


def test_a_bank_starts_empty_or_full_of_random_directions() -> None:
    empty = Bank(50, 8, view=1)
    assert (int(empty.filled), int(empty.pointer), empty.view, empty.rows_KD.dtype) == (0, 0, 1, torch.float32)
    one, again, other = (Bank(2000, 8, view=0, initial="random", seed=seed) for seed in (1, 1, 2))
    assert (int(one.filled), int(one.pointer)) == (2000, 0)
    assert torch.equal(one.rows_KD, again.rows_KD) and not torch.equal(one.rows_KD, other.rows_KD)
    torch.testing.assert_close(one.rows_KD.norm(dim=1), torch.ones(2000))
    # Directions of a sphere: mean 0, the square of each coordinate 1/8 on average.
    assert one.rows_KD.mean(dim=0).abs().max() < 0.05
    torch.testing.assert_close(one.rows_KD.square().mean(dim=0), torch.full((8,), 1 / 8), rtol=0.2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_of_unit_length_whatever_their_type(dtype: torch.dtype) -> None:
    bank = Bank(64, 16, view=0)
    keys_GD = (200 * normal(64, 16)).to(dtype).requires_grad_()  # whose squares float16 cannot hold
    bank.push(keys_GD)
    torch.testing.assert_close(bank.rows_KD.norm(dim=1), torch.ones(64), rtol=0, atol=1e-6)
    expected = keys_GD.detach().double()
    torch.testing.assert_close(bank.rows_KD.double(), expected / expected.norm(dim=1, keepdim=True), rtol=0, atol=1e-6)
    assert not bank.rows_KD.requires_grad
    half = Bank(64, 16, view=0, dtype=torch.float16)
    half.push(keys_GD)
    assert torch.equal(half.rows_KD, bank.rows_KD.half())


def test_push_leaves_the_keys_and_the_tensors_that_others_hold() -> None:
    bank = Bank(5, 2, view=0)
    rows, pointer, filled = bank.rows_KD, bank.pointer, bank.filled
    keys_GD = 3 * torch.ones(3, 2)
    bank.push(keys_GD)
    assert torch.equal(keys_GD, 3 * torch.ones(3, 2))
    assert (bank.rows_KD is rows, bank.pointer is pointer, bank.filled is filled) == (True, True, True)


def test_no_row_is_written_twice_in_one_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would let any of the writers win."""
    plain = Tensor.index_copy_

    def first_wins(self: Tensor, dim: int, place: Tensor, keys: Tensor) -> Tensor:
        return plain(self, dim, place.flip(0), keys.flip(0))

    monkeypatch.setattr(Tensor, "index_copy_", first_wins)
    bank, keys_GD = Bank(3, 2, view=0, dtype=torch.float64), normal(8, 2)
    bank.push(keys_GD)
    expected = keys_GD[[6, 7, 5]]
    torch.testing.assert_close(bank.rows_KD, expected / expected.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("key", ["rows", "pointer", "filled"])
def test_a_bank_of_another_shape_is_refused(key: str) -> None:
    bank = Bank(5, 2, view=0)
    state = bank.state_dict() | {key: torch.zeros(4, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=rf"the saved bank has {key} \[4, 2\], this one has"):
        bank.load_state_dict(state)


def test_a_bank_moves_whole() -> None:
    bank = Bank(5, 2, view=0, initial="random")
    before = snapshot(bank)
    bank.to(CPU)
    assert same(snapshot(bank), before)
    bank.to(torch.device("meta"))
    assert all(x.is_meta for x in bank.state_dict().values())


def test_moco_sweeps_before_it_pushes() -> None:
    """The loss and its gradient are those of the banks as they were, also when backward comes after the push."""
    method: Any = method_of("moco", bank=BankConfig(size=12))
    method.remember(method(images(seed=5)))
    e = method(images(seed=7))
    swept = []
    for push in (False, True):
        loss = method.loss(e)
        if push:
            method.remember(e)
        swept.append((loss.detach(), *torch.autograd.grad(loss, e.z)))
    for a, b in zip(*swept, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(method.loss(e).detach(), swept[0][0]), "now the batch is in the banks"
    assert [int(bank.filled) for bank in method.banks] == [12, 12] and [int(b.pointer) for b in method.banks] == [4, 4]


# ---- Filling ---------------------------------------------------------------------------------------------------------


def batches(num: int, taken: list[int], size: int = 4) -> Iterator[SimpleNamespace]:
    for number in range(num):
        taken.append(number)
        views = tuple(normal(size, 3, seed=10 * number + view) for view in (0, 1))
        yield SimpleNamespace(views=views, label=torch.zeros(size, dtype=torch.int64))


def by_view(view: int, numbers: range) -> Tensor:
    """What `embed` and `two_ranks` make of these batches."""
    parts = [2 * normal(4, 3, seed=10 * number + view) + 1 for number in numbers]
    keys_GD = torch.cat([part for own in parts for part in (own, own)])
    return keys_GD / keys_GD.norm(dim=1, keepdim=True)


def embed(view: Tensor) -> Tensor:
    return 2 * view + 1


def two_ranks(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def test_fill_gives_every_bank_its_view_until_all_are_full() -> None:
    banks = [Bank(20, 3, view=view, dtype=torch.float64) for view in (0, 1, 0, 1)]
    taken: list[int] = []
    assert fill(banks, embed, batches(9, taken), two_ranks) == 20
    assert taken == [0, 1, 2], "8 rows each"
    for bank in banks:
        assert (int(bank.filled), int(bank.pointer)) == (20, 4)
        keys_GD = by_view(bank.view, range(3))
        torch.testing.assert_close(bank.rows_KD, torch.cat([keys_GD[20:], keys_GD[4:20]]), rtol=0, atol=1e-14)


def test_fill_ends_with_the_data() -> None:
    banks = [Bank(20, 3, view=view, dtype=torch.float64) for view in (0, 1)]
    taken: list[int] = []
    assert fill(banks, embed, batches(2, taken), two_ranks) == 16
    for bank in banks:
        assert (int(bank.filled), int(bank.pointer)) == (16, 16)
        torch.testing.assert_close(bank.rows_KD[:16], by_view(bank.view, range(2)), rtol=0, atol=1e-14)
