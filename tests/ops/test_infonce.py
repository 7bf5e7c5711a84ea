"""InfoNCE against banks: both implementations against sums written out in float64, and what training needs of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from fastcssl import ops
from fastcssl.ops import infonce
from fastcssl.ops.infonce import info_nce_chunked, info_nce_torch

Function = Callable[..., Tensor]
BOTH: list[Any] = [pytest.param(info_nce_torch, id="torch"), pytest.param(info_nce_chunked, id="chunked")]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return normalize(normal(*shape, seed=seed), dim=-1).to(dtype)


def count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def written_out(
    query: Tensor,
    positive: Tensor,
    banks: Sequence[Tensor],
    temperature: float | Tensor,
    *,
    filled: Sequence[Tensor | None] | None = None,
    own_M: Tensor | None = None,
    positive_in_denominator: bool = True,
) -> Tensor:
    """Row by row and key by key, for small logits."""
    losses = []
    for i in range(len(query)):
        t = float(temperature[i]) if isinstance(temperature, Tensor) else temperature
        pull = torch.dot(query[i], positive[i]) / t
        terms = [pull.exp()] if positive_in_denominator else []
        for b, bank in enumerate(banks):
            limit = None if filled is None else filled[b]
            for j in range(len(bank)):
                if (limit is None or j < int(limit)) and (own_M is None or j != int(own_M[i])):
                    terms.append((torch.dot(query[i], bank[j]) / t).exp())
        losses.append(torch.stack(terms).sum().log() - pull if terms else 0 * pull)
    return torch.stack(losses)


def with_gradients(
    function: Function, inputs: Sequence[Tensor], *arguments: object, seed: int = 9, **options: object
) -> list[Tensor]:
    """The losses, and the gradients of a weighted sum of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss_M = function(*leaves, *arguments, **options)
    loss_M.backward(normal(len(loss_M), seed=seed).to(loss_M.dtype))
    return [loss_M.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], atol: float = 1e-12, rtol: float = 1e-10) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, check_dtype=False)


# Against the sums written out.


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    num_rows, dim = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5, 12]), min_size=1, max_size=3))
    seed = draw(st.integers(0, 1000))
    warm = torch.rand(num_rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    some = st.one_of(st.none(), st.integers(0, 14).map(count))
    own = draw(st.one_of(st.none(), st.lists(st.integers(-1, 12), min_size=num_rows, max_size=num_rows)))
    return {
        "inputs": (normal(num_rows, dim, seed=seed), normal(num_rows, dim, seed=seed + 1)),
        "banks": [normal(size, dim, seed=seed + 2 + b) for b, size in enumerate(sizes)],
        "temperature": draw(st.sampled_from([0.5, 1.0, 3, warm])),
        "options": {
            "filled": draw(st.one_of(st.none(), st.tuples(*[some] * len(sizes)))),
            "own_M": None if own is None else torch.tensor(own),
            "positive_in_denominator": draw(st.booleans()),
        },
        "chunk": draw(st.integers(1, 13)),
    }


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_losses_and_gradients_are_the_sums_written_out(problem: dict[str, Any]) -> None:
    inputs, banks, options = problem["inputs"], problem["banks"], problem["options"]
    expected = with_gradients(written_out, inputs, banks, problem["temperature"], **options)
    for bank, limit in zip(banks, options["filled"] or (), strict=False):
        if limit is not None:
            bank[int(limit) :] = math.nan  # what was never filled may hold anything
    assert_same(with_gradients(info_nce_torch, inputs, banks, problem["temperature"], **options), expected)
    options["chunk"] = problem["chunk"]
    assert_same(with_gradients(info_nce_chunked, inputs, banks, problem["temperature"], **options), expected)


@pytest.mark.parametrize("positive_in_denominator", [True, False])
def test_banks_get_gradients(positive_in_denominator: bool) -> None:
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate([(4, 3), (4, 3), (6, 3), (5, 3)])]
    options = {"filled": (None, count(3)), "own_M": torch.tensor([0, 1, 2, 5])}
    options["positive_in_denominator"] = positive_in_denominator

    def through(function: Function) -> Function:
        return lambda q, p, *banks: function(q, p, banks, 0.7, **options)

    assert_same(with_gradients(through(ops.info_nce), inputs), with_gradients(through(written_out), inputs))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("positive_in_denominator", [True, False])
def test_gradcheck(function: Function, positive_in_denominator: bool) -> None:
    banks, warm = [normal(7, 4, seed=3), normal(5, 4, seed=4)], torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    options = {"filled": (count(6), None), "positive_in_denominator": positive_in_denominator}
    leaves = [normal(3, 4, seed=seed).requires_grad_() for seed in (1, 2)]
    assert torch.autograd.gradcheck(lambda q, p: function(q, p, banks, warm, **options), leaves)


@pytest.mark.parametrize("function", BOTH)
def test_a_row_that_sees_no_key(function: Function) -> None:
    inputs = normal(2, 3, seed=1), normal(2, 3, seed=2)
    banks, own = [normal(1, 3), normal(4, 3)], torch.tensor([0, 1])  # the second row sees the first bank's key
    for positive_in_denominator in (True, False):
        options = {"filled": (None, count(0)), "own_M": own, "positive_in_denominator": positive_in_denominator}
        loss_M, *gradients = with_gradients(function, inputs, banks, 0.5, **options)
        assert loss_M[0] == 0 and loss_M[1] != 0
        assert all(not grad[0].any() and grad[1].all() for grad in gradients)
    for banks in ([torch.zeros(0, 3)], [torch.full((4, 3), math.nan)]):
        options = {"filled": [count(0)], "positive_in_denominator": False}
        assert all(not x.any() for x in with_gradients(function, inputs, banks, 0.5, **options))
    assert function(torch.zeros(0, 3), torch.zeros(0, 3), [torch.zeros(4, 3)], 0.5).shape == (0,)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("rising", [True, False])
def test_large_logits(function: Function, rising: bool) -> None:
    """Up to ±1e4, the largest in the last chunk or in the first: float32 against float64."""
    inputs = unit(3, 8, seed=1), unit(3, 8, seed=2)
    bank = 100 * unit(3000, 8, seed=3)
    bank = bank[(bank @ inputs[0][0]).argsort(descending=not rising)]
    expected = with_gradients(info_nce_torch, [x.double() for x in inputs], [bank.double()], 0.01)
    assert expected[0].max() > 1000
    assert_same(with_gradients(function, inputs, [bank], 0.01), expected, atol=1e-3, rtol=1e-5)


def test_small_losses_keep_their_digits() -> None:
    """A positive that has almost all of the softmax: what is left of 1 must not be rounded away."""
    query, bank = torch.eye(4)[:2] * 30, torch.eye(4)[2:]
    ours = with_gradients(info_nce_chunked, (query, query / 30), [bank], 1.0)
    expected = with_gradients(info_nce_chunked, (query.double(), query.double() / 30), [bank.double()], 1.0)
    assert 0 < expected[0].max() < 1e-12
    assert_same(ours, expected, atol=0, rtol=1e-5)


# What holds whatever the numbers are.


@pytest.mark.parametrize("function", BOTH)
def test_order_and_division_of_keys_do_not_matter(function: Function) -> None:
    inputs, bank = (normal(5, 6, seed=1), normal(5, 6, seed=2)), normal(40, 6, seed=3)
    once = with_gradients(function, inputs, [bank], 0.3)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert_same(with_gradients(function, inputs, [bank[order]], 0.3), once)
    assert_same(with_gradients(function, inputs, [bank[:7], bank[7:8], bank[8:]], 0.3), once)
    hidden = torch.cat([bank, normal(9, 6, seed=4)])
    assert_same(with_gradients(function, inputs, [hidden], 0.3, filled=[count(40)]), once)


@pytest.mark.parametrize("function", BOTH)
def test_strided_input(function: Function) -> None:
    query, positive, bank = normal(6, 5, seed=1).T, normal(5, 12, seed=2)[:, ::2], normal(6, 20, seed=3).T
    strided = function(query.requires_grad_(), positive, [bank], 0.4)
    straight = function(query.contiguous(), positive.contiguous(), [bank.contiguous()], 0.4)
    assert_same([strided], [straight])
    assert_same(torch.autograd.grad(strided.sum(), query), torch.autograd.grad(straight.sum(), query))


@pytest.mark.parametrize("function", BOTH)
def test_a_temperature_may_learn(function: Function) -> None:
    query, positive, banks = normal(3, 4, seed=1), normal(3, 4, seed=2), [normal(6, 4, seed=3)]
    warm = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: function(query, positive, banks, t), warm)


@pytest.mark.parametrize("function", BOTH)
def test_banks_may_be_written_before_backward(function: Function) -> None:
    banks, filled = [unit(300, 8, seed=3), unit(40, 8, seed=4), unit(50, 8, seed=5).half()], [count(200), None, None]
    untouched = with_gradients(function, (unit(5, 8, seed=1), unit(5, 8, seed=2)), banks, 0.2, filled=filled)
    query, positive = (unit(5, 8, seed=seed).requires_grad_() for seed in (1, 2))
    loss_M = function(query, positive, banks, 0.2, filled=filled)
    for bank in banks:
        bank.fill_(math.nan)
    filled[0].zero_()  # type: ignore[union-attr]
    loss_M.backward(normal(5, seed=9).float())
    assert torch.equal(query.grad, untouched[1]) and torch.equal(positive.grad, untouched[2])


@pytest.mark.parametrize("function", BOTH)
def test_the_same_bits_every_time(function: Function) -> None:
    inputs, banks = (unit(64, 32, seed=1), unit(64, 32, seed=2)), [unit(5000, 32, seed=3)]
    first = with_gradients(function, inputs, banks, 0.2)
    torch.use_deterministic_algorithms(True)
    try:
        again = with_gradients(function, inputs, banks, 0.2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# Types.

# Largest error from storing unit keys in half precision: of a loss, and of the query's gradient relative to its length.
BUDGET = {torch.float16: (5e-4, 3e-4), torch.bfloat16: (4e-3, 2e-3)}


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("temperature", [0.2, 0.07])
def test_half_banks(function: Function, dtype: torch.dtype, temperature: float) -> None:
    inputs, bank = (unit(32, 128, seed=1), unit(32, 128, seed=2)), unit(4096, 128, seed=3)
    half = bank.to(dtype)
    stored, widened = (with_gradients(function, inputs, [b], temperature) for b in (half, half.float()))
    assert all(torch.equal(a, b) for a, b in zip(stored, widened, strict=True))
    loss, grad, _ = with_gradients(function, inputs, [bank], temperature)
    assert 0 < (stored[0] - loss).abs().max() < BUDGET[dtype][0]
    assert 0 < (stored[1] - grad).norm() / grad.norm() < BUDGET[dtype][1]


@pytest.mark.parametrize("function", BOTH)
def test_autocast_changes_nothing(function: Function) -> None:
    inputs, banks = (unit(8, 16, seed=1), unit(8, 16, seed=2)), [unit(100, 16, seed=3), unit(9, 16, seed=4).bfloat16()]
    plain = with_gradients(function, inputs, banks, 0.2)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        loss_M = function(*leaves, banks, 0.2)
    assert loss_M.dtype == torch.float32 and torch.equal(loss_M, plain[0])
    loss_M.backward(normal(8, seed=9).float())
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, plain[1:], strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        halves = with_gradients(function, [x.bfloat16() for x in inputs], banks, 0.2)
    assert [x.dtype for x in halves] == [torch.float32, torch.bfloat16, torch.bfloat16]
    exact = with_gradients(function, [x.bfloat16().float() for x in inputs], banks, 0.2)
    assert torch.equal(halves[0], exact[0]) and torch.equal(halves[2], exact[2].bfloat16())


@pytest.mark.parametrize("function", BOTH)
def test_one_double_makes_it_double(function: Function) -> None:
    query, positive, bank = unit(3, 4, seed=1), unit(3, 4, seed=2), unit(9, 4, seed=3)
    double = function(query.double(), positive.double(), [bank.double()], 0.2)
    assert torch.equal(function(query.double(), positive, [bank], 0.2), double)
    assert function(query, positive, [bank.double()], 0.2).dtype == torch.float32


# Memory and work.


class Watch(TorchDispatchMode):
    """The operations that ran, and the most elements that one of them returned in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor._base is None and not any(tensor is x for x in args):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.fixture
def transparent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Watch look into the operator."""
    monkeypatch.setattr(infonce, "_operator", infonce.sweep)


@pytest.mark.usefixtures("transparent")
def test_the_sweep_never_holds_the_logits_nor_a_bank() -> None:
    inputs, banks = (unit(24, 16, seed=1), unit(24, 16, seed=2)), [unit(3000, 16, seed=seed).half() for seed in (3, 4)]
    kept: list[Tensor] = []
    with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        with_gradients(info_nce_chunked, inputs, banks, 0.2, chunk=100, filled=[count(2000), None])
    assert watch.largest == 24 * 100
    assert [x.numel() for x in kept] == [24 * 16] * 2
    with Watch() as watch:
        with_gradients(info_nce_torch, inputs, banks, 0.2)
    assert watch.largest >= 24 * 6000


@pytest.mark.usefixtures("transparent")
def test_no_gradient_no_second_product() -> None:
    query, positive, banks = unit(4, 8, seed=1), unit(4, 8, seed=2), [unit(50, 8, seed=3)]
    with Watch() as watch:
        loss_M = info_nce_chunked(query.requires_grad_(), positive, banks, 0.2)
    assert loss_M.requires_grad and "addmm_" in watch.names
    with Watch() as watch, torch.no_grad():
        assert torch.equal(info_nce_chunked(query, positive, banks, 0.2), loss_M)
    assert "mm" in watch.names and "addmm_" not in watch.names
    with Watch() as watch:
        info_nce_chunked(query.detach(), positive.requires_grad_(), banks, 0.2).sum().backward()
    assert positive.grad is not None and "addmm_" not in watch.names


# As a training step calls it.


@pytest.mark.parametrize("impl", ["torch", "chunked", "cpu"])
def test_compiles_in_one_graph(impl: Any) -> None:
    """With the bank written in the same graph, and autocast on."""

    def step(query: Tensor, positive: Tensor, bank: Tensor, filled: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss_M = ops.info_nce(normalize(query, dim=1), positive, [bank], 0.2, filled=[filled], impl=impl)
            bank[:5] = positive
            return loss_M.mean() * 2

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        query, bank = normal(5, 8, seed=1).float().requires_grad_(), unit(40, 8, seed=3)
        loss = function(query, unit(5, 8, seed=2), bank, count(30))
        results.append([loss.detach(), *torch.autograd.grad(loss, query), bank])
    assert_same(results[0], results[1], atol=1e-6, rtol=1e-5)
    assert torch.equal(results[0][2][:5], unit(5, 8, seed=2))


def test_opcheck() -> None:
    query, banks = unit(3, 4), [unit(5, 4, seed=1), unit(0, 4).half()]
    for wanted in ([True, True], [False, True], [False, False]):
        arguments = (query, query + 1, banks, [count(4), None], torch.tensor([0, 1, 2]), True, 2, wanted)
        torch.library.opcheck(torch.ops.fastcssl.info_nce_chunked.default, arguments)


def test_the_chunked_sweep_refuses_what_it_has_not() -> None:
    query, bank = unit(2, 4).requires_grad_(), unit(5, 4, seed=1)
    with pytest.raises(ValueError, match="a bank requires a gradient"):
        ops.info_nce(query, query, [query], 0.2, impl="chunked")
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        info_nce_chunked(query, query, [bank], 0.2, chunk=0)


@pytest.mark.parametrize("function", BOTH)
def test_faults_are_named(function: Function) -> None:
    good: dict[str, Any] = {"query": unit(3, 4), "positive": unit(3, 4), "banks": [unit(5, 4)], "temperature": 0.2}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"query": unit(4)}, r"query must be .*float32 \[4\]"),
        ({"query": torch.ones(3, 4, dtype=torch.int64)}, "query must be .*int64"),
        ({"positive": unit(2, 4)}, r"positive must be .*\[3, 4\] as query, but is float32 \[2, 4\]"),
        ({"positive": torch.ones(3, 4, dtype=torch.bool)}, "positive must be floats"),
        ({"banks": unit(5, 4)}, "banks must be a sequence"),
        ({"banks": []}, "at least one"),
        ({"banks": [unit(5, 4), unit(4, 5)]}, r"bank 1 must be floats \[K, 4\], but is float32 \[4, 5\]"),
        ({"banks": [torch.ones(5, 4, dtype=torch.uint8)]}, "bank 0 must be floats"),
        ({"banks": [torch.ones(5, 4, device="meta")]}, "bank 0 is on meta, but query is on cpu"),
        ({"temperature": 0.0}, "temperature must be positive, but is 0.0"),
        ({"temperature": -1}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive, but is nan"),
        ({"temperature": torch.ones(2)}, r"temperature must be a number or floats \[3\]"),
        ({"filled": [count(1), count(2)]}, "each of 1 banks, but has 2"),
        ({"filled": [torch.tensor([3])]}, r"filled\[0\] must be None or a 0-d int64 tensor, but is int64 \[1\]"),
        ({"own_M": torch.zeros(2, dtype=torch.int64)}, r"own must be int64 \[3\]"),
        ({"own_M": torch.zeros(3)}, "own must be int64"),
    ]
    for changed, words in faults:
        arguments = {**good, **changed}
        positional = [arguments.pop(key) for key in good]
        with pytest.raises(ValueError, match=words):
            function(*positional, **arguments)
