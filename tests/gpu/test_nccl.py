"""Two ranks on two cards, over NCCL: their banks stay equal to the last bit, and are what one process would hold."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from fastcssl.distributed.world import World
from fastcssl.learn.memory import Bank

pytestmark = pytest.mark.gpu

STEPS, ROWS, SIZE, DIM = 20, 24, 100, 128


def keys_of(step: int) -> torch.Tensor:
    return torch.randn(2 * ROWS, DIM, generator=torch.Generator().manual_seed(step))


def follow(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world, device = World(rank, 2), torch.device("cuda", rank)
    bank = Bank(SIZE, DIM, view=0)
    bank.to(device)
    for step in range(STEPS):
        bank.push(world.gather_keys(keys_of(step).chunk(2)[rank].to(device)))
    torch.save({name: value.cpu() for name, value in bank.state_dict().items()}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_banks_are_equal_on_both_ranks(card: str, tmp_path: Path) -> None:
    del card
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two cards: NCCL takes one rank a card")
    multiprocessing.spawn(follow, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = Bank(SIZE, DIM, view=0)
    alone.to(torch.device("cuda"))
    for step in range(STEPS):
        alone.push(keys_of(step).cuda())
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], value.cpu()), name
