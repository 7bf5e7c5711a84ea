"""Those whom the operator is compared with compute the same loss and gradient, and the oracle is right."""

import math
from typing import Any

import pytest
import torch

from fastcssl.doctor import peers
from fastcssl.doctor.peers import Errors, TwoGemms, problem
from fastcssl.ops.infonce import info_nce_torch

PEERS: dict[str, Any] = {
    "moco": peers.eager_moco,
    "logsumexp": peers.eager_logsumexp,
    "flash": peers.flash,
    "chunked": peers.chunked(100),
    "ours": peers.ours(),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_all_agree_with_float64(name: str, dtype: torch.dtype, temperature: float) -> None:
    given = problem(19, 32, (150, 37), dtype=dtype, temperature=temperature, num_clusters=4)
    expected = peers.oracle(given, rows=7)
    budget = Errors.of(peers.plain(given), expected).budget()
    assert Errors.of(PEERS[name](given), expected).over(budget) <= 1
    assert not any(tensor.requires_grad for tensor in (*PEERS[name](given), given.query_ND))


def test_the_oracle_is_autograds() -> None:
    given = problem(5, 8, (30, 4), temperature=0.3)
    leaf = given.query_ND.double().requires_grad_()
    loss = info_nce_torch(leaf, given.positive_ND.double(), [bank.double() for bank in given.banks], 0.3)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    found = peers.oracle(given, rows=2)
    torch.testing.assert_close(found[0], loss.detach())
    torch.testing.assert_close(found[1], gradient)


def test_the_two_products_are_what_they_say() -> None:
    given = problem(6, 8, (50, 7))
    keys = torch.cat(given.banks)
    for chunk in (0, 16, 50, 64):
        torch.testing.assert_close(TwoGemms(chunk)(given)[1], given.query_ND @ keys.T @ keys)


def test_wrong_numbers_exceed_the_budget() -> None:
    given = problem(6, 8, (50,))
    expected = peers.oracle(given)
    budget = Errors.of(peers.plain(given), expected).budget()
    loss, gradient = peers.plain(given)
    assert Errors.of((loss + 1e-4, gradient), expected).over(budget) > 1
    assert Errors.of((loss, gradient * 1.001), expected).over(budget) > 1
    assert Errors.of((loss, gradient * math.nan), expected).over(budget) == math.inf


def test_problems_are_unit_vectors_from_a_seed() -> None:
    given, again, other = (problem(4, 16, (9, 0), seed=seed, num_clusters=2) for seed in (1, 1, 2))
    assert torch.equal(given.query_ND, again.query_ND) and not torch.equal(given.query_ND, other.query_ND)
    for rows in (given.query_ND, given.positive_ND, given.banks[0]):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    assert given.num_keys == 9 and given.flop == 4 * 4 * 9 * 16
