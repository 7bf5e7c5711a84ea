"""Two ranks on two cards, over NCCL: banks equal to the last bit, and a training that one rank would have made."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from small_runs import losses, prepared, run, tiny

from fastcssl.distributed.world import World, connected
from fastcssl.learn.encoder_file import load_encoder
from fastcssl.learn.memory import Bank

pytestmark = pytest.mark.gpu

STEPS, ROWS, SIZE, DIM = 20, 24, 100, 128
# Float32 rounds differently in two halves, and training amplifies that: more is allowed from step to step.
FIRST_LOSS, LOSSES, WEIGHTS = 1e-4, 1e-2, 2e-2


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


def train_on(rank: int, size: int, port: int, device: str, method: str, data: Path, out: Path) -> None:
    """One rank of a training, as torchrun would start it, without TF32, so that only the order of sums differs."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.backends.cudnn.allow_tf32 = False
    with connected("cpu" if device == "cpu" else "cuda") as (world, own):
        run(tiny(method, "pnr"), data, out, world=world, device=own)


@pytest.mark.parametrize("method", ["moco", "byol"])
def test_two_ranks_train_as_one_does(method: str, device: str, tmp_path: Path) -> None:
    """Losses of each step and the weights after a task: BatchNorm over ranks, gathered keys, averaged gradients."""
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two cards: NCCL takes one rank a card")
    data = prepared(tmp_path / "data")
    for size in (1, 2):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        out = tmp_path / f"ranks{size}"
        multiprocessing.spawn(train_on, args=(size, port, device, method, data, out), nprocs=size)
    alone, together = (losses(tmp_path / f"ranks{size}") for size in (1, 2))
    assert len(alone) == len(together) == 8
    for number, ((step, mine), (_, others)) in enumerate(zip(together[:4], alone[:4], strict=True)):  # the first task
        within = LOSSES if number else FIRST_LOSS
        for name, value in mine.items():
            assert value == pytest.approx(others[name], rel=within), f"{name} of step {step}"
    for (step, mine), (_, others) in zip(together[4:], alone[4:], strict=True):
        assert sum(mine.values()) == pytest.approx(sum(others.values()), rel=0.1), f"step {step}"
    one, two = (load_encoder(tmp_path / f"ranks{size}/encoders/task0.safetensors").state_dict() for size in (1, 2))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=WEIGHTS, atol=WEIGHTS, msg=key)
