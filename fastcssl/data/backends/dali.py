"""Loads with NVIDIA DALI, which decodes once and crops each view on the CPU or the GPU.

With --augment dali, DALI also does the photometry. DALI's own readers can neither follow our order nor resume, so we
read the encoded bytes from our index: a few Python threads read batches ahead, DALI's `external_source` asks for them,
and DALI works on `prefetch` batches at the same time. The pipeline is built once. A run that is closed early is
drained, so that the next one starts clean.

Damage: DALI raises an error for a file that ends too early or is not an image, and the batch is lost. It does not
report bad entropy data at all, not even where libjpeg gives up. Therefore we decode the entropy-coded data of every
sample when the loader meets it for the first time. This costs about two thirds of a decode, once per loader; nothing
cheaper finds all damage. If a batch fails nevertheless, its samples are tried one by one, and the batch runs again
without those that failed.

N samples, V views.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import nvidia.dali
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from dataprep import _codec
from dataprep.imagefile import open_image
from dataprep.writers.tar import TarReader
from fastcssl.data.backends import (
    BackendConfig,
    Crops,
    LoaderError,
    LocalBatch,
    LocalPlan,
    ShardError,
    sample_error,
    shard_error,
)
from fastcssl.data.backends.dali_graph import GraphInputs, inputs_of, make_pipeline
from fastcssl.data.prepared import Prepared

Bytes = npt.NDArray[np.uint8]

# Decoded in place of a sample that cannot be decoded.
_STAND_IN_PX = 16
_STAND_IN: Bytes = np.frombuffer(_codec.encode(np.zeros((_STAND_IN_PX, _STAND_IN_PX, 3), np.uint8), 90), np.uint8)
# The errors that DALI raises for data that it cannot process. The last lines of the message name the cause.
_DALI_ERRORS = (RuntimeError, ValueError, IndexError, TypeError)

_CLOSED = "This loader is closed. Open another."


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """A batch on its way through DALI. It keeps the inputs alive, because DALI does not copy them."""

    row_N: npt.NDArray[np.int64]
    encoded_N: list[Bytes]
    box_VN4: npt.NDArray[np.float32]
    columns_VNC: npt.NDArray[np.float32] | None
    faults: dict[int, str]
    inputs: GraphInputs = ()
    was_retried: bool = False


@dataclass(slots=True, eq=False)
class _Feed:
    """DALI's source. It holds no reference to the pipeline: a reference cycle would keep that alive after use."""

    inputs_of: Callable[[_Work], GraphInputs]
    works: Iterator[_Work] = field(default_factory=lambda: iter(()))
    again: deque[_Work] = field(default_factory=deque)  # the batches that were in progress in a broken pipeline
    under_way: deque[_Work] = field(default_factory=deque)

    def __call__(self) -> GraphInputs:
        try:
            work = self.again.popleft() if self.again else next(self.works)
            work.inputs = self.inputs_of(work)
        except (StopIteration, ShardError):
            raise
        except Exception as error:  # keeps it distinct from DALI's own errors
            raise LoaderError(f"The next batch cannot be made ({type(error).__name__}: {error}).") from error
        self.under_way.append(work)
        return work.inputs


class _Engine:
    """A pipeline, built when it is first needed, and the feed of its inputs."""

    def __init__(
        self, make: Callable[[_Feed], nvidia.dali.pipeline.Pipeline], inputs_of: Callable[[_Work], GraphInputs]
    ) -> None:
        self._make, self._feed = make, _Feed(inputs_of)
        self._pipeline: Any = None

    def begin(self, works: Iterator[_Work]) -> None:
        """Sets the batches to process, and builds the pipeline if there is none."""
        if self._pipeline is None:
            self._pipeline = self._make(self._feed)
            self._pipeline.build()
        self._feed.works = works

    def next(self) -> tuple[_Work, list[torch.Tensor]]:
        """Returns the oldest batch in progress. Its tensors share DALI's memory and keep it alive.

        `outputs()` without a stream returns when a GPU has written them. DALI does not know who reads them: once the
        last tensor is dropped, it may overwrite them at once, also while a kernel still reads.
        """
        self._pipeline.schedule_run()  # schedules `depth` batches the first time, then one more each time
        outputs = self._pipeline.outputs()
        return self._feed.under_way.popleft(), [from_dlpack(output.as_tensor()) for output in outputs]

    def restart(self) -> _Work:
        """Replaces the pipeline, which DALI invalidates after an error, and returns the batch that failed."""
        self.drop()
        feed = self._feed
        feed.again.extendleft(reversed(feed.under_way))
        feed.under_way.clear()
        self.begin(feed.works)
        return feed.again[0]

    def end(self) -> None:
        """Waits for the batches in progress and drops them."""
        self._feed.again.clear()
        self._feed.works = iter(())
        if self._pipeline is not None:
            try:
                self._pipeline.schedule_run()  # finds no more batches, which tells DALI that the epoch ends
                while True:
                    self._pipeline.outputs()
            except StopIteration:
                self._pipeline.reset()
            except _DALI_ERRORS:
                self.drop()
        self._feed.under_way.clear()

    def drop(self) -> None:
        self._pipeline = None  # drops the last reference, so DALI ends its threads


class DaliBackend:
    name: ClassVar[str] = "dali"
    formats: ClassVar[tuple[str, ...]] = ("tar",)

    def __init__(self, data: Prepared, config: BackendConfig) -> None:
        self._data, self._config, self._policy = data, config, config.policy
        self._augments = config.augment == "dali"
        self._is_sound_S = np.zeros(len(data.table), np.bool_)  # the rows that passed the check
        self._damage_of: dict[int, str] = {}  # the rows that failed it, or that DALI rejected
        self._readers = ThreadPoolExecutor(config.num_threads, thread_name_prefix="dali-read")
        self._is_running = self._is_closed = False
        self._engine = self._make_engine(config.local_batch_size, config.num_threads, config.prefetch, self._augments)
        self._single = self._make_engine(1, 1, 1, False)  # for fetch; built when it is needed

    def _make_engine(self, batch_size: int, num_threads: int, depth: int, augments: bool) -> _Engine:
        policy, config, device = self._policy, self._config, self._config.device
        device_id = None
        if device.type == "cuda":
            device_id = torch.cuda.current_device() if device.index is None else device.index

        def make(feed: _Feed) -> nvidia.dali.pipeline.Pipeline:
            return make_pipeline(
                policy,
                device="cpu" if device_id is None else "gpu",
                device_id=device_id,
                batch_size=batch_size,
                num_threads=num_threads,
                depth=max(1, depth),
                source=feed,
                photometry=config.dtype if augments else None,
            )

        def inputs(work: _Work) -> GraphInputs:
            return inputs_of(policy, work.encoded_N, work.box_VN4, work.columns_VNC if augments else None)

        return _Engine(make, inputs)

    # ---- Batches -----------------------------------------------------------------------------------------------------

    def run(self, plan: LocalPlan, first: int) -> Iterator[Crops]:
        if self._is_closed:
            raise LoaderError(_CLOSED)
        if self._is_running:
            raise LoaderError("The loader 'dali' is in the middle of an epoch. Close that first, or use --loader auto.")
        self._is_running = True
        works = self._works(plan, first)
        try:
            self._engine.begin(works)
            for _ in range(first, len(plan)):
                yield self._next()
        finally:
            works.close()  # type: ignore[attr-defined]
            self._engine.end()
            self._is_running = False

    def _next(self) -> Crops:
        while True:
            if self._is_closed:
                raise LoaderError(_CLOSED)
            try:
                work, tensors = self._engine.next()
                break
            except _DALI_ERRORS as error:
                self._leave_out_culprits(self._engine.restart(), error)
        if not self._augments:
            return Crops(crops_V=tensors, faults=work.faults)
        return Crops(crops_V=[], faults=work.faults, views_V=[view_NHW3.permute(0, 3, 1, 2) for view_NHW3 in tensors])

    def _leave_out_culprits(self, work: _Work, error: Exception) -> None:
        """Tries the samples of a failed batch one by one and leaves out those that fail."""
        found = 0
        for place, row in enumerate(work.row_N.tolist()):
            if place in work.faults:
                continue
            try:
                self._crops_of(row, work.encoded_N[place], work.box_VN4[:, place])
            except ShardError:
                raise
            except LoaderError as culprit:
                self._damage_of[row] = str(culprit)
                _leave_out(work, place, str(culprit))
                found += 1
        if not found and work.was_retried:
            raise LoaderError(
                f"DALI fails on a batch whose samples it decodes one by one: {_cause(error)}. Use --loader auto."
            ) from error
        work.was_retried = True

    def _works(self, plan: LocalPlan, first: int) -> Iterator[_Work]:
        """Yields batches with their bytes. Threads read and check them `prefetch` batches before DALI asks for them."""
        ahead: deque[tuple[LocalBatch, list[Future[list[Bytes | str]]]]] = deque()
        upcoming = iter(range(first, len(plan)))
        try:
            while True:
                while len(ahead) <= self._config.prefetch and (number := next(upcoming, None)) is not None:
                    batch = plan[number]
                    parts = np.array_split(batch.row_N, min(self._config.num_threads, len(batch.row_N)))
                    ahead.append((batch, [self._readers.submit(self._load_all, part) for part in parts]))
                if not ahead:
                    return
                batch, reads = ahead.popleft()
                loaded_N = [loaded for read in reads for loaded in read.result()]
                work = _Work(
                    row_N=batch.row_N,
                    encoded_N=[_STAND_IN if isinstance(loaded, str) else loaded for loaded in loaded_N],
                    box_VN4=batch.box_VN4.copy(),  # the plan keeps its own for other callers
                    columns_VNC=batch.columns_VNC,
                    faults={},
                )
                for place, loaded in enumerate(loaded_N):
                    if isinstance(loaded, str):
                        _leave_out(work, place, loaded)
                yield work
        finally:
            for _, reads in ahead:
                for read in reads:
                    read.cancel()

    # ---- Samples -----------------------------------------------------------------------------------------------------

    def fetch(self, row: int, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        if self._is_closed:
            raise LoaderError(_CLOSED)
        loaded = self._load(row)
        if isinstance(loaded, str):
            raise LoaderError(loaded)
        return self._crops_of(row, loaded, box_V4)

    def _crops_of(self, row: int, encoded: Bytes, box_V4: npt.NDArray[np.float32]) -> list[torch.Tensor]:
        work = _Work(row_N=np.array([row]), encoded_N=[encoded], box_VN4=box_V4[:, None], columns_VNC=None, faults={})
        self._single.begin(iter((work,)))
        try:
            _, tensors = self._single.next()
        except _DALI_ERRORS as error:
            self._single.drop()
            raise sample_error(self._data, row, "tar", _cause(error)) from None
        finally:
            self._single.end()
        return [crop_1HW3[0] for crop_1HW3 in tensors]

    def _load_all(self, row_N: npt.NDArray[np.int64]) -> list[Bytes | str]:
        return [self._load(row) for row in row_N.tolist()]

    def _load(self, row: int) -> Bytes | str:
        """Returns a sample's JPEG, or a description of what is wrong with it."""
        if row in self._damage_of:
            return self._damage_of[row]
        encoded = self._read(row)
        if not self._is_sound_S[row]:
            try:
                self._check(row, encoded)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                damage = sample_error(self._data, row, "tar", error)
                if isinstance(damage, ShardError):
                    raise damage from None
                self._damage_of[row] = str(damage)
                return self._damage_of[row]
            self._is_sound_S[row] = True
        return np.frombuffer(encoded, np.uint8)

    def _read(self, row: int) -> bytes:
        sample = self._data.table[row]
        try:
            return TarReader(self._path(row)).content(sample)
        except OSError as error:
            raise shard_error(self._data, int(sample["tar_shard"]), error) from None

    def _check(self, row: int, encoded: bytes) -> None:
        """Checks the size, then decodes all entropy-coded data without the pixel work of a full decode."""
        sample = self._data.table[row]
        with open_image(encoded) as image:
            if image.size != (int(sample["width"]), int(sample["height"])):
                raise OSError(f"it is {image.size[0]} x {image.size[1]} pixels, not as prepared")
        _codec.decode(encoded, 8)

    def _path(self, row: int) -> Path:
        return self._data.shard_path(int(self._data.table["tar_shard"][row]))

    def stage_seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._is_closed = True
        self._readers.shutdown(cancel_futures=True)
        for engine in (self._engine, self._single):
            engine.drop()


def _leave_out(work: _Work, place: int, reason: str) -> None:
    work.faults[place] = reason
    work.encoded_N[place] = _STAND_IN
    work.box_VN4[:, place] = (0, 0, _STAND_IN_PX, _STAND_IN_PX)


def _cause(error: Exception) -> str:
    """Returns DALI's message without the trace through our graph."""
    lines = str(error).rpartition("encountered:")[2].splitlines()
    said = [line.strip(" :") for line in lines if line.strip() and "no longer valid" not in line]
    return said[0] if said else "DALI cannot decode it"


BACKEND = DaliBackend
