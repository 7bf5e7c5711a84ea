"""The compiled InfoNCE on the CPU: each instruction set against float64 and beside plain torch, on awkward shapes.

The budget: at most twice the error of plain torch in the same types, plus 1e-5. Half banks are rounded for all alike.
"""

import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fastcssl import ops
from fastcssl.ops.infonce import info_nce_torch

NAMES = ["avx512", "avx2", "portable"]
CSRC = Path(__file__).parents[2] / "csrc"
each_isa, threaded = pytest.mark.usefixtures("isa"), pytest.mark.usefixtures("threads")


@pytest.fixture(params=NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in NAMES[NAMES.index(ops.info_nce_isa("auto")) :]:
        pytest.skip(f"this processor has no {request.param}")
    assert ops.info_nce_isa(request.param) == request.param
    yield request.param
    ops.info_nce_isa("auto")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> Tensor:
    return normalize(normal(*shape, seed=seed), dim=-1)


def count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def run(impl: Any, dtype: torch.dtype, inputs: Sequence[Tensor], banks: Sequence[Tensor], *args: Any, **kw: Any) -> Any:
    """The losses and the gradients of their weighted sum, in float64."""
    leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
    banks = [bank.to(dtype) for bank in banks] if dtype == torch.float64 else banks
    loss_M = ops.info_nce(*leaves, banks, *args, impl=impl, **kw)
    loss_M.backward(1 + torch.arange(len(loss_M), device=loss_M.device, dtype=dtype) / 7)
    return [x.double() for x in (loss_M.detach(), *(leaf.grad for leaf in leaves))]  # type: ignore[union-attr]


def assert_within_budget(inputs: Sequence[Tensor], banks: Sequence[Tensor], temperature: Any, **options: Any) -> None:
    exact = run("torch", torch.float64, inputs, banks, temperature, **options)
    plain = run("torch", torch.float32, inputs, banks, temperature, **options)
    ours = run("cpu", torch.float32, inputs, banks, temperature, **options)
    for name, a, b, c in zip(("loss", "by query", "by positive"), ours, plain, exact, strict=True):
        assert torch.isfinite(c).all()
        allowed = 2 * (b - c).abs().max() + 1e-5
        assert (a - c).abs().max() <= allowed, f"{name}: {(a - c).abs().max():.2e} of {allowed:.2e}"


# (rows, width, sizes of the banks): around every number of lanes, panels, keys in registers and keys of a tile
SHAPES: list[tuple[int, int, list[int]]] = [
    (1, 1, [1]),
    (1, 128, [1000]),
    (7, 16, [119, 0]),
    (7, 123, [507]),
    (8, 64, [121, 7]),
    (17, 30, [240, 241]),
    (33, 128, [25, 2]),
    (49, 24, [130]),
    (65, 9, [59]),
    (252, 128, [1000, 1001]),
    (252, 256, [100]),
    (600, 5, [300, 1]),
    (300, 300, [61]),
]


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, list[int]]) -> None:
    rows, dim, sizes = shape
    banks = [unit(size, dim, seed=3 + b) for b, size in enumerate(sizes)]
    assert_within_budget((unit(rows, dim, seed=1), unit(rows, dim, seed=2)), banks, 0.2)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.05, 0.07, 0.2, 1.0, "rows"])
def test_temperatures_and_types(dtype: torch.dtype, temperature: Any) -> None:
    inputs, banks = (
        (unit(20, 33, seed=1), unit(20, 33, seed=2)),
        [unit(400, 33, seed=3).to(dtype), unit(90, 33, seed=4)],
    )
    if temperature == "rows":
        temperature = torch.linspace(0.05, 1, 20)
    for positive_in_denominator in (True, False):
        assert_within_budget(inputs, banks, temperature, positive_in_denominator=positive_in_denominator)


@each_isa
@threaded
@pytest.mark.parametrize("positive_in_denominator", [True, False])
def test_hidden_keys(positive_in_denominator: bool) -> None:
    """Never filled, or a row's own. What is hidden may hold anything, or be by far the largest."""
    inputs, banks = (unit(60, 16, seed=1), unit(60, 16, seed=2)), [unit(130, 16, seed=3), 40 * unit(300, 16, seed=4)]
    own = torch.arange(60) * 4 - 3
    banks[0][own[1:31]] = 1000 * inputs[0][1:31]
    options: dict[str, Any] = {"own_M": own, "positive_in_denominator": positive_in_denominator}
    for filled in ([None, count(250)], [count(121), count(0)], [count(120), count(1)], [count(999), count(-1)]):
        hidden = [bank.clone() for bank in banks]
        for bank, limit in zip(hidden, filled, strict=True):
            if limit is not None:
                bank[max(0, int(limit)) :] = math.nan
        assert_within_budget(inputs, hidden, 0.5, filled=filled, **options)


@each_isa
def test_a_row_that_sees_no_key() -> None:
    inputs, banks = (unit(3, 4, seed=1), unit(3, 4, seed=2)), [unit(1, 4), unit(5, 4)]
    for positive_in_denominator in (True, False):
        options = {"filled": (None, count(0)), "own_M": torch.tensor([0, 1, 0])}
        loss, *gradients = run(
            "cpu", torch.float32, inputs, banks, 0.5, positive_in_denominator=positive_in_denominator, **options
        )
        assert (loss != 0).tolist() == [False, True, False]
        assert all((grad != 0).any(dim=1).tolist() == [False, True, False] for grad in gradients)
        for none in ([], [unit(0, 4)]):
            (loss,) = (x for x in run("cpu", torch.float32, inputs, [*none, unit(0, 4)], 0.5)[:1])
            assert not loss.any()


@each_isa
@threaded
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_large_logits(order: str) -> None:
    """Up to ±1e4: what was summed is scaled down again and again, or all that comes later vanishes."""
    inputs, bank = (unit(5, 8, seed=1), unit(5, 8, seed=2)), 100 * unit(3000, 8, seed=3)
    if order != "shuffled":
        bank = bank[(bank @ inputs[0][0]).argsort(descending=order == "falling")]
    exact = run("torch", torch.float64, inputs, [bank], 0.01)
    assert exact[0].max() > 5000
    for ours, theirs in zip(run("cpu", torch.float32, inputs, [bank], 0.01), exact, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-5)


@each_isa
def test_duplicates_and_zeros() -> None:
    inputs, bank = (unit(9, 20, seed=1), unit(9, 20, seed=2)), unit(500, 20, seed=3)
    bank[100:350] = inputs[1][0]  # a key many times, which is a positive too
    bank[350:] = 0
    inputs[0][1] = 0
    inputs[1][2] = 0
    assert_within_budget(inputs, [bank, bank], 0.1)
    loss = run("cpu", torch.float32, inputs, [torch.zeros(500, 20)], 0.1)[0]
    torch.testing.assert_close(loss[1], torch.tensor(501.0, dtype=torch.float64).log(), rtol=1e-6, atol=0)


@each_isa
def test_small_losses_keep_their_digits() -> None:
    query, bank = torch.eye(4)[:2] * 30, torch.eye(4)[2:]
    inputs = (query, query / 30)
    exact = run("chunked", torch.float64, inputs, [bank], 1.0)
    assert 0 < exact[0].max() < 1e-12
    for ours, theirs in zip(run("cpu", torch.float32, inputs, [bank], 1.0), exact, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-5)


@each_isa
def test_what_is_not_a_number_is_not_hidden() -> None:
    query, bank = unit(20, 8, seed=1), unit(200, 8, seed=3)
    bank[150, 3] = math.nan
    assert ops.info_nce(query, query, [bank], 0.2, impl="cpu").isnan().all()
    assert ops.info_nce(query, query, [bank], 0.2, filled=[count(150)], impl="cpu").isfinite().all()
    query[7, 0] = math.nan
    loss = ops.info_nce(query, query, [bank[:150]], 0.2, impl="cpu")
    assert loss.isnan().nonzero().flatten().tolist() == [7]


@each_isa
def test_strided_input() -> None:
    inputs = normal(16, 50, seed=1).T, normal(50, 32, seed=2)[:, ::2]
    banks = [normal(16, 200, seed=3).T, normal(60, 32, seed=4)[::2, 16:]]
    strided = run("cpu", torch.float32, inputs, banks, 2.0)
    straight = run("cpu", torch.float32, [x.contiguous() for x in inputs], [b.contiguous() for b in banks], 2.0)
    assert all(torch.equal(a, b) for a, b in zip(strided, straight, strict=True))


@each_isa
def test_halves_are_widened_exactly() -> None:
    """Subnormal and large numbers, and lengths that fill no vector."""
    inputs = (unit(6, 3, seed=1), unit(6, 3, seed=2))
    for dtype in (torch.float16, torch.bfloat16):
        bank = torch.cat([normal(77, 3, seed=3), 1e-6 * normal(11, 3, seed=4), 300 * unit(3, 3, seed=5)]).to(dtype)
        stored, wide = (run("cpu", torch.float32, inputs, [b], 30.0) for b in (bank, bank.float()))
        assert all(torch.equal(a, b) for a, b in zip(stored, wide, strict=True))


@each_isa
def test_threads_give_the_same_bits_every_time() -> None:
    inputs, banks = (
        (unit(70, 32, seed=1), unit(70, 32, seed=2)),
        [unit(3000, 32, seed=3), unit(1000, 32, seed=4).half()],
    )
    before, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5, 64):
            torch.set_num_threads(number)
            results.append(run("cpu", torch.float32, inputs, banks, 0.1))
            assert all(
                torch.equal(a, b)
                for _ in range(3)
                for a, b in zip(results[-1], run("cpu", torch.float32, inputs, banks, 0.1), strict=True)
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@each_isa
def test_only_what_is_wanted() -> None:
    query, positive, banks = unit(20, 8, seed=1), unit(20, 8, seed=2), [unit(300, 8, seed=3)]
    both = run("cpu", torch.float32, (query, positive), banks, 0.2)
    sweep = torch.ops.fastcssl.info_nce_sweep
    for wanted in ([True, False], [False, True], [False, False]):
        loss, *gradients = sweep(query / 0.2, positive, banks, [None], None, True, wanted, False)
        assert torch.equal(loss.double(), both[0])
        assert [len(g) for g in gradients] == [20 * wants for wants in wanted]
    with torch.no_grad():
        assert torch.equal(ops.info_nce(query.requires_grad_(), positive, banks, 0.2).double(), both[0])


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    for name in ("info_nce_torch", "info_nce_chunked", "info_nce_by"):
        original = getattr(ops, name)

        def record(*arguments: Any, name: str = name, original: Any = original, **options: Any) -> Tensor:
            chosen.append(name.removeprefix("info_nce_"))
            return original(*arguments, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(ops, name, record)
    query, bank, own = unit(2, 4), unit(5, 4, seed=1), torch.tensor([0, 1])
    cases: list[tuple[Any, ...]] = [
        (query.clone().requires_grad_(), [bank], {}, "by"),
        (query, [bank], {"own_M": own}, "by"),
        (query.bfloat16(), [bank.half(), bank.bfloat16()], {"impl": "cpu"}, "by"),
        (query.double(), [bank], {}, "chunked"),
        (query, [bank.double()], {}, "chunked"),
        (query, [bank, bank.clone().requires_grad_()], {}, "torch"),
        (query, [bank], {"impl": "torch"}, "torch"),
        (query, [bank], {"impl": "chunked"}, "chunked"),
    ]
    for x, banks, options, expected in cases:
        ops.info_nce(x, x, banks, 0.2, **options)
        assert chosen[-1] == expected
    for x, banks, impl, words in (
        (query, [bank], "fast", "impl is 'fast'; use 'auto', 'cuda', 'cpu', 'chunked' or 'torch'"),
        (query, [bank], "cuda", "impl is 'cuda', but query is on cpu. Use impl='chunked'"),
        (query.double(), [bank], "cpu", "it does not compute in float64"),
        (query, [bank.double()], "cpu", "float32, float16 and bfloat16 banks, not float64"),
        (query, [bank.clone().requires_grad_()], "cpu", "a bank requires a gradient"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.info_nce(x, x, banks, 0.2, impl=impl)  # type: ignore[arg-type]
    monkeypatch.setattr(ops, "_PATH", None)
    ops.info_nce(query, query, [bank], 0.2)
    assert chosen[-1] == "chunked"
    with pytest.raises(ValueError, match="installed without its compiled operators"):
        ops.info_nce(query, query, [bank], 0.2, impl="cpu")


def test_the_operator_refuses_what_it_cannot_read() -> None:
    good: list[Any] = [unit(3, 4), unit(3, 4), [unit(5, 4)], [None], None, True, [True, True], False]
    faults: list[tuple[int, Any, str]] = [
        (0, unit(3), r"scaled must be float32 \[M, D\], but is \[3\]"),
        (0, unit(3, 4).double(), "scaled must be float32"),
        (1, unit(3, 5), r"positive must be float32 \[3, 4\] as scaled, on its device, but is \[3, 5\]"),
        (2, [unit(5, 3)], r"a bank must be \[K, 4\] on the rows' device, but is \[5, 3\]"),
        (2, [unit(5, 4).double()], "a bank must be float32, float16 or bfloat16"),
        (3, [], "filled must have an entry for each of 1 banks"),
        (3, [torch.zeros(1, dtype=torch.int64)], "filled must be a 0-d int64 tensor"),
        (4, torch.zeros(2, dtype=torch.int64), r"own must be int64 \[3\]"),
        (6, [True], "wanted must have 2 values"),
    ]
    torch.ops.fastcssl.info_nce_sweep(*good)
    for place, value, words in faults:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.fastcssl.info_nce_sweep(*good[:place], value, *good[place + 1 :])


def test_gradients_are_those_of_the_definition() -> None:
    """By finite differences of the definition in float64, at the kernel's own inputs."""
    banks, warm = [unit(7, 4, seed=3), unit(5, 4, seed=4)], torch.tensor([0.3, 1.0, 2.0])
    query, positive = unit(3, 4, seed=1), unit(3, 4, seed=2)
    _, by_query, by_positive = run("cpu", torch.float32, (query, positive), banks, warm)
    wide = [bank.double() for bank in banks]

    def total(q: Tensor, p: Tensor) -> Tensor:
        weight = 1 + torch.arange(3, dtype=torch.float64) / 7
        return (weight * info_nce_torch(q, p, wide, warm.double())).sum()

    step = 1e-6
    for mine, place in ((by_query, 0), (by_positive, 1)):
        for i in range(3):
            for d in range(4):
                ends = []
                for sign in (1, -1):
                    inputs = [query.double(), positive.double()]
                    inputs[place][i, d] += sign * step
                    ends.append(total(*inputs))
                assert abs((ends[0] - ends[1]) / (2 * step) - mine[i, d]) < 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_under_the_sanitizers(tmp_path: Path) -> None:
    """Every path on ragged shapes, each array alone in memory: nothing is read or written beside it."""
    program = tmp_path / "sweep"
    sources = [CSRC / "infonce" / f"infonce_{name}.cpp" for name in ("cpu", "avx2", "avx512", "portable")]
    flags = ["-std=c++17", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    here = Path(__file__).with_name("sweep_main.cpp")
    subprocess.run(["g++", *flags, f"-I{CSRC}", here, *sources, "-lpthread", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sweeps" in done.stdout
