"""Saves and restores torch's random generators: the CPU's, and the training device's, which dropout draws from."""

from typing import Any

import torch

from fastcssl.distributed.world import World


def random_state(world: World, device: torch.device) -> dict[str, Any]:
    """Returns the states of all ranks' generators, for a checkpoint. Every rank must call it."""
    state: dict[str, Any] = {"rng": world.collect(torch.get_rng_state())}
    if device.type == "cuda":
        state["cuda_rng"] = world.collect(torch.cuda.get_rng_state(device))  # the state is kept by the host
    return state


def restore_random_state(state: dict[str, Any], world: World, device: torch.device) -> None:
    """Restores this rank's generators as far as the checkpoint has them.

    A rank that did not exist then keeps its own, and so does a GPU if the checkpoint was written on a CPU or by a
    version that did not save it.
    """
    if world.rank < len(state["rng"]):
        torch.set_rng_state(state["rng"][world.rank])
    on_gpus = state.get("cuda_rng", [])
    if device.type == "cuda" and world.rank < len(on_gpus):
        torch.cuda.set_rng_state(on_gpus[world.rank], device)
