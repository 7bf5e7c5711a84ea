"""Which loader is taken, what it says where a package is missing, and what only some back ends do."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import TASKS, collect, config, equal

from fastcssl.data.backends import LoaderError, backend, choose
from fastcssl.data.loader import Loader
from fastcssl.data.prepared import Prepared, Selection


def test_the_choice_of_a_back_end(prepared: Callable[[str], Prepared]) -> None:
    assert choose(prepared("native")).name == "native"
    assert choose(prepared("resident")).name == "resident"
    with pytest.raises(LoaderError, match="is not a loader"):
        backend("nativ")
    with pytest.raises(LoaderError, match="reads array, but this data was prepared as tar"):
        choose(prepared("native"), "resident")
    with pytest.raises(LoaderError, match="--augment dali needs --loader dali"):
        Loader(prepared("native"), config("native", augment="dali"))


@pytest.mark.parametrize(("name", "package"), [("dali", "nvidia.dali"), ("ffcv", "ffcv")])
def test_a_missing_package_says_what_to_install(name: str, package: str) -> None:
    """In a process of its own, where nothing has imported the package yet."""
    code = f"import sys; sys.modules['{package}'] = None; from fastcssl.data.backends import backend; backend('{name}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f'pip install "fastcssl[{name}]"' in done.stderr.splitlines()[-1]


def test_batched_crops_on_a_device_agree_with_the_engine(prepared: Callable[[str], Prepared]) -> None:
    """The path that a GPU takes, executed here on the CPU."""
    data = prepared("resident")
    runs = []
    for batched in (False, True):
        with Loader(data, config("resident")) as loader:
            loader._backend._batched = batched  # type: ignore[attr-defined]
            runs.append(collect(loader.open(Selection(tasks=(0, 1))).epoch(0)))
    for mine, its in zip(*runs, strict=True):
        assert torch.equal(mine[0], its[0])
        for view in (3, 4):
            assert ((mine[view] - its[view]).abs() * 255 * 0.225).mean() < 0.6


@pytest.mark.parametrize("name", ["native", "resident", "torchvision"])
def test_streams_side_by_side(name: str, prepared: Callable[[str], Prepared]) -> None:
    """As replay does: a task and an endless stream of older samples from one loader."""
    with Loader(prepared(name), config(name)) as loader:
        now, old = Selection(tasks=(3, 4)), Selection(tasks=(0, 1), order="endless")
        alone = collect(loader.open(now).epoch(0)), collect(loader.open(old).epoch(0), most=5)
        task, replay = loader.open(now).epoch(0), loader.open(old).epoch(0)
        mixed: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(5):
            for found, stream in zip(mixed, (task, replay), strict=True):
                found += collect(stream, most=1)
        assert equal(mixed[0], alone[0][:5]) and equal(mixed[1], alone[1])


def test_switching_tasks_keeps_the_threads(prepared: Callable[[str], Prepared]) -> None:
    def native_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    with Loader(prepared("native"), config("native")) as loader:
        next(loader.open(Selection(tasks=(0,))).epoch(0))
        count = native_threads()
        for task in range(TASKS):
            next(loader.open(Selection(tasks=(task,))).epoch(task))
            assert native_threads() == count
