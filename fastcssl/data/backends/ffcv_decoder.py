"""Adapts FFCV to many files and tasks: one decode gives all views of a sample, and each file has one thread.

FFCV's own decoder ignores whether libjpeg succeeded, uses the fast inverse DCT and resizes only with INTER_AREA. Ours
calls the native engine's code, so the crops are the same to the bit. It is compiled once per process and captures no
array, because numba would freeze its contents. Boxes, sizes and output addresses arrive with every call, in the buffers
that FFCV passes to its operations.

At most B rows per call, N rows, V views.
"""

import ctypes
import importlib
import math
import queue
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Condition, Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastcssl.data import _native

numba: Any = importlib.import_module("numba")
numba_typed: Any = importlib.import_module("numba.typed")


@contextmanager
def _kept_settings() -> Iterator[None]:
    """Restores the thread counts of torch and numba, which FFCV changes when it is imported and in each Loader."""
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it imports distutils, and tries to pin memory without a GPU
            yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)


@contextmanager
def _plain_dicts() -> Iterator[None]:
    """Replaces numba's dictionary, which takes seconds to compile. FFCV only reads two constants from it in Python."""
    compiled = numba_typed.Dict
    numba_typed.Dict = dict
    try:
        yield
    finally:
        numba_typed.Dict = compiled


with _kept_settings(), _plain_dicts():
    from ffcv.loader import Loader, OrderOption
    from ffcv.loader.epoch_iterator import EpochIterator
    from ffcv.pipeline import Compiler, PipelineSpec
    from ffcv.pipeline.allocation_query import AllocationQuery
    from ffcv.pipeline.operation import Operation

# Statuses of the engine. -1 means damage, or another size than the table says.
NO_MEMORY = -2
LOST = -3  # the file no longer has the bytes that were mapped

_compiled: Callable[..., Any] = numba.njit(nogil=True)
_crop_jpeg: Any = ctypes.CDLL(_native.__file__).fastcssl_crop_jpeg  # csrc/views/cropper.cpp
_crop_jpeg.argtypes, _crop_jpeg.restype = [ctypes.c_int64] * 7, ctypes.c_int64


# ---- One sample ------------------------------------------------------------------------------------------------------


@_compiled
def crop_jpeg(jpeg: Any, height: int, width: int, box_V4: Any, target_V3: Any) -> Any:
    """Decodes once and writes each view to its (size in pixels, address, filter). Returns 0, or an error status."""
    box, target = box_V4.ctypes.data, target_V3.ctypes.data
    return _crop_jpeg(jpeg.ctypes.data, jpeg.size, width, height, len(box_V4), box, target)


# ---- FFCV's operation ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _decode_batch(parallel: bool) -> Any:
    """Returns the compiled decoder. A parallel loop takes longer to compile, so one thread does without it."""
    each = numba.prange if parallel else range

    def decode(row_N: Any, memory: Any, image_S: Any, storage: Any) -> Any:
        box_BV4, target_BV3, status_B = memory
        content, start_S, num_bytes_S = storage
        for i in each(len(row_N)):
            image = image_S[row_N[i]]
            start = image["data_ptr"]
            num_bytes = num_bytes_S[np.searchsorted(start_S, start)]
            jpeg = content[start : start + num_bytes]
            status_B[i] = crop_jpeg(
                jpeg, np.int64(image["height"]), np.int64(image["width"]), box_BV4[i], target_BV3[i]
            )
        return status_B

    return numba.njit(nogil=True, parallel=parallel)(decode)


class ViewsDecoder(Operation):  # type: ignore[misc]
    """An FFCV operation that returns one status per row and writes the pixels to the given addresses."""

    def __init__(self, num_views: int, *, parallel: bool) -> None:
        super().__init__()
        self._num_views, self._parallel = num_views, parallel

    def declare_state_and_memory(self, previous_state: Any) -> tuple[Any, Any]:
        queries = (
            AllocationQuery((self._num_views, 4), np.dtype(np.float32)),
            AllocationQuery((self._num_views, 3), np.dtype(np.int64)),
            AllocationQuery((), np.dtype(np.int32)),
        )
        return replace(previous_state, jit_mode=True, shape=(), dtype=np.dtype(np.int32)), queries

    def generate_code(self) -> Any:
        return _decode_batch(self._parallel)


# ---- Threads ---------------------------------------------------------------------------------------------------------


class Threads:
    """Limits the number of threads that all files together use."""

    def __init__(self, wanted: int) -> None:
        self.total = max(1, min(wanted, numba.config.NUMBA_NUM_THREADS))
        numba.get_num_threads()  # has numba choose its threading layer
        self._one_caller = numba.threading_layer() == "workqueue"  # that layer aborts when two threads use it
        self._free, self._changed = self.total, Condition()

    @contextmanager
    def taken(self, share: float) -> Iterator[int]:
        """Takes threads for a share of a batch: the same share of all threads, at least one."""
        number = self.total if self._one_caller else min(self.total, math.ceil(share * self.total))
        with self._changed:
            self._changed.wait_for(lambda: self._free >= number)
            self._free -= number
        try:
            yield number
        finally:
            with self._changed:
                self._free += number
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPart:
    """The rows of one batch that lie in one file."""

    place_N: npt.NDArray[np.int64]  # in the batch
    row_N: npt.NDArray[np.int64]  # in the file
    box_NV4: npt.NDArray[np.float32]
    target_NV3: npt.NDArray[np.int64]  # size in pixels, address, filter: csrc/views/cropper.cpp
    share: float  # of the batch
    status_N: Future[npt.NDArray[np.int32]] = field(default_factory=Future)


class BetonReader(EpochIterator):  # type: ignore[misc]
    """FFCV's epoch thread, changed to an endless epoch that takes parts of batches as they come.

    Thus nothing is compiled, allocated or started again for another epoch or task. Errors arrive in the part's future,
    whereas FFCV's own loop would leave its consumer waiting indefinitely.
    """

    def __init__(self, loader: Any, threads: Threads) -> None:
        self._parts: queue.SimpleQueue[BatchPart | None] = queue.SimpleQueue()
        self._threads = threads
        super().__init__(loader, [])  # starts the thread

    def submit(self, part: BatchPart) -> None:
        """Queues a part of a batch. Its statuses arrive in its future."""
        self._parts.put(part)

    def run(self) -> None:
        while (part := self._parts.get()) is not None:
            if part.status_N.set_running_or_notify_cancel():
                try:
                    with self._threads.taken(part.share) as number:
                        numba.set_num_threads(number)  # applies only to calls from this thread
                        part.status_N.set_result(self._decoded(part))
                except BaseException as error:
                    part.status_N.set_exception(error)
            del part  # releases its buffers

    def _decoded(self, part: BatchPart) -> npt.NDArray[np.int32]:
        (memory,) = self.memory_allocations["operation"].values()
        box_BV4, target_BV3, _ = (buffer[0] for buffer in memory)
        count = len(part.row_N)
        box_BV4[:count], target_BV3[:count] = part.box_NV4, part.target_NV3
        (status_N,) = self.run_pipeline(0, part.row_N, 0, None)
        return np.array(status_N)

    def end(self) -> None:
        """Drops the parts that have not started, then ends the thread."""
        waiting: list[BatchPart | None] = []
        try:
            while True:
                waiting.append(self._parts.get_nowait())
        except queue.Empty:
            self._parts.put(None)
        for part in waiting:
            if part is not None:
                part.status_N.cancel()
        self.join()
        self.close()


_opening = Lock()


def open_reader(path: Path, *, batch_size: int, num_views: int, threads: Threads) -> BetonReader:
    """Opens a .beton file and returns its reader, whose thread is running."""
    with _opening, _kept_settings():
        # FFCV would compile the code of every Loader again. With its compiler off, it uses ours, already compiled.
        enabled = Compiler.is_enabled
        Compiler.set_enabled(False)
        try:
            loader = Loader(
                str(path),
                batch_size=batch_size,
                num_workers=threads.total,
                os_cache=True,
                order=OrderOption.SEQUENTIAL,
                seed=0,  # otherwise FFCV draws one from numpy's global generator
                indices=np.zeros(0, np.int64),  # the rows come in parts
                pipelines={
                    "image": PipelineSpec("image", ViewsDecoder(num_views, parallel=threads.total > 1)),
                    **dict.fromkeys(("label", "id", "domain")),
                },
                batches_ahead=1,
            )
        finally:
            Compiler.set_enabled(enabled)
        manager = loader.memory_manager  # its dictionaries of all samples serve only FFCV's other cache
        manager.ptr_to_size = manager.sample_to_pages = manager.page_to_samples = None
        # FFCV's own map would keep a descriptor, and Python code would read it.
        manager.context.mmap = _native.map_bytes(str(path))
        return BetonReader(loader, threads)
