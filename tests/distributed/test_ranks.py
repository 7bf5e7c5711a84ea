"""Two and four processes train what one process trains on the union of their batches, in float64."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import NUM_STEPS, Lab, followed
from processes import run
from small_runs import prepared

from fastcssl.distributed.world import World
from fastcssl.learn import methods, strategies

PAIRS = [(m, s) for m in methods.names() for s in strategies.names() if not strategies.find(s).union]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("ranks") / "data")


def _compare(of_ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for number, terms in enumerate(alone["terms"]):
        for name, value in terms.items():
            mean = torch.stack([found["terms"][number][name] for found in of_ranks]).mean()
            torch.testing.assert_close(
                mean, value, rtol=1e-7, atol=1e-9, msg=lambda m, n=name, i=number: f"{n} {i}: {m}"
            )
    for found in of_ranks:
        for name, gradient in alone["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-8, atol=1e-11)
        for name, rows in alone["banks"].items():
            torch.testing.assert_close(found["banks"][name], rows, rtol=1e-6, atol=1e-8)
            assert torch.equal(found["banks"][name], of_ranks[0]["banks"][name]), "banks differ between ranks"


@pytest.mark.parametrize(("method", "strategy"), PAIRS)
def test_ranks_train_as_one_process_would(method: str, strategy: str, data: Path) -> None:
    torch.set_num_threads(1)
    # Four processes on two cores mostly wait for each other: the long run is for banks, which must stay equal.
    for size, num_steps in ((2, NUM_STEPS), (4, NUM_STEPS if method == "moco" else 3)):
        alone = followed(World(), method, strategy, data, {}, num_steps)
        assert alone["gradients"]
        _compare(run(size, followed, method, strategy, data, {}, num_steps), alone)


@pytest.mark.parametrize(
    ("method", "settings"),
    [("moco", {"form": "paper"}), ("moco", {"pn1": False}), ("simclr", {"pn2": False})],
)
def test_so_do_pnrs_options(method: str, settings: dict[str, Any], data: Path) -> None:
    torch.set_num_threads(1)
    options = {"strategy_config": settings}
    _compare(run(2, followed, method, "pnr", data, options), followed(World(), method, "pnr", data, options))


def local_terms(world: World, data: Path) -> list[dict[str, Any]]:
    lab = Lab("simclr", "cassle", data, dataclasses.replace(world, scope="local"))
    terms = [lab.train() for _ in range(2)]
    lab.close()
    return terms


def test_the_local_scope_keeps_negatives_on_their_rank(data: Path) -> None:
    """8 of 16 samples: fewer negatives, a lower loss."""
    torch.set_num_threads(1)
    lab = Lab("simclr", "cassle", data)
    alone = lab.train()
    lab.close()
    ranks = run(2, local_terms, data)
    for name in ("loss", "align"):
        assert all(found[0][name] < alone[name] - 0.2 for found in ranks), name
