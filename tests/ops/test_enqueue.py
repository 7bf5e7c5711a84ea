"""Rings of keys, alone and after the sweep that reads them: against a list, in one graph, on several ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

from fastcssl import ops
from fastcssl.distributed.world import World

STORED = (torch.float32, torch.float16, torch.bfloat16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return normalize(normal(*shape, seed=seed), dim=-1)


def count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


# The ring alone.


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(1, 9),
    dtype=st.sampled_from(STORED),
    normalise=st.booleans(),
    pushes=st.lists(st.integers(0, 25), max_size=6),
)
def test_a_ring_holds_the_last_keys(size: int, dtype: torch.dtype, normalise: bool, pushes: list[int]) -> None:
    """Wrap-around, no keys, more keys than rows; the compiled ring and torch's, bit for bit but for the length."""
    rings = {impl: (torch.zeros(size, 5, dtype=dtype), count(0), count(0)) for impl in ("cpu", "torch")}
    rows, written = [[0.0] * 5 for _ in range(size)], 0
    for number, more in enumerate(pushes):
        keys = 3 * normal(more, 5, seed=number)
        for impl, (bank, pointer, filled) in rings.items():
            ops.enqueue(bank, keys, pointer, filled, normalise=normalise, impl=impl)  # type: ignore[arg-type]
        for key in normalize(keys.double(), dim=1) if normalise else keys.double():
            rows[written % size], written = key.tolist(), written + 1
    # float32: a last digit or two of the length. Half types: one more rounding, of the same number to the same side.
    within = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for bank, pointer, filled in rings.values():
        assert (int(pointer), int(filled)) == (written % size, min(written, size))
        torch.testing.assert_close(bank.double(), torch.tensor(rows, dtype=torch.float64), rtol=within, atol=1e-7)
    if not normalise:
        assert torch.equal(rings["cpu"][0], rings["torch"][0])


@pytest.mark.parametrize("dtype", STORED)
def test_keys_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Ties, subnormal numbers, what is too large, and a key of no length."""
    special = torch.tensor([0.0, -0.0, 1e-8, 6e-8, 3e-5, 1e-40, 65519.0, 65520.0, 1e38, 1 + 2**-11, 1 + 3 * 2**-11])
    keys = torch.cat([special, -special, 1 + 2**-9 + special[:3], normal(1000) * 1e-4, normal(999)])[:, None]
    bank, pointer, filled = torch.ones(len(keys), 1, dtype=dtype), count(0), count(0)
    ops.enqueue(bank, keys, pointer, filled, normalise=False, impl="cpu")
    assert torch.equal(bank, keys.to(dtype))
    bank = torch.ones(2, 3, dtype=dtype)
    ops.enqueue(bank, torch.tensor([[0.0, 0.0, 0.0], [3e-20, 0.0, 4e-20]]), pointer.zero_(), filled, impl="cpu")
    assert not bank[0].any()
    for value in (torch.inf, torch.nan):
        ops.enqueue(bank, torch.full((1, 3), value), pointer.zero_(), filled, normalise=False, impl="cpu")
        torch.testing.assert_close(bank[0].float(), torch.full((3,), value), equal_nan=True)


def test_the_choice_of_a_ring() -> None:
    pointer, filled = count(0), count(0)
    double = torch.zeros(3, 2, dtype=torch.float64)
    keys = normal(1, 2, dtype=torch.float64)
    ops.enqueue(double, keys, pointer, filled)  # by torch, in float64
    torch.testing.assert_close(double[0], keys[0] / keys[0].norm(), rtol=1e-15, atol=0)
    with pytest.raises(ValueError, match=r"impl is 'cpu', but it does not take a float64 \[3, 2\] bank"):
        ops.enqueue(double, keys, pointer, filled, impl="cpu")
    with pytest.raises(ValueError, match="impl is 'cuda', but the bank is on cpu"):
        ops.enqueue(double.float(), keys.float(), pointer, filled, impl="cuda")
    with pytest.raises(ValueError, match="impl is 'gpu'; use"):
        ops.enqueue(double, keys, pointer, filled, impl="gpu")  # type: ignore[arg-type]


def test_faults_are_named() -> None:
    good: dict[str, Any] = {"bank": torch.zeros(5, 4), "keys": unit(2, 4), "pointer": count(0), "filled": count(0)}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"bank": torch.zeros(5)}, r"must be contiguous floats \[K, D\], but is float32 \[5\]"),
        ({"bank": torch.zeros(0, 4)}, r"must be contiguous floats \[K, D\], but is float32 \[0, 4\]"),
        ({"bank": torch.zeros(4, 5).T}, "must be contiguous"),
        ({"bank": torch.zeros(5, 4, dtype=torch.int32)}, "must be contiguous floats"),
        ({"bank": torch.zeros(5, 4, requires_grad=True)}, "must not require a gradient"),
        ({"keys": unit(2, 3)}, r"keys must be floats \[G, 4\], but are float32 \[2, 3\]"),
        ({"keys": torch.ones(2, 4, dtype=torch.bool)}, "keys must be floats"),
        ({"keys": torch.ones(2, 4, device="meta")}, "keys is on meta, but the bank is on cpu"),
        ({"pointer": torch.tensor([0])}, r"pointer must be a 0-d int64 tensor, but is int64 \[1\]"),
        ({"filled": torch.tensor(0.0)}, "filled.* must be .*0-d int64 tensor"),
    ]
    for changed, words in faults:
        with pytest.raises(ValueError, match=words):
            ops.enqueue(*({**good, **changed}).values())
        bank, keys, pointer, filled = ({**good, **changed}).values()
        if bank.dim() == 2 and bank.shape[1] == 4 and bank.dtype.is_floating_point:
            with pytest.raises(ValueError, match=words):
                ops.info_nce_enqueue(unit(3, 4), unit(3, 4), [bank], 0.2, [keys], [pointer], filled=[filled])
    with pytest.raises(ValueError, match="one entry for each of 1 banks, but has 2 and 1"):
        ops.info_nce_enqueue(unit(3, 4), unit(3, 4), [unit(5, 4)], 0.2, [None, None], [None], filled=[None])
    with pytest.raises(ValueError, match="pointer must be a 0-d int64 tensor, but is None"):
        ops.info_nce_enqueue(unit(3, 4), unit(3, 4), [unit(5, 4)], 0.2, [unit(1, 4)], [None], filled=[None])


# After the sweep.


class Rings:
    """Two rings, half full, and a bank that is only read."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.banks = [unit(50, 8, seed=1).to(dtype), unit(7, 8, seed=2), unit(30, 8, seed=3).to(dtype)]
        self.pointers = [count(45), None, count(2)]
        self.filled = [count(45), count(6), count(30)]
        self.keys = [3 * normal(12, 8, seed=4), None, normal(31, 8, seed=5)]

    def state(self) -> list[Tensor]:
        return [x.clone() for x in (*self.banks, *filter(None, self.pointers), *self.filled)]


@pytest.mark.parametrize("impl", ["cpu", "chunked", "torch"])
@pytest.mark.parametrize("dtype", STORED)
def test_one_call_is_the_two(impl: Any, dtype: torch.dtype) -> None:
    """The sweep sees the rows as they were, and so does the gradient, which comes after the write."""
    results = []
    for fused in (True, False):
        rings = Rings(dtype)
        query, positive = (unit(9, 8, seed=seed).requires_grad_() for seed in (6, 7))
        options: dict[str, Any] = {"filled": rings.filled, "own_M": torch.arange(9), "positive_in_denominator": False}
        warm = torch.linspace(0.1, 1, 9)
        if fused:
            loss = ops.info_nce_enqueue(
                query, positive, rings.banks, warm, rings.keys, rings.pointers, impl=impl, **options
            )
        else:
            loss = ops.info_nce(query, positive, rings.banks, warm, impl=impl, **options)
            for b in (0, 2):
                ops.enqueue(rings.banks[b], rings.keys[b], rings.pointers[b], rings.filled[b])  # type: ignore[arg-type]
        loss.backward(torch.arange(9.0))
        results.append([loss.detach(), query.grad, positive.grad, *rings.state()])
    assert torch.equal(results[0][3].isfinite(), results[1][3].isfinite())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 1e-2, atol=1e-6)
    assert [int(x) for x in results[0][-5:]] == [7, 3, 50, 6, 30]


def test_nothing_to_write_is_a_sweep() -> None:
    query, bank = unit(3, 4), unit(5, 4, seed=1)
    fused = ops.info_nce_enqueue(query, query, [bank], 0.2, [None], [None], filled=[None])
    assert torch.equal(fused, ops.info_nce(query, query, [bank], 0.2))
    assert torch.equal(bank, unit(5, 4, seed=1))


def test_keys_may_be_part_of_what_is_trained() -> None:
    """Of half precision too, as autocast makes them; nothing of them is kept."""
    rings = Rings()
    query = unit(12, 8, seed=6).bfloat16().requires_grad_()
    new = [query * 2, None, None]
    loss = ops.info_nce_enqueue(query, query.detach(), rings.banks, 0.2, new, rings.pointers, filled=rings.filled)
    assert loss.dtype == torch.float32 and not rings.banks[0].requires_grad
    loss.sum().backward()
    assert query.grad is not None and query.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rings.banks[0][45:], normalize(query.detach().float(), dim=1)[:5], rtol=1e-6, atol=1e-7)


# As torch sees them.


def test_opcheck() -> None:
    scaled, rings = 5 * unit(3, 8), Rings()
    keys = [new for new in rings.keys if new is not None]
    pointers = [pointer for pointer in rings.pointers if pointer is not None]
    written, counts = [rings.banks[0], rings.banks[2]], [rings.filled[0], rings.filled[2]]
    for wanted in ([True, True], [False, True], [False, False]):
        reading = (torch.arange(3), True, wanted, False)
        torch.library.opcheck(
            torch.ops.fastcssl.info_nce_sweep.default,
            (scaled, scaled + 1, rings.banks, [count(4), None, None], *reading),
        )
        ring = (written, pointers, counts, keys, True)
        torch.library.opcheck(
            torch.ops.fastcssl.info_nce_sweep_enqueue.default,
            (scaled, scaled + 1, *ring, rings.banks[1:2], [None], *reading),
        )
    torch.library.opcheck(torch.ops.fastcssl.enqueue.default, (written, pointers, counts, keys, True))


@pytest.mark.parametrize("impl", ["cpu", "chunked"])
def test_the_write_is_in_the_graph(impl: Any) -> None:
    def step(query: Tensor, rings: Rings) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = normalize(query @ torch.eye(8), dim=1)
            keys = [z.detach(), None, rings.keys[2]]
            loss_M = ops.info_nce_enqueue(
                z, z.roll(1, 0).detach(), rings.banks, 0.2, keys, rings.pointers, filled=rings.filled, impl=impl
            )
            ops.enqueue(rings.banks[0], keys[0], rings.pointers[0], rings.filled[0])  # type: ignore[arg-type]
            again = ops.info_nce(z, z.detach(), rings.banks, 0.2, filled=rings.filled, impl=impl)
        return loss_M.mean() + again.mean()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        rings, query = Rings(), normal(6, 8, seed=9).requires_grad_()
        for _ in range(2):
            loss = function(query, rings)
        results.append([loss.detach(), *torch.autograd.grad(loss, query), *rings.state()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert int(results[0][-3]) == 50 and int(results[0][-5]) == (45 + 4 * 6) % 50


def trained(world: World, num_steps: int) -> dict[str, Tensor]:
    """On each rank a part of every batch, and the keys of all."""
    torch.manual_seed(0)
    network: Any = nn.Linear(6, 8)
    if world.size > 1:
        network = DistributedDataParallel(network)
    bank, pointer, filled = torch.zeros(20, 8), count(0), count(0)
    losses = []
    for step in range(num_steps):
        part = 12 // world.size
        x = normal(12, 6, seed=step)[world.rank * part : (world.rank + 1) * part]
        z = normalize(network(x), dim=1)
        keys = world.gather_keys(z.detach())
        loss = ops.info_nce_enqueue(
            z, z.detach().roll(1, 1), [bank], 0.2, [keys], [pointer], filled=[filled], impl="cpu"
        ).mean()
        network.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in network.parameters():
                p -= 0.1 * p.grad
        losses.append(world.total(loss.detach()) / world.size)
    weights = torch.cat([p.detach().flatten() for p in network.parameters()])
    return {"weights": weights, "bank": bank, "losses": torch.stack(losses), "at": torch.stack([pointer, filled])}


def test_two_ranks_are_one_process() -> None:
    alone, ranks = trained(World(), 6), run(2, trained, 6)
    for rank in ranks:
        for name, value in alone.items():
            torch.testing.assert_close(rank[name], value, rtol=1e-4, atol=1e-5)
    assert torch.equal(ranks[0]["bank"], ranks[1]["bank"]) and alone["at"].tolist() == [12, 20]
