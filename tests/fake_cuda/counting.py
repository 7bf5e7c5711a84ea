"""Counts what a piece of code launches on fake CUDA, and finds where it would wait for the device.

A host synchronisation is a copy between host and device that the host waits for, or an operator whose result's shape or
value the host must know. `FakeTensorMode` itself refuses `.item()` and `nonzero`, unless `fake_card` allows waits.
"""

from collections import Counter as Bag
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
_METADATA = {"prim::device", "detach", "alias", "lift_fresh", "_unsafe_view", "is_same_size", "sym_size"}
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "is_nonzero"}


@dataclass
class Counts:
    """What was dispatched: device operations and collectives by name, and each wait for the device by its cause."""

    ops: Bag[str] = field(default_factory=Bag)
    collectives: Bag[str] = field(default_factory=Bag)
    waits: list[str] = field(default_factory=list)
    convolutions_in: set[str] = field(default_factory=set)  # the types that convolutions computed in


def is_on_device(value: Any) -> bool:
    """Returns whether this is a tensor of the fake card."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


class Counter(TorchDispatchMode):
    """Counts inside its block. Views, allocations and metadata launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given, made = tree_leaves((args, kwargs)), tree_leaves(result)
        if not any(map(is_on_device, given)) and not any(map(is_on_device, made)):
            return result
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.counts.collectives[name] += 1
            return result
        if (cause := self._wait(name, func, given, made, kwargs)) is not None:
            self.counts.waits.append(cause)
        if name == "convolution":
            self.counts.convolutions_in.add(str(args[0].dtype))
        if not func.is_view and name not in _ALLOCATIONS | _METADATA:
            self.counts.ops[name] += 1
        return result

    def _wait(self, name: str, func: Any, given: list[Any], made: list[Any], kwargs: dict[str, Any]) -> str | None:
        if name in _WAITING or (name == "index" and any(t.dtype == torch.bool for t in _tensors(given)[1:])):
            return name
        if name in ("copy_", "_to_copy", "_copy_from"):
            positional = dict(zip((a.name for a in func._schema.arguments), given, strict=False))
            devices = {t.device.type for t in (*_tensors(given), *_tensors(made))}
            if devices == {"cpu", "cuda"} and not kwargs.get("non_blocking", positional.get("non_blocking", False)):
                return f"{name} between host and device"
        return None


def _tensors(values: list[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


@contextmanager
def counted() -> Iterator[Counts]:
    """Yields the counts of the block, complete when it ends."""
    with Counter() as counter:
        yield counter.counts
