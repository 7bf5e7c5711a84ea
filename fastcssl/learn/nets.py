"""Encoders and their heads: how they are built, seeded and switched between training and evaluation.

encoders.py knows the names. A ResNet is torchvision's own class with `fc` an identity: its state dict loads strictly
into `torchvision.models.resnet18()` treated alike, and the other way round.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from fastcssl.learn.encoders import EncoderConfig, untrained

ANY_SIZE_PX = 224  # to build an encoder that takes images of any size


@contextmanager
def seeded(seed: int, what: str) -> Iterator[None]:
    """Inside, initial weights are drawn for one named part; parts do not shift each other, nor anyone else's draws."""
    digest = hashlib.blake2b(f"{what} {seed}".encode(), digest_size=8).digest()
    # On the CPU, for weights that do not depend on the device. torch.manual_seed would also seed every GPU for good.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
        yield


def build_encoder(config: EncoderConfig, seed: int, size_px: int = ANY_SIZE_PX) -> nn.Module:
    """On the CPU, in train mode, with `num_features`, for images of `size_px`."""
    with seeded(seed, "encoder"):
        return untrained(config, size_px)


def mlp(dims: Sequence[int], *, norm: bool) -> nn.Sequential:
    """Linear layers from dims[0] to dims[-1]; between two of them a BatchNorm, if asked for, and a ReLU.

    `norm=False`, three dims: the projectors of MoCo and SimCLR. `norm=True`, three dims: BYOL's, and every predictor;
    four dims: those of Barlow Twins and VICReg. Draw its weights inside `seeded`.
    """
    if len(dims) < 2 or min(dims) < 1:
        raise ValueError(f"an MLP cannot have the dimensions {list(dims)}; give two or more, each at least 1.")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(dims):
        if layers:
            layers += [nn.BatchNorm1d(inputs), nn.ReLU()] if norm else [nn.ReLU()]
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


class Online(nn.Module):
    """What is trained: images -> (features h_NF, projection z_ND). MoCo's projection is of unit length."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, *, normalise: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.normalise = normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h_NF = self.encoder(x)
        z_ND = self.projector(h_NF)
        if self.normalise:
            # In float32 at least: a unit vector rounded to bfloat16 is 0.1 % too long or too short.
            z_ND = functional.normalize(z_ND.to(torch.promote_types(z_ND.dtype, torch.float32)), dim=1)
        return h_NF, z_ND


def activation_bytes(encoder: nn.Module, size_px: int, batch_size: int, dtype: torch.dtype) -> int:
    """What autograd keeps of one forward pass for its backward, the images included and the weights not.

    Counted on the meta device: nothing is computed or allocated. An estimate: workspaces and gradients come on top.
    """
    # In eval mode a synchronised BatchNorm keeps the same and asks neither for a GPU nor for other ranks.
    ghost = copy.deepcopy(encoder).to("meta", dtype).eval()
    images = torch.empty(batch_size, 3, size_px, size_px, dtype=dtype, device="meta")
    weights = {tensor.untyped_storage()._cdata for tensor in (*ghost.parameters(), *ghost.buffers())}
    kept = {}  # by storage: a tensor is often kept by two operations, or as a view

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        ghost(images)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode for a while. Afterwards each submodule has its own flag back, also where they differed."""
    flags = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


@contextmanager
def modes(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mode(module, training=training))
        yield
