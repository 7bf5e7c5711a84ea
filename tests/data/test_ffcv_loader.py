"""The ffcv back end: the right crops of the right samples in the right order, whatever lies in which file or fails."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import backend, jpeg_of, picture, prep_ok

from dataprep.writers.beton import BetonFile
from fastcssl.data.backends import Backend, BackendConfig, Crops, LoaderError, LocalPlan
from fastcssl.data.backends.native import NativeBackend
from fastcssl.data.backends.torchvision import TorchvisionBackend
from fastcssl.data.order import EpochPlan
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Order, Prepared, Selection
from fastcssl.data.views import Policy, with_size
from fastcssl.distributed.world import World

ffcv_loader = backend("fastcssl.data.backends.ffcv")
FfcvBackend = ffcv_loader.FfcvBackend

BOUND = 0.5  # mean difference of a crop from Pillow's, in levels of 0..255
ALL = (0, 1, 2)
VIEWS = with_size(policy("cassle-simclr-imagenet"), 64) + with_size(policy("probe-train-imagenet"), 40)
CENTER = with_size(policy("probe-val-imagenet"), 56)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ffcv") / "data"
    source = "synthetic:size=mixed,train=3,val=0"
    prep_ok("build", source, "--scenario", "class", "--tasks", 3, "--formats", "ffcv,tar", "--out", out)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Prepared:
    return Prepared.open(folder)


def config(views: Policy = VIEWS, num_threads: int = 2, batch_size: int = 16) -> BackendConfig:
    return BackendConfig(
        policy=views,
        local_batch_size=batch_size,
        num_threads=num_threads,
        device=torch.device("cpu"),
        dtype=torch.float32,
        augment="torch",
    )


@pytest.fixture(scope="module")
def loader(data: Prepared) -> Iterator[Backend]:
    made = FfcvBackend(data, config())
    yield made
    made.close()


def plan_of(
    data: Prepared,
    tasks: tuple[int, ...] = ALL,
    *,
    views: Policy = VIEWS,
    epoch: int = 0,
    order: Order = "shuffled",
    batch_size: int = 16,
) -> EpochPlan:
    rows = data.rows(Selection(tasks=tasks))
    return EpochPlan(
        data, rows, policy=views, batch_size=batch_size, world=World(), seed=7, epoch=epoch, order=order, last="pad"
    )


def kept(batches: Iterator[Crops]) -> list[list[torch.Tensor]]:
    """Copies, because the next batch may overwrite them."""
    result = []
    for crops in batches:
        assert not crops.faults and crops.views_V is None
        result.append([crop.clone() for crop in crops.crops_V])
    return result


def same(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean difference of each crop, in levels of 0..255."""
    return (left.float() - right.float()).abs().mean(dim=(1, 2, 3))


def check_against_reference(data: Prepared, found: Backend, plan: EpochPlan, views: Policy) -> None:
    """Pillow and the native engine, both on the tar's bytes."""
    reference, native = TorchvisionBackend(data, config(views)), NativeBackend(data, config(views))
    mine = kept(found.run(plan, 0))
    assert same(mine, kept(native.run(plan, 0)))
    for number, theirs in enumerate(kept(reference.run(plan, 0))):
        for view, spec in enumerate(views):
            assert mine[number][view].shape == (len(plan[number].row_N), spec.size_px, spec.size_px, 3)
            # Pillow brings a libjpeg of its own and rounds its weights otherwise.
            assert distance(mine[number][view], theirs[view]).max() < BOUND
    native.close()


def test_each_row_is_its_sample_at_its_box(data: Prepared, loader: Backend) -> None:
    for tasks in ((1,), ALL):
        check_against_reference(data, loader, plan_of(data, tasks), VIEWS)


def test_center_crops_in_order(data: Prepared) -> None:
    found = FfcvBackend(data, config(CENTER))
    check_against_reference(data, found, plan_of(data, (2, 0), views=CENTER, order="sequential"), CENTER)
    found.close()


def test_epochs_differ_and_repeat(data: Prepared, loader: Backend) -> None:
    first, second = plan_of(data, epoch=0), plan_of(data, epoch=1)
    assert not np.array_equal(first[0].row_N, second[0].row_N)
    before, other = kept(loader.run(first, 0)), kept(loader.run(second, 0))
    assert not same(before, other)
    assert same(before, kept(loader.run(first, 0)))
    check_against_reference(data, loader, plan_of(data, (0, 2), epoch=1), VIEWS)


def test_resumes_in_the_middle(data: Prepared, loader: Backend) -> None:
    plan = plan_of(data)
    assert same(kept(loader.run(plan, 0))[3:], kept(loader.run(plan, 3)))
    assert kept(loader.run(plan, len(plan))) == []


def test_early_close_then_another_epoch(data: Prepared, loader: Backend) -> None:
    expected = kept(loader.run(plan_of(data), 0))
    for number in range(3):
        batches = loader.run(plan_of(data, epoch=5), 0)
        for _ in islice(batches, number):
            pass
        batches.close()  # type: ignore[attr-defined]
        assert same(expected, kept(loader.run(plan_of(data), 0)))


def test_two_runs_at_once(data: Prepared, loader: Backend) -> None:
    left, right = plan_of(data, (0, 1)), plan_of(data, (1, 2))
    expected = kept(loader.run(left, 0)), kept(loader.run(right, 0))
    both: tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]] = ([], [])
    for crops in zip(loader.run(left, 0), loader.run(right, 0), strict=True):
        for side, one in zip(both, crops, strict=True):
            side.append([crop.clone() for crop in one.crops_V])
    assert same(both[0], expected[0]) and same(both[1], expected[1])


def test_batches_outlive_the_work_ahead(data: Prepared, loader: Backend) -> None:
    """What a batch holds does not change while it is looked at, though others are under way."""
    plan = plan_of(data)
    expected = kept(loader.run(plan, 0))
    for number, crops in enumerate(loader.run(plan, 0)):
        time.sleep(0.02)
        assert all(torch.equal(a, b) for a, b in zip(crops.crops_V, expected[number], strict=True))


def test_an_endless_plan_goes_on(data: Prepared, loader: Backend) -> None:
    plan = plan_of(data, (1, 2), order="endless")
    reference = TorchvisionBackend(data, config())
    batches = loader.run(plan, 0)
    for mine, theirs in islice(zip(batches, reference.run(plan, 0), strict=True), 8):  # 60 samples, twice and more
        assert all(distance(a, b).max() < BOUND for a, b in zip(mine.crops_V, theirs.crops_V, strict=True))
    batches.close()  # type: ignore[attr-defined]


def test_threads_change_nothing_but_speed(data: Prepared, loader: Backend) -> None:
    single = FfcvBackend(data, config(num_threads=1))
    many = FfcvBackend(data, config(num_threads=64))
    plan = plan_of(data)
    expected = kept(loader.run(plan, 0))
    assert same(expected, kept(single.run(plan, 0)))
    assert same(expected, kept(many.run(plan, 0)))
    single.close()
    many.close()


def test_fetch_gives_the_same_crops(data: Prepared, loader: Backend) -> None:
    plan = plan_of(data)
    (batch,) = kept(islice(loader.run(plan, 2), 1))
    for place, row in enumerate(plan[2].row_N.tolist()):
        fetched = loader.fetch(row, plan[2].box_VN4[:, place])
        assert all(torch.equal(crop, batch[view][place]) for view, crop in enumerate(fetched))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_leaves_threads_and_settings_as_they_were(data: Prepared, loader: Backend) -> None:
    kept(loader.run(plan_of(data), 0))
    torch.set_num_threads(2)
    named, after_round = threading.active_count(), []
    np.random.seed(3)
    drawn = np.random.random()
    np.random.seed(3)
    for _ in range(4):
        made = FfcvBackend(data, config())
        abandoned = made.run(plan_of(data), 0)
        next(abandoned)
        kept(made.run(plan_of(data), 0))
        opened = threading.active_count()
        assert opened == named + 3  # a file each
        kept(made.run(plan_of(data), 0))
        assert threading.active_count() == opened
        abandoned.close()  # type: ignore[attr-defined]
        made.close()
        made.close()
        after_round.append(num_threads())
    assert torch.get_num_threads() == 2
    assert np.random.random() == drawn
    assert threading.active_count() == named
    assert after_round[-1] < after_round[0] + 3  # numba's and torch's own pools may start late, but only once


# ---- Faults ----------------------------------------------------------------------------------------------------------


def damaged(folder: Path, tmp_path: Path, row: int, change: str) -> tuple[Prepared, Path]:
    """The same data with one image of a .beton changed in place."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = Prepared.open(copy)
    sample = data.table[row]
    path = copy / data.manifest.shards[int(sample["ffcv_shard"])].path
    content = bytearray(path.read_bytes())
    start = content.index(BetonFile(path)[int(sample["ffcv_place"])].jpeg)
    jpeg = slice(start, start + int(sample["ffcv_bytes"]))
    image = bytearray(content[jpeg])
    scan = image.index(b"\xff\xda") + 14
    if change == "truncated":
        image[len(image) // 2 :] = bytes(len(image) - len(image) // 2)
        image[len(image) // 2 : len(image) // 2 + 2] = b"\xff\xd9"
    elif change == "scan":
        image[scan + 40 : scan + 240] = b"\xff\xd0" * 100
    elif change == "header":
        image[2:scan] = bytes(scan - 2)
    elif change == "size":
        other = jpeg_of(picture(1))  # whole, and what follows the end of a JPEG is no fault
        image[: len(other)] = other
    elif change == "warning":  # stray bytes between segments
        assert image[2:6] == b"\xff\xe0\x00\x10"
        image[4:6] = b"\x00\x0e"
    assert len(image) == int(sample["ffcv_bytes"])
    content[jpeg] = image
    path.write_bytes(content)
    return data, path


@pytest.mark.parametrize("change", ["truncated", "scan", "header", "size"])
def test_a_damaged_image_is_named_and_alone(folder: Path, tmp_path: Path, loader: Backend, change: str) -> None:
    plan = plan_of(Prepared.open(folder))
    row = int(plan[1].row_N[5])
    data, path = damaged(folder, tmp_path, row, change)
    expected = kept(loader.run(plan, 0))
    found = FfcvBackend(data, config())
    for number, crops in enumerate(found.run(plan_of(data), 0)):
        assert list(crops.faults) == ([5] if number == 1 else [])
        whole = [place for place in range(16) if place not in crops.faults]
        assert all(torch.equal(crop[whole], expected[number][view][whole]) for view, crop in enumerate(crops.crops_V))
        for reason in crops.faults.values():
            assert reason.startswith(f"sample {data.table[row]['id']} in {path}: ")
    with pytest.raises(LoaderError, match=f"sample {data.table[row]['id']} in "):
        found.fetch(row, plan[1].box_VN4[:, 5])
    found.close()


def test_a_warning_that_spares_every_pixel_is_no_fault(folder: Path, tmp_path: Path, loader: Backend) -> None:
    plan = plan_of(Prepared.open(folder))
    row = int(plan[1].row_N[5])
    data, _ = damaged(folder, tmp_path, row, "warning")
    found = FfcvBackend(data, config())
    assert same(kept(found.run(plan, 0)), kept(loader.run(plan, 0)))
    found.close()


class Watchdog:
    """Fails a test that takes longer than it should, without waiting for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def first(self, backend: Backend, plan: LocalPlan) -> BaseException | None:
        raised: list[BaseException | None] = []

        def work() -> None:
            try:
                next(backend.run(plan, 0))
                raised.append(None)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.seconds)
        assert raised, f"nothing happened for {self.seconds} s"
        return raised[0]


@pytest.mark.parametrize("how", ["raises", "dies", "closes"])
def test_what_fails_inside_ffcv_arrives(data: Prepared, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    found = FfcvBackend(data, config())
    plan = plan_of(data)
    closer, first = threading.Thread(target=found.close), threading.Lock()

    def fails(*_: object) -> None:
        if how == "dies":
            raise SystemExit
        if how == "closes":
            if first.acquire(blocking=False):  # there is a thread for each file
                closer.start()
            time.sleep(0.5)
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("ffcv.loader.epoch_iterator.EpochIterator.run_pipeline", fails)
        error = Watchdog(10).first(found, plan)
    assert isinstance(error, LoaderError) and "task-0" in str(error)
    if how == "closes":
        closer.join(10)
    if how == "raises":
        assert "no room" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    assert len(kept(found.run(plan, 0))) == len(plan)  # and the next epoch is whole
    found.close()


def test_a_thread_that_is_gone_is_noticed(data: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FfcvBackend(data, config())
    with monkeypatch.context() as patched:
        patched.setattr(ffcv_loader.BetonReader, "run", lambda _: None)
        error = Watchdog(10).first(found, plan_of(data))
    assert isinstance(error, LoaderError) and "its thread is gone" in str(error)
    found.close()


def test_files_that_are_not_what_the_table_says(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = Prepared.open(copy)
    paths = [copy / data.manifest.shards[int(shard)].path for shard in np.unique(data.table["ffcv_shard"])]
    train = [path for path in paths if path.stem == "train"]
    swapped = train[0].read_bytes()
    train[0].write_bytes(train[1].read_bytes())
    train[1].write_bytes(swapped)
    train[2].write_bytes(swapped[:-100])
    found = FfcvBackend(data, config())
    before = threading.active_count()
    with pytest.raises(LoaderError, match="does not hold the samples that the table lists"):
        next(found.run(plan_of(data, (0,)), 0))
    with pytest.raises(LoaderError, match="bytes instead of"):
        next(found.run(plan_of(data, (2,)), 0))
    assert threading.active_count() == before
    found.close()


def test_a_batch_that_is_too_large_is_refused(data: Prepared) -> None:
    found = FfcvBackend(data, replace(config(), local_batch_size=8))
    with pytest.raises(LoaderError, match="16 rows"):
        next(found.run(plan_of(data), 0))
    found.close()
