"""Defines what training iterates over: one loader per run, one stream per selection, and the batches of each epoch."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dataprep.manifest import ManifestError
from fastcssl.data.augment import photometric
from fastcssl.data.backends import (
    Backend,
    BackendConfig,
    Crops,
    LoaderError,
    LocalBatch,
    ShardError,
    choose,
    format_of,
    usual_threads,
)
from fastcssl.data.order import EpochPlan, Last, local_size
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.transfer import moved
from fastcssl.data.views import Policy
from fastcssl.distributed.world import World

Augment = Literal["fused", "torch", "dali"]
_MAX_ATTEMPTS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """This rank's part of a global batch. Its tensors are valid until the next batch is requested; clone to keep them.

    views: V tensors [N, 3, size, size], normalised, channels-last, on the training device.
    """

    views: tuple[torch.Tensor, ...]
    label: torch.Tensor  # int64 [N]
    id: torch.Tensor  # int64 [N], -1 for padded rows
    valid: torch.Tensor  # bool [N], false for padded rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """How images become batches of views: the policy, the global batch size, the seed, the back end."""

    policy: Policy
    batch_size: int  # global: over all ranks
    seed: int = 0
    loader: str = "auto"
    augment: Augment = "fused"
    last: Last = "drop"
    num_threads: int | None = None  # None: one per core, shared by the ranks of a machine
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    max_corrupt: float = 0.001  # share of a selection that may fail to decode; one sample always may
    prefetch: int = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Staging:
    """The work that makes one batch on the side stream. It holds the crops, whose memory that work reads."""

    crops: Crops
    began: torch.cuda.Event
    copied: torch.cuda.Event
    done: torch.cuda.Event


class Loader:
    """Holds the threads, buffers and open shards, and reuses them from selection to selection."""

    def __init__(self, data: Prepared, config: LoaderConfig, world: World | None = None) -> None:
        self.data, self.config, self.world = data, config, world or World()
        if config.num_threads is not None and config.num_threads < 1:
            raise LoaderError(f"--num-threads {config.num_threads}: use 1 or more, or leave it out for one per core.")
        if config.prefetch < 1:
            raise LoaderError(f"--prefetch {config.prefetch}: at least one batch must be in progress. Use 1 or more.")
        local_batch_size = local_size(config.batch_size, self.world)
        kind = choose(data, config.loader)
        if config.augment == "dali" and kind.name != "dali":
            raise LoaderError(f"--augment dali needs --loader dali, not {kind.name}.")
        self.device = torch.device(config.device)
        backend_config = BackendConfig(
            policy=config.policy,
            local_batch_size=local_batch_size,
            num_threads=config.num_threads or usual_threads(),
            device=self.device,
            dtype=config.dtype,
            augment=config.augment,
            prefetch=config.prefetch,
        )
        self._backend: Backend = kind(data, backend_config)
        self._format = format_of(kind, data)
        self.held = backend_config.held
        self.name = kind.name

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """The CUDA stream that makes batches. There is one, because torch's allocator keeps free memory per stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def open(self, selection: Selection) -> "Stream":
        """Returns a stream of the selection's batches."""
        return Stream(self, self._backend, selection)

    def check_shards(self, rows: npt.NDArray[np.int64]) -> None:
        """Raises ShardError if a shard that holds these rows does not have the size with which it was prepared."""
        try:
            self.data.check_shards(np.unique(self.data.table[f"{self._format}_shard"][rows]).tolist())
        except ManifestError as error:
            raise ShardError(str(error)) from None

    def stage_seconds(self) -> dict[str, float]:
        """Returns the total seconds of all threads so far, by stage; empty if the back end does not time."""
        return self._backend.stage_seconds()

    def close(self) -> None:
        """Ends the back end's threads and processes."""
        self._backend.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """The batches of one selection. `state_dict` in the middle of an epoch lets another process continue from there."""

    def __init__(self, loader: Loader, backend: Backend, selection: Selection) -> None:
        self._loader, self._backend, self._selection = loader, backend, selection
        self._config, self._table = loader.config, loader.data.table
        self._rows = loader.data.rows(selection)
        loader.check_shards(self._rows)
        self._resume: tuple[int, int] | None = None
        self._at = (0, 0)
        self.quarantine: dict[int, str] = {}  # sample id -> why it could not be decoded
        self.num_replaced = 0
        self.wait_seconds = 0.0  # during which the caller waited for data
        self.augment_seconds = 0.0  # that the caller spent on photometry, unless the back end does it
        self.device_seconds: dict[str, float] = {}  # that a GPU spent on staging: "transfer", "augment"
        self._max_corrupt = max(1, int(self._config.max_corrupt * len(self._rows)))
        self._plan(0)  # raises now if the selection is invalid

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._plan(0))

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The ids of its samples, sorted."""
        id_S: npt.NDArray[np.int64] = self._table["id"][self._rows].astype(np.int64)
        return id_S

    def _plan(self, epoch: int) -> EpochPlan:
        return EpochPlan(
            self._loader.data,
            self._rows,
            policy=self._config.policy,
            batch_size=self._config.batch_size,
            world=self._loader.world,
            seed=self._config.seed,
            epoch=epoch,
            order=self._selection.order,
            last=self._config.last,
        )

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the next batch: the epoch and how many of its batches were already returned."""
        epoch, batch = self._resume or self._at
        return {"epoch": epoch, "batch": batch, "num_samples": len(self._rows), "batch_size": self._config.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Makes the saved epoch start at the saved batch. The number of ranks may have changed since."""
        for key, value in (("num_samples", len(self._rows)), ("batch_size", self._config.batch_size)):
            if state[key] != value:
                raise LoaderError(
                    f"The saved position has {key} {state[key]}, this loader has {value}. "
                    "Use the same data and batch size."
                )
        self._resume = (state["epoch"], state["batch"])

    def epoch(self, number: int) -> Iterator[Batch]:
        """Iterates over one epoch. Count `number` over the whole run, so that every epoch has other augmentations."""
        plan = self._plan(number)
        first = self._resume[1] if self._resume and self._resume[0] == number else 0
        self._resume = None
        self._at = (number, first)
        with closing(self._filled(plan, first)) as filled:  # type: ignore[type-var]
            on_gpu = self._loader.device.type == "cuda"
            # Closed before `filled`, whose buffers may be filled again afterwards.
            with closing(self._staged_on_gpu(filled) if on_gpu else self._on_host(filled)) as batches:  # type: ignore[type-var]
                for batch in batches:
                    self._at = (number, self._at[1] + 1)
                    yield batch

    def _filled(self, plan: EpochPlan, first: int) -> Iterator[tuple[LocalBatch, Crops]]:
        """Yields complete local batches, in which samples that could not be decoded are replaced."""
        with closing(self._backend.run(plan, first)) as crops_of:  # type: ignore[type-var]
            for number in range(first, len(plan)):
                began = time.perf_counter()
                crops = next(crops_of)
                batch = plan[number]
                if crops.faults:
                    batch = self._replaced(plan, batch, crops)
                self.wait_seconds += time.perf_counter() - began
                yield batch, crops

    def _replaced(self, plan: EpochPlan, batch: LocalBatch, crops: Crops) -> LocalBatch:
        row_N, columns_VNC = batch.row_N.copy(), batch.columns_VNC.copy()
        for place, reason in sorted(crops.faults.items()):
            self._count_fault(int(row_N[place]), reason)
            row, columns_VC = self._fetch_replacement(plan, int(row_N[place]), place, crops)
            row_N[place], columns_VNC[:, place] = row, columns_VC
            self.num_replaced += 1
        return LocalBatch(
            number=batch.number,
            row_N=row_N,
            valid_N=batch.valid_N,
            visit_N=batch.visit_N,
            box_VN4=batch.box_VN4,
            columns_VNC=columns_VNC,
        )

    def _fetch_replacement(self, plan: EpochPlan, bad_row: int, place: int, crops: Crops) -> tuple[int, Any]:
        for attempt in range(_MAX_ATTEMPTS):
            row = plan.replacement(bad_row, attempt)
            # Drawn as a second visit, so its views differ from those of its own turn in this epoch.
            drawn = plan.draw(np.array([row]), np.array([1]))
            try:
                fetched = self._backend.fetch(row, drawn.box_VN4[:, 0])
            except ShardError:
                raise
            except LoaderError as error:
                self._count_fault(row, str(error))
                continue
            for view, crop in enumerate(fetched):
                if crops.views_V is None:
                    crops.crops_V[view][place].copy_(crop)
                else:
                    finished = self._photometry(view, crop[None], drawn.columns_VNC[view])
                    crops.views_V[view][place].copy_(finished[0])
            if fetched[0].is_cuda:  # the back end may overwrite the sample's memory as soon as it is dropped
                torch.cuda.current_stream(self._loader.device).synchronize()
            return row, drawn.columns_VNC[:, 0]
        raise LoaderError(f"No replacement for sample {self._table['id'][bad_row]} could be decoded. Verify the data.")

    def _count_fault(self, row: int, reason: str) -> None:
        self.quarantine[int(self._table["id"][row])] = reason
        if len(self.quarantine) > self._max_corrupt:
            raise LoaderError(
                f"{len(self.quarantine)} samples of {len(self._rows)} cannot be decoded, the last one {reason}; "
                f"at most {self._max_corrupt} may fail. Run fastcssl-prep verify {self._loader.data.folder}."
            )

    def _photometry(self, view: int, crops_NHW3: torch.Tensor, columns_NC: Any) -> torch.Tensor:
        spec = self._config.policy[view]
        columns = moved(columns_NC, crops_NHW3.device)
        impl: Literal["auto", "torch"] = "torch" if self._config.augment == "torch" else "auto"
        return photometric(crops_NHW3, columns, mean=spec.mean, std=spec.std, dtype=self._config.dtype, impl=impl)

    def _finished(self, batch: LocalBatch, crops: Crops, copied: "torch.cuda.Event | None" = None) -> Batch:
        """Returns the finished batch. `copied` is recorded between the copies and the photometry."""
        device = self._loader.device
        if crops.views_V is not None:
            # On a GPU they are copied in any case: the back end's memory does not outlive this step.
            how: dict[str, Any] = {"dtype": self._config.dtype, "non_blocking": True, "copy": device.type == "cuda"}
            views = tuple(view.to(device, **how) for view in crops.views_V)
        else:
            crops_V = [crop.to(device, non_blocking=True) for crop in crops.crops_V]
            if copied is not None:
                copied.record()
            views = tuple(self._photometry(v, crop, batch.columns_VNC[v]) for v, crop in enumerate(crops_V))
        rows = self._table[batch.row_N]
        id_N = np.where(batch.valid_N, rows["id"], -1)
        return Batch(
            views=views,
            label=moved(rows["label"].astype(np.int64), device),
            id=moved(id_N, device),
            valid=moved(batch.valid_N.copy(), device),
        )

    def _on_host(self, filled: Iterator[tuple[LocalBatch, Crops]]) -> Iterator[Batch]:
        for batch, crops in filled:
            began = time.perf_counter()
            finished = self._finished(batch, crops)
            self.augment_seconds += time.perf_counter() - began
            yield finished

    def _staged_on_gpu(self, filled: Iterator[tuple[LocalBatch, Crops]]) -> Iterator[Batch]:
        """Makes the next batch on the loader's CUDA stream while the caller trains on the current one.

        Before the back end reuses the buffers of a batch, the host waits until that batch is made. The caller has been
        given it by then, so the wait does not keep the host from launching its step.
        """
        ahead: tuple[Batch, torch.cuda.Event] | None = None
        stagings: deque[_Staging] = deque()
        try:
            while True:
                if len(stagings) == self._loader.held:
                    self._settle(stagings.popleft())
                with torch.cuda.stream(self._loader.side_stream):  # a back end may compute on the GPU too
                    found = next(filled, None)
                    if found is None:
                        break
                    staged, staging = self._staged(*found)
                stagings.append(staging)
                if ahead is not None:
                    yield self._handed_over(*ahead)
                ahead = (staged, staging.done)
        finally:
            while stagings:
                self._settle(stagings.popleft())
        if ahead is not None:
            yield self._handed_over(*ahead)

    def _staged(self, batch: LocalBatch, crops: Crops) -> tuple[Batch, _Staging]:
        """Queues the work that makes a batch on the current stream."""
        began, copied, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        began.record()
        if crops.views_V is not None:
            copied = done
        staged = self._finished(batch, crops, copied if copied is not done else None)
        done.record()
        return staged, _Staging(crops=crops, began=began, copied=copied, done=done)

    def _settle(self, staging: _Staging) -> None:
        """Waits until the batch is made, and adds up how long the GPU took."""
        staging.done.synchronize()
        events = (staging.began, staging.copied, staging.done)
        for name, (before, after) in zip(("transfer", "augment"), pairwise(events), strict=True):
            seconds = before.elapsed_time(after) / 1000 if before is not after else 0.0
            self.device_seconds[name] = self.device_seconds.get(name, 0.0) + seconds

    def _handed_over(self, batch: Batch, done: "torch.cuda.Event") -> Batch:
        main = torch.cuda.current_stream(self._loader.device)
        main.wait_event(done)
        for tensor in (*batch.views, batch.label, batch.id, batch.valid):
            tensor.record_stream(main)  # allocated on the side stream, read on this one
        return batch
