"""Defines the state of a step besides the trained weights: slow copies, frozen copies and banks of keys.

These are plain objects, not modules: DDP and the optimiser must not see them, and `train()` on a method must not reach
them.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastcssl import ops
from fastcssl.learn.low_precision import LowPrecisionTwin
from fastcssl.learn.nets import ViewPass

AtTaskStart = Literal["keep", "reset", "prefill"]
Initial = Literal["empty", "random"]


class _NetworkCopy:
    """A copy of the trained network that gets no gradient."""

    def __init__(self, source: nn.Module) -> None:
        self.module = copy.deepcopy(source).requires_grad_(False)
        self._views = ViewPass(self.module)
        self._twin: LowPrecisionTwin | None = None  # built when autocast is first on

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    @torch.no_grad()
    def each(self, views: Sequence[Tensor]) -> Any:
        """Returns what `ViewPass` returns: for `Online`, the features of all views, then their projections."""
        kind = views[0].device.type
        # Compiled, the casts are fused anyway.
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled(kind):
            return self._views(views)
        dtype = torch.get_autocast_dtype(kind)
        if self._twin is None or self._twin.dtype != dtype:
            self._twin = LowPrecisionTwin(self.module, dtype)
        return self._twin.each(views)

    def to(self, device: torch.device) -> None:
        self._twin = None
        self.module.to(device)
        self.module.to(memory_format=torch.channels_last)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._twin = None
        self.module.load_state_dict(state)


class EmaCopy(_NetworkCopy):
    """A copy whose parameters follow slowly. It runs in train mode and keeps its own BatchNorm statistics."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__(source)
        self.module.train()

    @torch.no_grad()
    def update(self, source: nn.Module, tau: float) -> None:
        """Sets slow to tau slow + (1 - tau) source. As in the references, only parameters are updated, not buffers."""
        torch._foreach_lerp_(list(self.module.parameters()), list(source.parameters()), 1 - tau)
        if self._twin is not None:
            self._twin.refresh()


class FrozenCopy(_NetworkCopy):
    """The network at the end of the previous task. It never changes, nor do BatchNorm's running statistics.

    `batch_statistics`: normalise by each batch's own statistics, as CaSSLe's frozen network does.
    """

    def __init__(self, source: nn.Module, *, batch_statistics: bool = False) -> None:
        super().__init__(source)
        self.module.eval()
        if batch_statistics:
            for layer in self.module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()
                    layer.track_running_stats = False  # neither read nor written


class Bank:
    """A ring of the last `size` keys of one view. Keys have unit length and are the same on every rank.

    `push` writes it, and so does the sweep that reads it (`ops.info_nce_enqueue`). The pointer and the number of filled
    rows stay on the device, so nothing waits for the host. With `initial="random"` the bank starts full of random
    directions, as the references' queues do.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        view: int,
        initial: Initial = "empty",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.view, self.initial, self.seed = view, initial, seed
        self.rows_KD = torch.zeros(size, dim, dtype=dtype)
        self.pointer = torch.zeros((), dtype=torch.int64)  # the next row to write
        self.filled = torch.zeros((), dtype=torch.int64)  # rows that hold a key; the others are masked
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Resets the bank to its initial state."""
        self.pointer.zero_()
        self.filled.zero_()
        self.rows_KD.zero_()
        if self.initial == "random":
            generator = torch.Generator().manual_seed(self.seed)
            drawn_KD = torch.randn(self.rows_KD.shape, generator=generator, dtype=torch.float64)
            self.rows_KD.copy_(functional.normalize(drawn_KD, dim=1))
            self.filled.fill_(len(self.rows_KD))

    def push(self, keys_GD: Tensor) -> None:
        """Overwrites the oldest keys with new ones, gathered over ranks. Of more keys than rows, the last ones stay."""
        ops.enqueue(self.rows_KD, keys_GD, self.pointer, self.filled)

    def to(self, device: torch.device) -> None:
        self.rows_KD, self.pointer, self.filled = (x.to(device) for x in (self.rows_KD, self.pointer, self.filled))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows_KD, "pointer": self.pointer, "filled": self.filled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in ((self.rows_KD, "rows"), (self.pointer, "pointer"), (self.filled, "filled")):
            if mine.shape != state[saved].shape:
                shapes = f"{list(state[saved].shape)}, this one has {list(mine.shape)}"
                raise ValueError(f"the saved bank has {saved} {shapes}; use the same size.")
            mine.copy_(state[saved])


Memory = EmaCopy | FrozenCopy | Bank


def fill(banks: list[Bank], embed: Callable[[Tensor], Tensor], batches: Any, gather: Callable[[Tensor], Tensor]) -> int:
    """Fills empty banks with each view's embeddings until they are full or the batches end. Returns the rows filled."""
    size, pushed = max(len(bank.rows_KD) for bank in banks), 0
    for batch in batches:
        keys = [gather(embed(view)) for view in batch.views]
        for bank in banks:
            bank.push(keys[bank.view])
        pushed += len(gather(batch.label))
        if pushed >= size:
            break
    return min(pushed, size)
