"""Tells a process its place among those that train together, and lets them communicate.

Each rank computes its own loss, and training minimises the mean of these losses: DDP averages the gradients of the
weights. A loss may look at the rows of other ranks. For the mean to stay correct then, the collectives here sum the
gradients over all ranks. Every rank must bring the same number of rows.

Shapes: N rows on this rank, G rows over all ranks, ordered by rank.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dataprep.progress import counted
from fastcssl.distributed.peer_watch import Communicators, PeerWatch
from fastcssl.errors import UserError

Scope = Literal["global", "local"]
DeviceKind = Literal["auto", "cpu", "cuda"]

# The words with which gloo and its store report a lost peer. NCCL has its own error types.
_GONE = re.compile(r"connection|timed out|timeout|broken pipe|socket|pair closure", re.IGNORECASE)
_WHERE = re.compile(r"^\[\S+:\d+\] ")  # the C++ source line that precedes gloo's messages
_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+:\d+\]")  # that line, if a connection failed


_peers: PeerWatch | None = None  # between connect() and disconnect(), on GPUs


class RankLost(RuntimeError):
    """Raised when a rank that this one was waiting for is gone, or did not respond within the timeout."""


class Agreed(Exception):
    """All ranks raise this together, so shutting down cannot hang."""


@contextmanager
def watched(action: str, *, by_type: bool = False) -> Iterator[None]:
    """Converts the error that a collective, or DDP's backward pass, raises for a lost peer into RankLost.

    by_type: do not look for words such as "timeout" in an error, only at its type and at whether gloo's transport
    raised it; for blocks that do more than communicate.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankLost):
            raise
        is_known = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or _TRANSPORT.search(str(error))
        if not is_known and (by_type or not _GONE.search(str(error))):
            raise
        reason = _WHERE.sub("", str(error).strip().splitlines()[0]).split(". ")[0].rstrip(".")
        raise _lost(action, reason) from error


def _lost(action: str, reason: str) -> RankLost:
    return RankLost(
        f"Another rank was lost during {action} ({reason}). The first error in the output of the other ranks says why."
    )


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among the ranks, and the collectives between them.

    A World works without a process group as long as nothing is sent: a loader needs only the numbers.

    scope: "global" lets in-batch negatives and statistics span all ranks. "local" keeps them on this rank, as the
    released multi-GPU code does.
    """

    rank: int = 0
    size: int = 1
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} does not exist in a world of {self.size}")
        if self.scope not in ("global", "local"):
            raise ValueError(f"scope is {self.scope!r}; use 'global' or 'local'.")

    @property
    def count(self) -> int:
        """The number of ranks that the scope spans."""
        return self.size if self.scope == "global" else 1

    def first_row(self, num_local: int) -> int:
        """Returns the index of this rank's first row in the result of `gather`."""
        return self.rank * num_local if self.count > 1 else 0

    def gather(self, x_N: Tensor) -> Tensor:
        """Returns the rows of all ranks in the scope. The result is differentiable."""
        return cast(Tensor, _Gather.apply(x_N, self)) if self.count > 1 else x_N

    def gather_keys(self, x_N: Tensor) -> Tensor:
        """Returns the rows of all ranks, whatever the scope, without gradient. This keeps banks equal on every rank."""
        return self.collect_rows(x_N.detach()) if self.size > 1 else x_N.detach()

    def total(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks in the scope. The result is differentiable."""
        return cast(Tensor, _Total.apply(x, self)) if self.count > 1 else x

    def agree(self, code: int) -> int:
        """Returns the largest code of all ranks. The exchange runs on the CPU, so it does not wait for a GPU."""
        if self.size == 1:
            return code
        largest = torch.tensor(code)
        with self._group("agreement"):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def barrier(self) -> None:
        """Waits until all ranks have arrived here."""
        self.agree(0)

    def share(self, text: str) -> str:
        """Returns rank 0's text on every rank."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode(errors="surrogateescape")), dtype=torch.uint8)
        length = torch.tensor(len(data))
        with self._group("sharing a text"):
            dist.broadcast(length, src=0)
            if self.rank:
                data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=0)
        return bytes(data.tolist()).decode(errors="surrogateescape")

    def collect(self, tensor: Tensor) -> list[Tensor]:
        """Returns a copy of every rank's tensor. All ranks must pass tensors of the same shape."""
        if self.size == 1:
            return [tensor.detach().clone()]
        return [other.clone() for other in self.collect_rows(tensor.detach()[None])]

    def collect_rows(self, x_N: Tensor) -> Tensor:
        """Returns the rows of all ranks, whatever the scope. Autograd does not see it."""
        x_G = x_N.new_empty(self.size * len(x_N), *x_N.shape[1:])
        with self._group("gather"):
            dist.all_gather_single(x_G, x_N.contiguous())
        return x_G

    def _own_rows_of_total(self, x_G: Tensor) -> Tensor:
        x_N = x_G.new_empty(len(x_G) // self.size, *x_G.shape[1:])
        with self._group("the backward of gather"):
            dist.reduce_scatter_single(x_N, x_G.contiguous())
        return x_N

    def add_over_ranks(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks, whatever the scope. Autograd does not see it."""
        return self.add_over_ranks_(x.clone(memory_format=torch.contiguous_format))

    def add_over_ranks_(self, x: Tensor) -> Tensor:
        """Adds up over all ranks in place, and returns the same tensor."""
        with self._group("total"):
            dist.all_reduce(x)
        return x

    @contextmanager
    def _group(self, action: str) -> Iterator[None]:
        """Checks that torch's default process group is the group of this world, and watches the collective inside."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"Rank {self.rank} of {self.size} is not connected to the others; "
                "start with torchrun and call fastcssl.distributed.world.connect() first."
            )
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise RuntimeError(
                f"This is rank {dist.get_rank()} of {dist.get_world_size()}, not {self.rank} of {self.size}; "
                "use the World that connect() returned."
            )
        # Communicators that were aborted leave wrong values behind: nobody may save or agree on them.
        if _peers is not None and (reason := _peers.trouble()):
            raise _lost(action, reason)
        with watched(action):
            yield


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.collect_rows(x_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_G: Tensor) -> tuple[Tensor, None]:
        return ctx.world._own_rows_of_total(grad_G), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.add_over_ranks(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.world.add_over_ranks(grad), None


def connect(device_kind: DeviceKind = "auto", *, timeout_s: float = 600.0) -> tuple[World, torch.device]:
    """Connects this process to the other ranks and returns its World and device.

    The place comes from the environment variables that torchrun sets. Without them the process is alone. A rank that
    keeps the others waiting for longer than the timeout counts as lost.
    """
    if device_kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"The device is {device_kind!r}; use 'auto', 'cpu' or 'cuda'.")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    absent = [key for key in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if size > 1 and absent:
        raise RuntimeError(f"WORLD_SIZE is {size}, but {', '.join(absent)} is not set. Start with torchrun.")
    world = World(int(os.environ.get("RANK", "0")), size)
    device = _device(device_kind, int(os.environ.get("LOCAL_RANK", "0")))
    if size > 1:
        # With GPUs the group has both back ends. The tensor's device selects one, so flags on the CPU bypass NCCL.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            # After an error or a timeout torch aborts the communicators (2), not the process (its default, 3).
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        with watched("connecting"):
            dist.init_process_group(backend, rank=world.rank, world_size=size, timeout=timedelta(seconds=timeout_s))
            if device.type == "cuda":
                _watch_peers(world)
    return world, device


def _watch_peers(world: World) -> None:
    global _peers
    _peers = PeerWatch(world.rank, world.size, _nccl)


def _nccl() -> Communicators:
    group = dist.group.WORLD
    assert group is not None
    return cast(Communicators, group._get_backend(torch.device("cuda")))


@contextmanager
def connected(device_kind: DeviceKind = "auto", *, timeout_s: float = 600.0) -> Iterator[tuple[World, torch.device]]:
    """Connects for the duration of a block. A process group that already exists is used and left open.

    If one rank fails, the group is not shut down, because that would wait for ranks that may be gone.
    """
    if dist.is_available() and dist.is_initialized():
        device = _device(device_kind, int(os.environ.get("LOCAL_RANK", "0")))
        yield World(dist.get_rank(), dist.get_world_size()), device
        return
    try:
        place = connect(device_kind, timeout_s=timeout_s)
    except RankLost:
        raise
    except RuntimeError as error:  # the GPU does not exist, or the environment is incomplete
        raise UserError(str(error)) from None
    try:
        yield place
    except Agreed:
        disconnect()
        raise
    disconnect()


def _device(kind: DeviceKind, local_rank: int) -> torch.device:
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        seen = counted(num_gpus, "GPU") if num_gpus else "no GPU"
        raise RuntimeError(
            f"This process needs GPU {local_rank} (counted from 0), but it sees {seen}. Start one process per GPU, or "
            "use --device cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def disconnect() -> None:
    """Shuts the process group down, if there is one."""
    global _peers
    if _peers is not None:
        _peers.close()
        _peers = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
