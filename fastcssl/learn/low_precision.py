"""A twin of a network that keeps its weights in the type in which autocast computes."""

import copy

import torch
from torch import Tensor, nn

from fastcssl.learn.nets import ViewPass

# Exactly these: a subclass may do more with its weight than multiply by it.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LowPrecisionTwin:
    """Computes what the network computes under autocast, bit for bit, without casting its weights in every pass.

    Autocast remembers its casts only for weights that are trained; those of other networks cost a launch per layer and
    pass. The twin's linear layers and convolutions have low-precision weights of their own, which `refresh` renews. All
    other layers, parameters and statistics are the network's.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        layers = [layer for layer in network.modules() if type(layer) in _CAST]
        own = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        shared: dict[int, object] = {id(t): t for t in (*network.parameters(), *network.buffers()) if id(t) not in own}
        for module in network.modules():
            if not any(type(part) in _CAST for part in module.modules()):
                shared[id(module)] = module
        self.network = copy.deepcopy(network, shared)
        self._weights: list[Tensor] = []
        self._casts: list[Tensor] = []
        for layer, twin in zip(layers, (m for m in self.network.modules() if type(m) in _CAST), strict=True):
            for name, parameter in layer.named_parameters(recurse=False):
                cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                setattr(twin, name, cast)
                self._weights.append(parameter)
                self._casts.append(cast)
        self.each = ViewPass(self.network)

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes over the network's weights, in one launch."""
        torch._foreach_copy_(self._casts, self._weights)
