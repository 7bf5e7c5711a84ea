"""Builds and seeds encoders and their heads, and switches them between training and evaluation.

encoders.py has the names. A ResNet is torchvision's own class with `fc` replaced by an identity. Its state dict loads
strictly into `torchvision.models.resnet18()` with the same replacement, and the other way round.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from fastcssl.distributed.batchnorm import ViewBatchNorm
from fastcssl.learn.encoders import EncoderConfig, untrained

ANY_SIZE_PX = 224  # for building an encoder that takes images of any size


@contextmanager
def seeded(seed: int, what: str) -> Iterator[None]:
    """Seeds the initial weights of one named part. Parts affect neither each other's draws nor any other draws."""
    digest = hashlib.blake2b(f"{what} {seed}".encode(), digest_size=8).digest()
    # On the CPU, so weights do not depend on the device. torch.manual_seed would also reseed every GPU permanently.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
        yield


def build_encoder(config: EncoderConfig, seed: int, size_px: int = ANY_SIZE_PX) -> nn.Module:
    """Returns an encoder for images of `size_px`, on the CPU, in train mode, with `num_features`."""
    with seeded(seed, "encoder"):
        return untrained(config, size_px)


def mlp(dims: Sequence[int], *, norm: bool) -> nn.Sequential:
    """Returns linear layers from dims[0] to dims[-1], with a ReLU, and with `norm` a BatchNorm, between them.

    The projectors of MoCo and SimCLR have three dims and `norm=False`. BYOL's projector and every predictor have three
    dims and `norm=True`. The projectors of Barlow Twins and VICReg have four dims and `norm=True`. Call this inside
    `seeded`, which makes the weights reproducible.
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
    """The trained network: images -> (features h_NF, projection z_ND). `normalise` gives z unit length, for MoCo."""

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


class ViewPass:
    """Passes several views through a network together: one pass per view size.

    Each view is normalised by its own statistics, so the results are those of separate passes. They need not be
    bit-identical, because a convolution may add in another order for a larger batch. A network with a BatchNorm that
    does not know views takes them one by one.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        norms = [layer for layer in network.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        self._norms = [layer for layer in norms if isinstance(layer, ViewBatchNorm)]
        self._stacked = list({id(layer.views): layer.views for layer in self._norms}.values())
        self._together = len(self._norms) == len(norms)

    def __call__(self, views: Sequence[Tensor]) -> Any:
        """Returns one tensor per view, or one such tuple per output of a network that has several."""
        found: list[Any] = [None] * len(views)
        for places in _of_one_shape(views) if self._together else [[place] for place in range(len(views))]:
            for place, part in zip(places, self._passed([views[place] for place in places]), strict=True):
                found[place] = part
        return tuple(zip(*found, strict=True)) if isinstance(found[0], tuple) else tuple(found)

    def _passed(self, views: list[Tensor]) -> Iterable[Any]:
        for stacked in self._stacked:
            stacked.count = len(views)
        try:
            output = self.network(side_by_side(views))
        finally:
            for stacked in self._stacked:
                stacked.count = 0
        self._count(len(views))
        if isinstance(output, tuple):
            return zip(*(part.chunk(len(views)) for part in output), strict=True)
        return cast(Tensor, output).chunk(len(views))

    def _count(self, num_views: int) -> None:
        """Counts the batches that the layers have tracked: one launch for all of them."""
        tracked = [layer.num_batches_tracked for layer in self._norms if layer.training and layer.track_running_stats]
        if counters := [counter for counter in tracked if counter is not None]:
            torch._foreach_add_(counters, num_views)


def _of_one_shape(views: Sequence[Tensor]) -> list[list[int]]:
    """Returns the places of the views, those of one shape together."""
    places: dict[torch.Size, list[int]] = {}
    for place, view in enumerate(views):
        places.setdefault(view.shape, []).append(place)
    return list(places.values())


def adjacent(views: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the views, copied where needed so that those of one shape lie side by side in memory."""
    found = list(views)
    for places in _of_one_shape(views):
        if len(places) > 1:
            for place, part in zip(
                places, side_by_side([views[place] for place in places]).chunk(len(places)), strict=True
            ):
                found[place] = part
    return tuple(found)


def side_by_side(views: Sequence[Tensor]) -> Tensor:
    """Returns the views stacked along the batch, without a copy if they already lie side by side in memory."""
    if len(views) == 1:
        return views[0]
    if not torch.compiler.is_compiling():
        base = views[0]._base
        if base is not None and not base.requires_grad and all(view._base is base for view in views):
            laid_out = [(view.shape, view.stride(), view.storage_offset()) for view in views]
            if laid_out == [(part.shape, part.stride(), part.storage_offset()) for part in base.chunk(len(views))]:
                return base
    return torch.cat(list(views))


def activation_bytes(encoder: nn.Module, size_px: int, batch_size: int, dtype: torch.dtype) -> int:
    """Returns how many bytes autograd keeps from a forward pass for the backward pass.

    This includes the images but not the weights. It is counted on the meta device, so nothing is computed or allocated.
    It is an estimate: workspaces and gradients need more memory.
    """
    # In eval mode a synchronised BatchNorm keeps the same bytes and needs neither a GPU nor other ranks.
    ghost = copy.deepcopy(encoder).to("meta", dtype).eval()
    images = torch.empty(batch_size, 3, size_px, size_px, dtype=dtype, device="meta")
    weights = {tensor.untyped_storage()._cdata for tensor in (*ghost.parameters(), *ghost.buffers())}
    kept = {}  # by storage, because two operations often keep the same tensor, or a view of it

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        ghost(images)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Switches a module to train or eval mode inside a block, then restores the flag of each submodule."""
    flags = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


@contextmanager
def modes(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Does the same as `mode` for several modules."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mode(module, training=training))
        yield
