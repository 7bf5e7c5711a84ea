"""Rings on a card: as plain torch writes them, after the sweep has read the old rows, inside a CUDA graph."""

import pytest
import torch
from torch import Tensor

from fastcssl import ops
from fastcssl.doctor import peers
from fastcssl.learn.memory import Bank

pytestmark = pytest.mark.gpu

TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # one step of a number up to 1


def ring_of(size: int, dim: int, dtype: torch.dtype, device: str) -> Bank:
    ring = Bank(size, dim, view=0, dtype=dtype)
    ring.to(torch.device(device))
    return ring


def assert_same(mine: Bank, plain: Bank, dtype: torch.dtype) -> None:
    assert int(mine.pointer) == int(plain.pointer) and int(mine.filled) == int(plain.filled)
    difference = (mine.rows_KD.cpu().float() - plain.rows_KD.cpu().float()).abs().max()
    assert difference <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("size", "dim", "counts"),
    [(40, 64, (16, 16, 16, 3)), (7, 128, (20, 1, 7)), (256, 8, (256, 100, 200)), (9, 256, (9,))],
)
def test_around_the_end(size: int, dim: int, counts: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    mine, plain = ring_of(size, dim, dtype, device), ring_of(size, dim, dtype, "cpu")
    generator = torch.Generator().manual_seed(size)
    for count in counts:
        keys = torch.randn(count, dim, generator=generator)
        keys[0] = 0  # of no direction: stays zero
        ops.enqueue(mine.rows_KD, keys.to(device), mine.pointer, mine.filled, impl=device)
        ops.enqueue(plain.rows_KD, keys, plain.pointer, plain.filled, impl="torch")
        assert_same(mine, plain, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_sweep_reads_the_old_rows(dtype: torch.dtype, device: str) -> None:
    given = peers.problem(64, 128, (96, 500), dtype=dtype, device=device)
    rings = [ring_of(size, 128, dtype, device) for size in (96, 500)]
    for ring, bank in zip(rings, given.banks, strict=True):
        ring.rows_KD.copy_(bank)
        ring.filled.fill_(len(bank))
    keys = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(device)
    query = given.query_ND.clone().requires_grad_()
    for number in range(3):
        before = [ring.rows_KD.clone() for ring in rings]
        expected = peers.ours()(given._replace(banks=tuple(before)))
        loss_M = ops.info_nce_enqueue(
            query,
            given.positive_ND,
            [ring.rows_KD for ring in rings],
            0.2,
            [keys + number, None],
            [rings[0].pointer, None],
            filled=[ring.filled for ring in rings],
            impl=device,
        )
        (gradient,) = torch.autograd.grad(loss_M.sum(), query)
        assert torch.equal(loss_M.detach(), expected[0]) and torch.equal(gradient, expected[1])
        assert torch.equal(before[1], rings[1].rows_KD)
        assert not torch.equal(before[0], rings[0].rows_KD)
        assert int(rings[0].pointer) == 64 * (number + 1) % 96


def test_a_graph_replays_sweep_and_enqueue(card: str) -> None:
    """Captured once, replayed with other inputs: the pointer moves on inside the graph."""
    given = peers.problem(256, 128, (1000, 3000), dtype=torch.float16, device=card)
    rings = [ring_of(size, 128, torch.float16, card) for size in (1000, 3000)]
    query, keys = given.query_ND.clone(), torch.randn(256, 128, device=card)

    def step(on: list[Bank]) -> tuple[Tensor, Tensor]:
        leaf = query.detach().requires_grad_()
        loss_M = ops.info_nce_enqueue(
            leaf,
            given.positive_ND,
            [ring.rows_KD for ring in on],
            0.2,
            [keys, keys],
            [ring.pointer for ring in on],
            filled=[ring.filled for ring in on],
        )
        return loss_M.detach(), torch.autograd.grad(loss_M.sum(), leaf)[0]

    plain = [ring_of(size, 128, torch.float16, card) for size in (1000, 3000)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step([ring_of(size, 128, torch.float16, card) for size in (1000, 3000)])  # warm-up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_M, gradient = step(rings)
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        query.copy_(torch.nn.functional.normalize(torch.randn(256, 128, generator=generator), dim=1))
        keys.copy_(torch.randn(256, 128, generator=generator))
        expected = step(plain)
        graph.replay()
        assert torch.equal(loss_M, expected[0]) and torch.equal(gradient, expected[1]), number
        for mine, other in zip(rings, plain, strict=True):
            assert torch.equal(mine.rows_KD, other.rows_KD) and torch.equal(mine.pointer, other.pointer)
            assert torch.equal(mine.filled, other.filled)


def test_nothing_waits_for_the_card(card: str) -> None:
    ring, keys = ring_of(100, 128, torch.float32, card), torch.randn(64, 128, device=card)
    ring.push(keys)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            ring.push(keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(ring.pointer) == 4 * 64 % 100
