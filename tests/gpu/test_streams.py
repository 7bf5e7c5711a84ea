"""The loaders' streams on a card: no race by torch's sanitizer, crops behind a busy stream, memory over many epochs.

tests/fake_cuda/test_stream_order.py checks the same order of accesses without a card.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from loading import NAMES, config

from fastcssl.data.loader import Loader
from fastcssl.data.prepared import Prepared, Selection

pytestmark = pytest.mark.gpu

LOADERS = [*((name, "fused") for name in NAMES), ("dali", "dali")]
CYCLES = 20_000_000  # about 10 ms
EPOCHS, WARM = 40, 8
SANITIZED = """
import sys
import torch
from torch.cuda import _sanitizer
from loading import config
from fastcssl.data.loader import Loader
from fastcssl.data.prepared import Prepared, Selection

assert _sanitizer.cuda_sanitizer.enabled
name, augment, folder = sys.argv[1:]
with Loader(Prepared.open(folder), config(name, device="cuda", augment=augment, prefetch=1)) as loader:
    for batch in loader.open(Selection(tasks=(0, 1))).epoch(0):
        torch.stack([t.float().sum() for t in (*batch.views, batch.label, batch.id, batch.valid)])
torch.cuda.synchronize()
print("finished")
"""


@pytest.mark.parametrize(("name", "augment"), LOADERS)
def test_an_epoch_under_torchs_sanitizer(
    name: str, augment: str, card: str, prepared: Callable[[str], Prepared], request: pytest.FixtureRequest
) -> None:
    del card
    folder, tests = str(prepared(name).folder), request.config.rootpath / "tests"
    paths = (str(tests), str(tests.parent), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, name, augment, folder],
        env=os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and done.stdout == "finished\n", done.stdout + done.stderr


def sleep(device: str) -> None:
    """Keeps the current stream busy; a CPU has none."""
    if device == "cuda":
        torch.cuda._sleep(CYCLES)


def resident_views(device: str, data: Prepared, *, busy: bool) -> list[torch.Tensor]:
    """Returns the views of two epochs. With `busy`, the main stream sleeps while the next crops are made."""
    found = []
    with Loader(data, config("resident", device=device, augment="fused")) as loader:
        loader._backend._batched = True  # type: ignore[attr-defined]  # the CPU crops as a card does
        stream = loader.open(Selection(tasks=(0, 1)))
        for epoch in (0, 1):
            if busy:
                sleep(device)
            for batch in stream.epoch(epoch):
                if busy:
                    sleep(device)
                found += [view.clone() for view in batch.views]
    return [view.float().cpu() for view in found]


def test_resident_crops_beside_a_busy_stream(device: str, prepared: Callable[[str], Prepared]) -> None:
    """Crops launched on the busy stream would be read before they are made."""
    expected = resident_views("cpu", prepared("resident"), busy=False)
    found = resident_views(device, prepared("resident"), busy=True)
    assert len(found) == len(expected) > 0
    for number, (mine, its) in enumerate(zip(found, expected, strict=True)):
        # A crop may round to the next grey level, which is 0.02; solarize may turn single pixels over.
        assert (mine - its).abs().mean() < 1e-2, f"view {number}"


def reserved_after_each_epoch(name: str, data: Prepared, epochs: int) -> list[int]:
    found = []
    with Loader(data, config(name, device="cuda", augment="fused")) as loader:
        stream = loader.open(Selection(tasks=(0,)))
        for epoch in range(epochs):
            for batch in stream.epoch(epoch):
                torch.stack([view.float().sum() for view in batch.views])
                torch.cuda.synchronize()  # so that freed memory is free when the next batch asks for some
            found.append(torch.cuda.memory_reserved())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_reserved_memory_does_not_grow(name: str, card: str, prepared: Callable[[str], Prepared]) -> None:
    """torch's allocator keeps free memory per stream: a stream per epoch would add to it with each."""
    del card
    reserved = reserved_after_each_epoch(name, prepared(name), EPOCHS)
    assert len(set(reserved[WARM:])) == 1, reserved
