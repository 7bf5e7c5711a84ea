"""The loader contract, over every discovered back end: which samples, in which order, augmented how, resumed where."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import prep_ok
from loading import FORMATS, NAMES, TASKS, collect, config, equal, ids_of, wanted_ids

from dataprep.manifest import load_manifest
from fastcssl.data.backends import LoaderError
from fastcssl.data.loader import Loader
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import ViewSpec, with_size
from fastcssl.distributed.world import World


def test_the_back_ends_of_the_design_exist() -> None:
    assert set(FORMATS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_holds_every_sample_once(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    with Loader(data, config(name)) as loader:
        for tasks in ((0,), (9, 2, 5)):
            stream = loader.open(Selection(tasks=tasks))
            batches = collect(stream.epoch(0))
            ids = ids_of(batches)
            assert len(batches) == len(stream) == stream.num_samples // 8
            assert len(set(ids)) == len(ids) and set(ids) <= wanted_ids(data, *tasks)
            assert len(ids) == stream.num_samples // 8 * 8
            table = data.table[np.searchsorted(data.table["id"], ids)]
            assert [label for batch in batches for label in batch[1].tolist()] == table["label"].tolist()
            again = collect(stream.epoch(1))
            assert ids_of(again) != ids  # another epoch, another order
            assert stream.quarantine == {}


@pytest.mark.parametrize("name", NAMES)
def test_views_are_normalised_channels_last_and_of_the_asked_type(
    name: str, prepared: Callable[[str], Prepared]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with Loader(prepared(name), config(name, dtype=dtype)) as loader:
            batch = next(loader.open(Selection(tasks=(0,))).epoch(0))
            assert len(batch.views) == 2
            for view in batch.views:
                assert view.shape == (8, 3, 32, 32) and view.dtype == dtype
                assert view.is_contiguous(memory_format=torch.channels_last)
                assert -3 < view.float().mean() < 3 and view.float().std() > 0.2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_same_global_batches(name: str, ranks: int, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    selection = Selection(tasks=(1, 4))
    with Loader(data, config(name)) as loader:
        whole = collect(loader.open(selection).epoch(3))
    parts = []
    for rank in range(ranks):
        with Loader(data, config(name, num_threads=1), World(rank, ranks)) as loader:
            parts.append(collect(loader.open(selection).epoch(3)))
    joined = [
        tuple(torch.cat(tensors) for tensors in zip(*(part[i] for part in parts), strict=True))
        for i in range(len(whole))
    ]
    assert equal(joined, whole)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_a_bit(name: str, prepared: Callable[[str], Prepared]) -> None:
    runs = []
    for threads in (1, 3):
        with Loader(prepared(name), config(name, num_threads=threads, augment="fused")) as loader:
            runs.append(collect(loader.open(Selection(tasks=(0, 1))).epoch(2)))
    assert equal(*runs)


@pytest.mark.parametrize("name", NAMES)
def test_resuming_in_the_middle_of_an_epoch(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    selection = Selection(tasks=(2, 3, 6))
    with Loader(data, config(name)) as loader:
        stream = loader.open(selection)
        whole = collect(stream.epoch(5))
        stream = loader.open(selection)
        head = collect(stream.epoch(5), most=3)
        state = stream.state_dict()
    with Loader(data, config(name, num_threads=1)) as loader:
        stream = loader.open(selection)
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        tail = collect(stream.epoch(5))
        assert equal(head + tail, whole)
        assert len(collect(stream.epoch(6))) == len(whole)  # the next epoch begins at its beginning
        other = loader.open(Selection(tasks=(0,)))
        with pytest.raises(LoaderError, match="num_samples"):
            other.load_state_dict(state)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_batch_padded(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    count = len(wanted_ids(data, 0))
    assert count % 16
    seen: list[int] = []
    for rank in range(4):  # a size that does not divide
        with Loader(data, config(name, batch_size=16, last="pad"), World(rank, 4)) as loader:
            batches = collect(loader.open(Selection(tasks=(0,), order="sequential")).epoch(0))
            assert len(batches) == -(-count // 16) and all(len(batch[0]) == 4 for batch in batches)
            for batch in batches:
                assert torch.equal(batch[0] >= 0, batch[2])
                assert batch[3].isfinite().all()
            seen += [i for i in ids_of(batches) if i >= 0]
    assert sorted(seen) == sorted(wanted_ids(data, 0))


@pytest.mark.parametrize("name", NAMES)
def test_orders_splits_and_ids(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    with Loader(data, config(name, batch_size=4, last="pad")) as loader:
        val = collect(loader.open(Selection(tasks=(0, 1), split="val", order="sequential")).epoch(0))
        assert [i for i in ids_of(val) if i >= 0] == sorted(wanted_ids(data, 0, 1, split="val"))
        few = np.array(sorted(wanted_ids(data, 3))[1:12:2])
        chosen = collect(loader.open(Selection(tasks=(3, 4), ids=few)).epoch(0))
        assert sorted(i for i in ids_of(chosen) if i >= 0) == few.tolist()
        with pytest.raises(ValueError, match="is not in train"):
            loader.open(Selection(tasks=(0,), ids=few))
        with pytest.raises(ValueError, match="task 10 does not exist"):
            loader.open(Selection(tasks=(10,)))


@pytest.mark.parametrize("name", NAMES)
def test_endless_replay_augments_each_visit_anew(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    ids = np.array(sorted(wanted_ids(data, 0))[:3])
    with Loader(data, config(name, batch_size=4)) as loader:
        batches = collect(loader.open(Selection(tasks=(0,), ids=ids, order="endless")).epoch(0), most=6)
        flat = ids_of(batches)
        assert len(flat) == 24 and set(flat) == set(ids.tolist())
        for begin in range(0, 24, 3):  # each pass holds every id once
            assert sorted(flat[begin : begin + 3]) == ids.tolist()
        views = torch.cat([batch[3] for batch in batches])
        first, second = (i for i, x in enumerate(flat) if x == flat[0]) if flat.count(flat[0]) == 2 else (
            flat.index(flat[0]), flat.index(flat[0], 1),
        )  # fmt: skip
        assert not torch.equal(views[first], views[second])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_manifest_over_the_same_shards(name: str, prepared: Callable[[str], Prepared]) -> None:
    folder = prepared(name).folder
    prep_ok("split", folder, "--scenario", "data", "--tasks", 4, "--seed", 3, "--name", "four")
    data = Prepared.open(folder / "four.json")
    with Loader(data, config(name)) as loader:
        batches = collect(loader.open(Selection(tasks=(2,))).epoch(0))
        assert batches and set(ids_of(batches)) <= wanted_ids(data, 2)


@pytest.mark.parametrize("name", NAMES)
def test_closing_an_unfinished_epoch(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    before = set(threading.enumerate())
    loader = Loader(data, config(name))
    stream = loader.open(Selection(tasks=tuple(range(TASKS))))
    whole = collect(stream.epoch(0), most=4)
    for _ in range(3):
        batches = stream.epoch(0)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
    assert equal(collect(stream.epoch(0), most=4), whole)
    loader.close()
    loader.close()
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not {t for t in threading.enumerate() if t not in before and not t.daemon}


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS.get(name) != "array"])
def test_corrupt_samples_are_replaced_counted_and_limited(
    name: str, prepared: Callable[[str], Prepared], tmp_path: Path
) -> None:
    """Damage after preparation: the shard's size is right, one image inside is not."""
    folder = tmp_path / "data"
    shutil.copytree(prepared(name).folder, folder)
    manifest = load_manifest(folder)
    format = FORMATS.get(name, "tar")
    data = Prepared.open(folder)
    bad = sorted(wanted_ids(data, 0))[:3]
    damage(data, format, bad[0])
    settings = config(name, max_corrupt=0.2)
    with Loader(data, settings) as loader:
        stream = loader.open(Selection(tasks=(0,)))
        batches = collect(stream.epoch(0))
        assert list(stream.quarantine) == [bad[0]] and stream.num_replaced == 1
        assert str(bad[0]) in stream.quarantine[bad[0]] and "task-00" in stream.quarantine[bad[0]]
        assert bad[0] not in ids_of(batches) and len(ids_of(batches)) == len(batches) * 8
        assert all(view.isfinite().all() for batch in batches for view in batch[3:])
    with Loader(data, config(name, max_corrupt=0.2, num_threads=1)) as loader:  # the same replacement every time
        assert equal(collect(loader.open(Selection(tasks=(0,))).epoch(0)), batches)
    for sample in bad[1:]:
        damage(data, format, sample)
    with Loader(data, config(name, max_corrupt=0.001)) as loader:
        with pytest.raises(LoaderError, match=r"cannot be decoded.*fastcssl-prep verify"):
            for epoch in range(3):
                collect(loader.open(Selection(tasks=(0,))).epoch(epoch))
    assert manifest.tasks[0].train.count


def damage(data: Prepared, format: str, sample_id: int) -> None:
    """Cuts the entropy-coded data short: the header stays, the pixels go."""
    row = data.table[np.searchsorted(data.table["id"], sample_id)]
    path = data.folder / data.manifest.shards[int(row[f"{format}_shard"])].path
    content = bytearray(path.read_bytes())
    begin, length = int(row[f"{format}_place"]), int(row[f"{format}_bytes"])
    if format == "ffcv":
        from dataprep.writers.beton import BetonFile

        begin = content.index(BetonFile(path)[begin].jpeg)
    middle = begin + length // 3
    content[middle : begin + length] = b"\xff\xd9" + bytes(begin + length - middle - 2)
    path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_plain_reference(name: str, prepared: Callable[[str], Prepared]) -> None:
    """The same samples, boxes and photometry; pixels differ by the resampling filter's rounding only."""
    data = prepared(name)
    selection = Selection(tasks=(0, 5))
    # A plain look: crops and flips, without colour, at a size that both shrinks and enlarges.
    plain = tuple(
        ViewSpec(size_px=64, mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255), flip_p=0.5, scale=(0.2, 1.0))
        for _ in range(2)
    )
    with Loader(data, config("torchvision", policy=plain)) as loader:
        truth = collect(loader.open(selection).epoch(1), most=4)
    with Loader(data, config(name, policy=plain)) as loader:
        ours = collect(loader.open(selection).epoch(1), most=4)
    bounds = {"ffcv": 6.0, "dali": 2.0}
    for mine, its in zip(ours, truth, strict=True):
        assert torch.equal(mine[0], its[0])
        for view in (3, 4):
            difference = (mine[view] - its[view]).abs()
            assert difference.mean() < bounds.get(name, 0.35), name


@pytest.mark.parametrize("name", NAMES)
def test_fused_photometry_agrees_with_its_sibling(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    runs = []
    for augment in ("fused", "torch"):
        with Loader(data, config(name, augment=augment)) as loader:
            runs.append(collect(loader.open(Selection(tasks=(0,))).epoch(0)))
    for mine, its in zip(*runs, strict=True):
        for view in (3, 4):
            difference = (mine[view] - its[view]).abs() * 255 * 0.225
            # A value at the solarizing threshold may fall on either side.
            assert (difference > 0.05).float().mean() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_bad_requests(name: str, prepared: Callable[[str], Prepared]) -> None:
    data = prepared(name)
    with Loader(data, config(name, batch_size=64)) as loader, pytest.raises(LoaderError, match="fewer than one batch"):
        loader.open(Selection(tasks=(0,)))
    with pytest.raises(LoaderError, match="shared equally by 3 ranks"):
        Loader(data, config(name), World(0, 3))


@pytest.mark.parametrize("name", NAMES)
def test_val_policy_with_a_fractional_box(name: str, prepared: Callable[[str], Prepared]) -> None:
    probe = with_size(policy("probe-val-imagenet"), 48)
    data = prepared(name)
    with Loader(data, config(name, policy=probe, last="pad")) as loader:
        ours = collect(loader.open(Selection(tasks=(0,), split="val", order="sequential")).epoch(0))
    with Loader(data, config("torchvision", policy=probe, last="pad")) as loader:
        truth = collect(loader.open(Selection(tasks=(0,), split="val", order="sequential")).epoch(0))
    for mine, its in zip(ours, truth, strict=True):
        difference = (mine[3] - its[3]).abs() * 255 * 0.225
        assert difference[its[2]].mean() < {"ffcv": 8.0, "dali": 2.0}.get(name, 0.35)
