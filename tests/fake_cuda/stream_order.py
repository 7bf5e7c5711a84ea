"""Finds unordered accesses of CUDA streams, inside a process that has the fake runtime preloaded.

Each stream and the host has a vector clock, as in a race detector for threads. An operator joins the clock of the host,
which launches it, to that of its stream; `record`, `wait` and `synchronize`, read from the runtime's log, carry clocks
between streams and to the host. Every storage remembers its last write and the reads since then. An access that is not
ordered after them raises `StreamRace`, which names both operators and both streams.

Device tensors are fake. Tensors on the CPU are real, pinned ones too, so that threads can fill them; `host_writes`
reports writes that torch does not see. Freed memory is checked as well: torch's allocator reuses it on the stream that
it was allocated on, unless `record_stream` named the others; memory of another library is reused at once (`lend`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fake_cuda import streams_log
from fake_cuda.streams_log import Kind

Actor = int | str  # the handle of a stream, or the host
Clock = Counter[Actor]  # `|=` takes the later time of each actor
HOST: Actor = "the host"
MAIN: Actor = 0
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_WAITS: dict[Kind, str] = {Kind.STREAM_SYNC: "stream", Kind.EVENT_SYNC: "event", Kind.DEVICE_SYNC: "device"}
_SYNCHRONIZE = ((torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize"))


class StreamRace(AssertionError):
    """Two accesses of one storage, at least one of them a write, that nothing orders."""


@dataclass(frozen=True, slots=True)
class _Access:
    actor: Actor
    time: int  # on the actor's own clock
    operator: str

    def is_before(self, clock: Clock) -> bool:
        return clock[self.actor] >= self.time


@dataclass(slots=True, eq=False)
class _Memory:
    """What happened to one storage, and who may overwrite it once it is freed: a stream, the host, or (None) nobody."""

    storage: StorageWeakRef
    owner: Actor | None
    write: _Access | None = None
    reads: dict[Actor, _Access] = field(default_factory=dict)  # since the write, the last one of each actor
    known_users: set[Actor] = field(default_factory=set)  # the streams that record_stream named


class StreamOrder(TorchDispatchMode):
    """While it is active, operators on "cuda" are fake, and each of their accesses is checked.

    waits: how often the host waited for the device, by cause.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._fake = FakeTensorMode()
        self._clocks: dict[Actor, Clock] = {HOST: Clock(), MAIN: Clock()}
        self._events: dict[int, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> "StreamOrder":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        streams_log.take()
        for owner, name in _SYNCHRONIZE:
            self._undo.append(self._catching_up(owner, name))
        super().__enter__()
        return self

    def _catching_up(self, owner: Any, name: str) -> Callable[[], None]:
        """Wraps a function that waits: memory that was freed before a wait is checked before it."""
        plain = getattr(owner, name)

        def caught_up(*arguments: Any) -> None:
            self.catch_up()
            plain(*arguments)
            self.catch_up()

        setattr(owner, name, caught_up)
        return lambda: setattr(owner, name, plain)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._undo:
            self._undo.pop()()

    # ---- For the tests -----------------------------------------------------------------------------------------------

    def host_writes(self, tensors: Iterable[torch.Tensor], by: str) -> None:
        """Reports that host code which torch does not see begins to write these tensors."""
        self.catch_up()
        self._tick(HOST)
        for tensor in tensors:
            self._write(self._memory_of(tensor, None), HOST, by)

    def lend(self, tensor: torch.Tensor) -> None:
        """Reports that the memory belongs to a library that may overwrite it as soon as the tensor is freed."""
        self._memory_of(tensor, HOST).owner = HOST

    @property
    def num_side_streams(self) -> int:
        """The number of streams beside the main one that ran an operator."""
        return sum(actor not in (HOST, MAIN) and clock[actor] > 0 for actor, clock in self._clocks.items())

    def catch_up(self) -> None:
        """Applies the calls since the last time, then checks the memory that was freed."""
        for kind, stream, event in streams_log.take():
            host, own = self._clocks[HOST], self._clocks.setdefault(stream, Clock())
            if kind is Kind.RECORD:
                self._events[event] = own | host
            elif kind is Kind.WAIT:
                own |= self._events.get(event, Clock())
            elif kind is Kind.STREAM_SYNC:
                host |= own
            elif kind is Kind.DEVICE_SYNC:
                for clock in list(self._clocks.values()):
                    host |= clock
            elif kind is Kind.EVENT_SYNC:
                host |= self._events.get(event, Clock())
            # EVENT_QUERY orders nothing: the fake runtime always answers "done", a card may not.
            if kind in _WAITS:
                self.waits[_WAITS[kind]] += 1
        freed = [key for key, memory in self._memory.items() if memory.storage.expired()]
        for memory in [self._memory.pop(key) for key in freed]:
            self._check_freed(memory)

    # ---- Operators ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a tensor's device or layout
            return func(*args, **kwargs)
        self.catch_up()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.record_stream.default:
            stream: torch.Stream = args[1]
            named = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            self._memory_of(args[0], None).known_users.add(named.cuda_stream)
            return None
        device = kwargs.get("device")
        is_fake = any(isinstance(x, FakeTensor) for x in given) or (device is not None and device.type == "cuda")
        if is_fake:
            with self._fake:
                result = func(*tree_map(_faked, args), **tree_map(_faked, kwargs))
        else:
            result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        on_device = any(x.is_cuda for x in (*given, *made))
        actor = torch.cuda.current_stream().cuda_stream if on_device else HOST
        self._tick(actor)
        if func in _COPIES and len({x.is_cuda for x in (*given, *made)}) == 2:
            self._copy(func, args, kwargs, made, actor)
        else:
            self._plain(func, args, kwargs, given, made, actor)
        return args[0] if func is torch.ops.aten.copy_.default else result

    def _plain(self, func: Any, args: Any, kwargs: Any, given: Any, made: Any, actor: Actor) -> None:
        schema = func._schema
        written: set[int] = set()
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {id(leaf) for leaf in tree_leaves(named.get(argument.name))}
        makes_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        old = {x.untyped_storage()._cdata for x in given}
        for tensor in given:
            if id(tensor) in written:
                self._write(self._memory_of(tensor, None), actor, str(func))
            elif not makes_view:
                self._read(self._memory_of(tensor, None), actor, str(func))
        for tensor in made:
            if tensor.untyped_storage()._cdata not in old:
                self._write(self._memory_of(tensor, actor if tensor.is_cuda else None), actor, str(func))

    def _copy(self, func: Any, args: Any, kwargs: Any, made: Any, actor: Actor) -> None:
        """A copy between host and device: one from pageable memory, or without non_blocking, holds up the host."""
        target, source = (made[0], args[0]) if func is _COPIES[0] else (args[0], args[1])
        non_blocking = kwargs.get("non_blocking", args[2] if func is _COPIES[1] and len(args) > 2 else False)
        host_side = target if source.is_cuda else source
        is_pinned = not isinstance(host_side, FakeTensor) and host_side.is_pinned()
        is_staged = non_blocking and not is_pinned and not source.is_cuda  # the driver copies the source first
        self._read(self._memory_of(source, None), HOST if is_staged else actor, str(func))
        self._write(self._memory_of(target, actor if target.is_cuda else None), actor, str(func))
        if not non_blocking:
            self._clocks[HOST] |= self._clocks[actor]
            self.waits["blocking copy"] += 1
        elif not is_pinned:
            self.waits["copy of pageable memory"] += 1

    # ---- Clocks and memory -------------------------------------------------------------------------------------------

    def _tick(self, actor: Actor) -> None:
        clock = self._clocks.setdefault(actor, Clock())
        clock |= self._clocks[HOST]
        clock[actor] += 1

    def _memory_of(self, tensor: torch.Tensor, owner: Actor | None) -> _Memory:
        storage = tensor.untyped_storage()
        return self._memory.setdefault(storage._cdata, _Memory(StorageWeakRef(storage), owner))

    def _read(self, memory: _Memory, actor: Actor, operator: str) -> None:
        access = _Access(actor, self._clocks[actor][actor], operator)
        if memory.write is not None and not memory.write.is_before(self._clocks[actor]):
            raise StreamRace(f"{self._said(access)} reads what {self._said(memory.write)} wrote, in no order")
        memory.reads[actor] = access

    def _write(self, memory: _Memory, actor: Actor, operator: str) -> None:
        access = _Access(actor, self._clocks[actor][actor], operator)
        for read in memory.reads.values():
            if not read.is_before(self._clocks[actor]):
                raise StreamRace(f"{self._said(access)} overwrites what {self._said(read)} reads, in no order")
        if memory.write is not None and not memory.write.is_before(self._clocks[actor]):
            raise StreamRace(f"{self._said(access)} overwrites what {self._said(memory.write)} wrote, in no order")
        memory.write, memory.reads = access, {}

    def _check_freed(self, memory: _Memory) -> None:
        if memory.owner is None:
            return
        clock = self._clocks[memory.owner] | self._clocks[HOST]
        for access in (*memory.reads.values(), *([memory.write] if memory.write else [])):
            is_known = memory.owner != HOST and access.actor in memory.known_users
            if not is_known and not access.is_before(clock):
                whose = "a library" if memory.owner == HOST else self._name(memory.owner)
                raise StreamRace(f"memory of {whose} was freed while {self._said(access)} may still use it")

    def _said(self, access: _Access) -> str:
        return f"{access.operator} on {self._name(access.actor)}"

    def _name(self, actor: Actor) -> str:
        if actor == HOST:
            return str(HOST)
        return "the main stream" if actor == MAIN else f"side stream {sorted(map(str, self._clocks)).index(str(actor))}"


def _faked(value: Any) -> Any:
    """Returns a tensor's shape without its values. FakeTensorMode itself would compute with small real tensors."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
