"""Checkpoints hold the random generators of the CPU and of the training device."""

import fake_cuda
import torch

from fastcssl.distributed.world import World
from fastcssl.learn.random_state import random_state, restore_random_state

CPU = torch.device("cpu")


def test_the_cpus_generator_continues() -> None:
    state = random_state(World(), CPU)
    first = torch.rand(4)
    restore_random_state(state, World(), CPU)
    assert torch.equal(torch.rand(4), first) and set(state) == {"rng"}
    restore_random_state(state, World(1, 2), CPU)  # a rank that did not exist
    assert not torch.equal(torch.rand(4), first)


def test_a_gpus_generator_continues() -> None:
    """On a fake card: its generator lives on the host, so its state is real."""
    code = """
import torch
from fastcssl.distributed.world import World
from fastcssl.learn.random_state import random_state, restore_random_state
device = torch.device("cuda", 0)
torch.cuda.manual_seed(7)
state = random_state(World(), device)
torch.cuda.manual_seed(8)
assert torch.cuda.initial_seed() == 8
restore_random_state(state, World(), device)
assert torch.cuda.initial_seed() == 7
restore_random_state({"rng": state["rng"]}, World(), device)  # of an older version
assert torch.cuda.initial_seed() == 7
print(sorted(state))
"""
    assert fake_cuda.run(code) == "['cuda_rng', 'rng']\n"
