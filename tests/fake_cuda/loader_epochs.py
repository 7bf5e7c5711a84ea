"""Runs every loader on fake cards under `StreamOrder`, as it is and with one defect at a time.

A program for a process with the fake runtime: its argument is JSON, from the loaders to run to folders of their data.
It prints JSON, from the name of each case to the race ("" if there was none), how often the host waited, and
how many streams were used beside the main one.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fake_cuda.stream_order import StreamOrder, StreamRace
from fastcssl.data.backends import BackendConfig, Crops
from fastcssl.data.backends.engine import EngineBackend, Slot
from fastcssl.data.backends.resident import ResidentBackend
from fastcssl.data.loader import Batch, Loader, LoaderConfig, Stream
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import Policy, with_size

Patch = AbstractContextManager[Any]
DALI, FFCV = "fastcssl.data.backends.dali", "fastcssl.data.backends.ffcv"
TASKS = (0, 1)


class DaliStandIn:
    """A pipeline that returns as DALI does: written on a stream of its own, which the host has waited for, and lent."""

    def __init__(
        self, order: StreamOrder, views: Policy, *, batch_size: int, depth: int, source: Any, **how: Any
    ) -> None:
        self._order, self._views, self._source = order, views, source
        self._batch_size, self._depth = batch_size, depth
        photometry = how["photometry"]
        self._dtype = {None: torch.uint8, torch.float16: torch.float16}.get(photometry, torch.float32)
        self._stream = torch.cuda.Stream()
        self._done: deque[list[SimpleNamespace]] = deque()
        self._is_first, self._has_ended = True, False

    def build(self) -> None:
        pass

    def schedule_run(self) -> None:
        for _ in range(self._depth if self._is_first else 1):
            self._is_first = False
            try:
                if not self._has_ended:
                    self._source()
                    self._done.append([self._output(view.size_px) for view in self._views])
            except StopIteration:
                self._has_ended = True

    def _output(self, size: int) -> SimpleNamespace:
        with torch.cuda.stream(self._stream):
            made = torch.zeros(self._batch_size, size, size, 3, dtype=self._dtype, device="cuda")
        self._order.lend(made)
        return SimpleNamespace(as_tensor=lambda: made)

    def outputs(self) -> list[SimpleNamespace]:
        if not self._done:
            raise StopIteration
        self._stream.synchronize()
        return self._done.popleft()

    def reset(self) -> None:
        self._is_first, self._has_ended = True, False


def watched(name: str, order: StreamOrder) -> list[Patch]:
    """Reports the writes of the back end's threads, and puts the stand-in in DALI's place."""
    if name == "dali":
        return [
            patch(f"{DALI}.make_pipeline", lambda views, **how: DaliStandIn(order, views, **how)),
            patch(f"{DALI}.from_dlpack", lambda tensor: tensor),
        ]
    if name == "ffcv":
        from fastcssl.data.backends.ffcv import FfcvBackend  # only where FFCV is installed

        start = FfcvBackend._start

        def started(self: FfcvBackend, batch: Any, buffers_V: list[torch.Tensor]) -> Any:
            order.host_writes(buffers_V, "FFCV")
            return start(self, batch, buffers_V)

        return [patch.object(FfcvBackend, "_start", started)]
    submit = EngineBackend._submit

    def submitted(self: EngineBackend, batch: Any, slot: Slot) -> Any:
        order.host_writes(slot.buffers_V, "the native engine")
        return submit(self, batch, slot)

    return [patch.object(EngineBackend, "_submit", submitted)]


def train_on(batch: Batch) -> torch.Tensor:
    """Reads every tensor of the batch on the main stream."""
    return torch.stack([t.float().sum() for t in (*batch.views, batch.label, batch.id, batch.valid)])


def drive(name: str, data: Prepared, **changes: Any) -> None:
    """Two tasks of two epochs, then an epoch that is closed early, then two streams side by side."""
    views = with_size(policy("pnr-moco-imagenet"), 32)
    how: dict[str, Any] = {"batch_size": 6, "seed": 7, "num_threads": 1, "prefetch": 1, "device": "cuda", **changes}
    config = LoaderConfig(policy=views, loader=name, **how)
    with Loader(data, config) as loader:
        if name == "dali":  # one sample is replaced on the device
            row = int(data.rows(Selection(tasks=(TASKS[0],)))[0])
            loader._backend._damage_of[row] = "damaged"  # type: ignore[attr-defined]
        for task in TASKS:
            stream = loader.open(Selection(tasks=(task,)))
            assert len(stream) > config.prefetch + 2, "every buffer is to be used again"
            for epoch in (0, 1):
                for batch in stream.epoch(epoch):
                    train_on(batch)
            if name == "dali" and task == TASKS[0]:
                assert stream.num_replaced
        with closing(stream.epoch(2)) as batches:  # type: ignore[type-var]
            kept = next(batches)
        if name != "dali":  # reads one stream at a time
            other = loader.open(Selection(tasks=TASKS[:1]))
            for mine, its in zip(stream.epoch(3), other.epoch(3), strict=False):
                train_on(mine)
                train_on(its)
        train_on(kept)


# ---- Defects ---------------------------------------------------------------------------------------------------------


def crops_on_the_main_stream() -> list[Patch]:
    plain = ResidentBackend.run

    def run(self: ResidentBackend, plan: Any, first: int) -> Iterator[Crops]:
        made = plain(self, plan, first)
        while True:
            with torch.cuda.stream(torch.cuda.default_stream()):
                crops = next(made, None)
            if crops is None:
                return
            yield crops

    return [patch.object(ResidentBackend, "run", run)]


def nothing(*_: Any, **__: Any) -> None:
    pass


def no_wait_for_the_batch() -> list[Patch]:
    return [patch.object(torch.cuda.Stream, "wait_event", nothing)]


def no_event_recorded() -> list[Patch]:
    return [patch.object(torch.cuda.Event, "record", nothing)]


def no_record_stream() -> list[Patch]:
    return [patch.object(torch.Tensor, "record_stream", nothing)]


def no_wait_of_the_host() -> list[Patch]:
    return [patch.object(torch.cuda.Event, "synchronize", nothing)]


def no_wait_for_a_replacement() -> list[Patch]:
    plain = torch.cuda.Stream.synchronize

    def synchronize(self: torch.cuda.Stream) -> None:
        if self != torch.cuda.current_stream():  # the stand-in's own wait stays
            plain(self)

    return [patch.object(torch.cuda.Stream, "synchronize", synchronize)]


def one_buffer_less() -> list[Patch]:
    opened = Loader.open

    def open(self: Loader, selection: Selection) -> Any:
        self.held = 2
        return opened(self, selection)

    return [patch.object(BackendConfig, "held", 1), patch.object(Loader, "open", open)]


def lent_views_handed_out() -> list[Patch]:
    plain = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, copy: bool = False, **options: Any) -> torch.Tensor:
        del copy
        return plain(self, *arguments, **options)

    return [patch.object(torch.Tensor, "to", to)]


def pageable_memory() -> list[Patch]:
    return [patch.object(torch.Tensor, "pin_memory", lambda self: self)]


def images_do_not_fit() -> list[Patch]:
    return [patch.object(ResidentBackend, "_fits", lambda _: False)]


def a_stream_per_epoch() -> list[Patch]:
    staged = Stream._staged_on_gpu

    def on_another(self: Stream, filled: Any) -> Any:
        self._loader.side_stream = torch.cuda.Stream()
        return staged(self, filled)

    return [patch.object(Stream, "_staged_on_gpu", on_another)]


def as_it_is() -> list[Patch]:
    return []


# ---- Cases -----------------------------------------------------------------------------------------------------------

Case = tuple[str, Callable[[], list[Patch]], dict[str, Any]]
HALF, BRAIN = {"dtype": torch.float16}, {"dtype": torch.bfloat16}
BY_DALI = {"augment": "dali"}
CASES: dict[str, Case] = {
    "native": ("native", as_it_is, {}),
    "resident": ("resident", as_it_is, {}),
    "resident, too many images": ("resident", images_do_not_fit, HALF),
    "torchvision": ("torchvision", as_it_is, BRAIN),
    "ffcv": ("ffcv", as_it_is, {}),
    "dali": ("dali", as_it_is, {}),
    "dali, its photometry": ("dali", as_it_is, BY_DALI),
    "dali, its photometry, float16": ("dali", as_it_is, BY_DALI | HALF),
    "dali, its photometry, bfloat16": ("dali", as_it_is, BY_DALI | BRAIN),
    "resident: crops on the main stream": ("resident", crops_on_the_main_stream, {}),
    "native: no wait for the batch": ("native", no_wait_for_the_batch, {}),
    "resident: no wait for the batch": ("resident", no_wait_for_the_batch, {}),
    "torchvision: no event recorded": ("torchvision", no_event_recorded, {}),
    "native: no record_stream": ("native", no_record_stream, {}),
    "dali: no record_stream": ("dali", no_record_stream, BY_DALI),
    "native: no wait of the host": ("native", no_wait_of_the_host, {}),
    "ffcv: no wait of the host": ("ffcv", no_wait_of_the_host, {}),
    "dali: no wait of the host": ("dali", no_wait_of_the_host, {}),
    "native: one buffer less": ("native", one_buffer_less, {}),
    "ffcv: one buffer less": ("ffcv", one_buffer_less, {}),
    "dali: lent views handed out": ("dali", lent_views_handed_out, BY_DALI),
    "dali: no wait for a replacement": ("dali", no_wait_for_a_replacement, {}),
    "native: pageable memory": ("native", pageable_memory, {}),
    "native: a stream per epoch": ("native", a_stream_per_epoch, {}),
}


def outcome(name: str, defect: Callable[[], list[Patch]], data: Prepared, changes: dict[str, Any]) -> dict[str, Any]:
    order, found = StreamOrder(), ""
    with ExitStack() as stack:
        for each in (*watched(name, order), *defect()):
            stack.enter_context(each)
        stack.enter_context(order)
        try:
            drive(name, data, **changes)
        except StreamRace as race:
            found = str(race)
    return {"race": found, "waits": dict(order.waits), "side_streams": order.num_side_streams}


if __name__ == "__main__":
    folders = json.loads(sys.argv[1])
    outcomes = {
        case: outcome(name, defect, Prepared.open(folders[name]), changes)
        for case, (name, defect, changes) in CASES.items()
        if name in folders
    }
    sys.stdout.write(json.dumps(outcomes))
