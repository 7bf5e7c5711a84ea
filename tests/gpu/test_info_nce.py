"""The contrastive sweep on a card: values and gradients against float64, within twice plain torch's error and 1e-5."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastcssl import ops
from fastcssl.doctor import peers
from fastcssl.doctor.peers import Errors
from fastcssl.ops.infonce import info_nce_torch

pytestmark = pytest.mark.gpu

TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows, width, banks: whole tiles; nothing whole; one row; a bank smaller than the batch; an empty one; few rows.
SHAPES = (
    (256, 128, (4096, 4096)),
    (252, 64, (5000, 333)),
    (1, 256, (77,)),
    (96, 128, (40, 1000)),
    (7, 8, (129, 0)),
    (64, 248, (2049,)),
)


def required(device: str) -> Any:
    missing = ops.missing(device, "info_nce_sweep")
    assert missing is None, missing
    return device


def tf32_or_half(given: peers.Problem) -> peers.Answer:
    """Plain torch, rounded as the sweep may round under "high": TF32, or the type that the banks have."""
    half = given.banks[0].dtype
    if half == torch.float32:
        return peers.plain(given)
    leaf = given.query_ND.detach().requires_grad_()
    scaled_ND = leaf / given.temperature
    positive_N = (scaled_ND * given.positive_ND).sum(dim=1)
    logits = [(scaled_ND.to(half) @ bank.T).float() for bank in given.banks]
    loss_N = torch.cat([positive_N[:, None], *logits], dim=1).logsumexp(dim=1) - positive_N
    loss_N.sum().backward()
    assert leaf.grad is not None
    return loss_N.detach(), leaf.grad


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_stay_within_the_budget(
    shape: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, temperature: float, precision: str, device: str
) -> None:
    rows, dim, banks = shape
    given = peers.problem(
        rows, dim, banks, dtype=dtype, temperature=temperature, device=device, num_clusters=20, seed=rows + dim
    )
    expected = peers.oracle(given)
    torchs = peers.plain(given) if precision == "highest" else tf32_or_half(given)
    mine = Errors.of(peers.ours(required(device))(given), expected)
    assert mine.over(Errors.of(torchs, expected).budget()) <= 1, (mine, Errors.of(torchs, expected))


def leaves(given: peers.Problem) -> tuple[Tensor, Tensor]:
    return given.query_ND.clone().requires_grad_(), given.positive_ND.clone().requires_grad_()


def gradients(function: Any, given: peers.Problem, **options: Any) -> list[Tensor]:
    query, positive = leaves(given)
    temperature = options.pop("temperature", given.temperature)
    loss_M = function(query, positive, given.banks, temperature, **options)
    weights = torch.linspace(0.5, 2, len(loss_M), device=loss_M.device)
    return [loss_M.detach(), *torch.autograd.grad((loss_M * weights).sum(), (query, positive))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inside", [True, False])
def test_masks_temperatures_and_positives(dtype: torch.dtype, inside: bool, device: str) -> None:
    torch.set_float32_matmul_precision("highest")
    given = peers.problem(70, 128, (300, 45), dtype=dtype, device=device, num_clusters=5)
    given.banks[1][20:] = math.nan  # never filled: may hold anything
    options = {
        "filled": [None, torch.tensor(20, device=device)],
        "own_M": torch.arange(70, device=device) * 5,
        "positive_in_denominator": inside,
        "temperature": torch.linspace(0.05, 1, 70, device=device),
    }
    mine = gradients(ops.info_nce, given, impl=required(device), **options)
    plain = gradients(info_nce_torch, given, **options)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_a_query_that_sees_nothing(device: str) -> None:
    given = peers.problem(5, 64, (30,), device=device)
    empty = [torch.zeros((), dtype=torch.int64, device=device)]
    for found in gradients(ops.info_nce, given, impl=required(device), filled=empty):
        assert not found.any()


def test_strided_input_and_zero_vectors_and_duplicates(device: str) -> None:
    torch.set_float32_matmul_precision("highest")
    given = peers.problem(64, 128, (500,), device=device)
    bank = given.banks[0]
    bank[100:400] = bank[0]
    wide = torch.zeros(64, 256, device=device)
    wide[:, ::2] = given.query_ND
    wide[3] = 0
    strided = given._replace(query_ND=wide[:, ::2], banks=(bank.T.contiguous().T,))
    straight = given._replace(query_ND=wide[:, ::2].contiguous())
    for a, b in zip(gradients(ops.info_nce, strided), gradients(info_nce_torch, straight), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_the_same_bits_every_time(device: str) -> None:
    given = peers.problem(512, 128, (20_000, 20_000), dtype=torch.float16, device=device)
    first = peers.ours(required(device))(given)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(peers.ours(required(device))(given), first, strict=True))


def test_nothing_waits_for_the_card(card: str) -> None:
    given = peers.problem(256, 128, (4096, 4096), dtype=torch.float16, device=card)
    peers.ours("cuda")(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        peers.ours("cuda")(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_with_the_banks(card: str) -> None:
    peaks = []
    for size in (8192, 131_072):
        given = peers.problem(256, 128, (size, size), dtype=torch.float16, device=card)
        peers.ours("cuda")(given)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peers.ours("cuda")(given)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # A float for each split, row and column: what fills the card, however many keys there are.
    num_sm = torch.cuda.get_device_properties(0).multi_processor_count
    assert max(peaks) < 4 * num_sm * 256 * (128 + 2) * 4 * 2


def test_more_than_two_to_the_31_numbers(card: str) -> None:
    """Offsets are 64 bits wide: the one key that matters lies behind 4 GB."""
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of free memory on the card")
    rows = 2**31 // 128 + 1000
    bank = torch.zeros(rows, 128, dtype=torch.float16, device=card)
    query = torch.zeros(8, 128, device=card)
    query[:, 0] = 1
    bank[-1, 0] = 1
    loss_M = ops.info_nce(query, query, [bank], 0.05, impl="cuda")
    expected = math.log(2 + (rows - 1) * math.exp(-20))
    torch.testing.assert_close(loss_M.cpu(), torch.full((8,), expected), atol=1e-3, rtol=1e-3)


def test_tensors_on_two_devices_are_refused(card: str) -> None:
    given = peers.problem(4, 64, (10,), device=card)
    with pytest.raises(ValueError, match=r"bank 0 is on cpu, but query is on cuda"):
        ops.info_nce(given.query_ND, given.positive_ND, [given.banks[0].cpu()], 0.2)


def test_the_second_card(card: str) -> None:
    """Work goes to the tensors' card, whichever is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards")
    del card
    given = peers.problem(64, 128, (1000,), device="cuda:1")
    first = peers.problem(64, 128, (1000,), device="cuda:0")
    for a, b in zip(peers.ours("cuda")(given), peers.ours("cuda")(first), strict=True):
        assert a.device.index == 1
        torch.testing.assert_close(a.cpu(), b.cpu(), atol=1e-6, rtol=1e-6)


def test_compiled_in_one_graph(card: str) -> None:
    given = peers.problem(64, 128, (1000,), dtype=torch.float16, device=card)
    plain = peers.ours("cuda")(given)

    def loss(query: Tensor) -> Tensor:
        return ops.info_nce(query, given.positive_ND, given.banks, given.temperature)

    leaf = given.query_ND.clone().requires_grad_()
    found = torch.compile(loss, fullgraph=True)(leaf)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), plain[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(leaf.grad, plain[1], atol=1e-6, rtol=1e-6)
