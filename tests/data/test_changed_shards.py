"""Shards that change while they are in use, files that lie about themselves, and too few descriptors.

What used to end the process with a signal runs in one of its own.
"""

import mmap
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import FORMATS, NAMES, TASKS, collect, config
from processes import RanksFailed, run

from fastcssl.data.backends import LoaderError, ShardError
from fastcssl.data.loader import Loader
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.distributed.world import World

ALL = Selection(tasks=tuple(range(TASKS)))


@pytest.fixture
def copied(prepared: Callable[[str], Prepared], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the data that a back end reads."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(prepared(name).folder, tmp_path / "data"))

    return make


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except LoaderError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def cut_while_loading(_: World, name: str, folder: Path, keep: float) -> str:
    """Loads a batch, cuts every shard to a share of its bytes as copying over it does, and goes on."""
    data = Prepared.open(folder)
    with Loader(data, config(name, batch_size=4, prefetch=1)) as loader:
        batches = loader.open(ALL).epoch(0)
        next(batches)
        for shard in data.manifest.shards:
            os.truncate(shard.path_in(folder), int(keep * shard.bytes))
        return said(lambda: collect(batches))


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_that_shrinks_is_named(name: str, keep: float, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    (text,) = run(1, cut_while_loading, name, folder, keep)
    assert text.startswith("ShardError") and str(folder / "task-0") in text and "bytes instead of" in text


def cut_by_a_few_bytes(_: World, name: str, folder: Path) -> str:
    data = Prepared.open(folder)
    with Loader(data, config(name, batch_size=4)) as loader:
        stream = loader.open(ALL)
        collect(stream.epoch(0))
        for shard in data.manifest.shards:
            os.truncate(shard.path_in(folder), shard.bytes - 30)
        return said(lambda: collect(stream.epoch(1)))


@pytest.mark.parametrize("name", ["resident", "torchvision"])
def test_the_zeros_behind_the_end_are_not_pixels(name: str, copied: Callable[[str], Path]) -> None:
    """The rest of the last page reads as zeros, without a signal."""
    folder = copied("resident")
    (text,) = run(1, cut_by_a_few_bytes, name, folder)
    assert text.startswith("ShardError") and ".npy has " in text


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_checked_when_a_task_opens(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    data = Prepared.open(folder)
    row = data.table[data.rows(Selection(tasks=(3,)))[0]]
    shard = data.shard_path(int(row[f"{FORMATS[name]}_shard"]))
    with Loader(data, config(name)) as loader:
        os.truncate(shard, shard.stat().st_size - 1)
        loader.open(Selection(tasks=(0,)))
        with pytest.raises(ShardError, match=f"{shard} has .* bytes instead of"):
            loader.open(Selection(tasks=(3,)))


def load_with_table(_: World, folder: Path, column: str, value: int) -> str:
    """As if the check of the table had missed a row."""
    found = Prepared.open(folder)
    table = found.table.copy()
    table[column][:] = value
    data = Prepared(manifest=found.manifest, folder=folder, table=table)
    with Loader(data, config("resident")) as loader:
        return said(lambda: collect(loader.open(ALL).epoch(0)))


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("array_place", -5, r"row -5 of .*task-0.*\.npy, which has \d+ rows"),
        ("array_place", 10**6, r"row 1000000 of .*task-0.*\.npy, which has \d+ rows"),
        ("array_place", 1 << 40, r"row 1099511627776 of .*\.npy, which has \d+ rows"),
        ("width", 300, r"300 x 48 pixels of .*\.npy, which has images of 48 x 48"),
    ],
)
def test_the_engine_refuses_rows_that_an_array_does_not_have(
    column: str, value: int, says: str, prepared: Callable[[str], Prepared]
) -> None:
    (text,) = run(1, load_with_table, prepared("resident").folder, column, value)
    assert text.startswith("ShardError") and re.search(says, text), text


def load_with_header(_: World, folder: Path, shape: str) -> str:
    data = Prepared.open(folder)
    for shard in data.manifest.shards:
        path = shard.path_in(folder)
        content = bytearray(path.read_bytes())
        text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape.format(shard.count)}, }}"
        content[10:128] = text.ljust(117).encode() + b"\n"
        path.write_bytes(content)
    with Loader(data, config("resident")) as loader:
        return said(lambda: collect(loader.open(ALL).epoch(0)))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("({0}, 24, 96, 3)", "48 x 48 pixels of .*, which has images of 96 x 24"),
        ("({0}, 6912)", "which are not images"),
        ("({0}, 480, 48, 3)", "but .* bytes follow"),
        ("({0} * 48, 1, 48, 3)", "cannot be read"),
        ("({0}, -48, -48, 3)", "which are not images"),
    ],
)
def test_a_header_of_another_shape_is_refused(shape: str, says: str, copied: Callable[[str], Path]) -> None:
    folder = copied("resident")
    (text,) = run(1, load_with_header, folder, shape)
    assert text.startswith("ShardError") and str(folder / "task-0") in text and re.search(says, text), text


def truncated_elsewhere(_: World, folder: Path) -> None:
    """Reads a page that another part of the program mapped and that is gone, while our handler is in place."""
    data = Prepared.open(folder)
    with Loader(data, config("native")) as loader:
        collect(loader.open(ALL).epoch(0), most=1)
        path = folder / "other"
        path.write_bytes(bytes(8192))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
            os.truncate(path, 0)
            mapped[5000]


def test_other_bus_errors_still_end_the_process(copied: Callable[[str], Path]) -> None:
    with pytest.raises(RanksFailed, match=f"ended with status -{int(signal.SIGBUS)}"):
        run(1, truncated_elsewhere, copied("native"))


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", NAMES)
def test_no_shard_stays_open(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    with Loader(data, config(name)) as loader:
        collect(loader.open(Selection(tasks=(0,))).epoch(0))
        before = num_open()
        collect(loader.open(ALL).epoch(0))
        assert num_open() <= before + 1  # numba and DALI open files of their own


def load_without_descriptors(_: World, name: str, folder: Path) -> str:
    data = Prepared.open(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Loader(data, config(name)) as loader:
        batches = loader.open(ALL).epoch(0)
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        try:
            return said(lambda: collect(batches))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for file in held:
                os.close(file)


@pytest.mark.parametrize("name", ["native", "resident", "torchvision"])
def test_the_limit_of_open_files_is_named(name: str, prepared: Callable[[str], Prepared]) -> None:
    (text,) = run(1, load_without_descriptors, name, prepared(name).folder)
    assert re.search(r"task-0.* \(Too many open files\).* only \d+ files open .*ulimit -n", text), text
    assert "build the data set again" not in text
