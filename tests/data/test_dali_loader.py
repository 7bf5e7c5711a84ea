"""What is the loader 'dali's own: pixels against the reference, the photometry, damage, and the pipeline's life.

There is no GPU here. The graph is one function of the device, so the CPU's is run, and the GPU's is defined (which
checks every operator's arguments) and serialised, but neither built nor run.

N samples, V views, C columns.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import backend, jpeg_of, picture, prep_ok

from fastcssl.data.augment import NEUTRAL, ORDERS, Column, photometric_torch
from fastcssl.data.backends import BackendConfig, Crops, LoaderError
from fastcssl.data.backends.torchvision import TorchvisionBackend
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.order import EpochPlan
from fastcssl.data.policies import POLICIES, policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import Policy, ViewSpec, with_size
from fastcssl.distributed.world import World

backend("nvidia.dali")

from fastcssl.data.backends import dali_graph  # noqa: E402
from fastcssl.data.backends.dali import DaliBackend, _Engine  # noqa: E402

PLAIN = ViewSpec(size_px=48, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
TWO = (PLAIN, replace(PLAIN, size_px=32, scale=(0.2, 0.5)))
BATCH = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    out = tmp_path_factory.mktemp("dali") / "out"
    prep_ok(*"build synthetic:size=mixed,train=2,val=1 --scenario class --tasks 2 --formats tar --out".split(), out)
    return Prepared.open(out)


def settings(views: Policy, **changes: Any) -> BackendConfig:
    given: dict[str, Any] = {"num_threads": 2, "dtype": torch.float32, "augment": "fused", **changes}
    return BackendConfig(policy=views, local_batch_size=BATCH, device=torch.device("cpu"), **given)


def open_dali(data: Prepared, views: Policy = TWO, **changes: Any) -> DaliBackend:
    return DaliBackend(data, settings(views, **changes))


def plan_of(data: Prepared, views: Policy = TWO, epoch: int = 0) -> EpochPlan:
    rows = data.rows(Selection(tasks=(0, 1)))
    return EpochPlan(
        data, rows, policy=views, batch_size=BATCH, world=World(), seed=3, epoch=epoch, order="shuffled", last="drop"
    )


def tensors_of(batches: Iterator[Crops]) -> list[list[torch.Tensor]]:
    return [[t.clone() for t in batch.views_V or batch.crops_V] for batch in batches]


def reference(data: Prepared, plan: EpochPlan, views: Policy = TWO) -> list[list[torch.Tensor]]:
    return tensors_of(TorchvisionBackend(data, settings(views)).run(plan, 0))


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


# ---- Geometry --------------------------------------------------------------------------------------------------------

# Mean and largest difference from Pillow, in grey levels. DALI decodes to the very same pixels, but its anti-aliasing
# filter keeps floats where Pillow rounds between rows and columns, and it is tabulated. Measured: at most 0.23 and 9.
# Without anti-aliasing, bilinear agrees to one level; bicubic does not (Keys' -0.5 against torch's -0.75).
SHAPES: dict[str, tuple[ViewSpec, float, int]] = {
    "random": (PLAIN, 0.35, 16),
    "enlarged": (replace(PLAIN, size_px=96, scale=(0.08, 0.3)), 0.35, 16),
    "whole": (replace(PLAIN, crop="whole"), 0.35, 16),
    "center": (replace(PLAIN, crop="center", resize_px=55), 0.35, 16),
    "bilinear": (replace(PLAIN, interpolation="bilinear"), 0.35, 16),
    "plain bilinear": (replace(PLAIN, interpolation="bilinear", antialias=False), 0.02, 1),
    "plain bicubic": (replace(PLAIN, antialias=False), 2.0, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_crops_agree_with_the_reference(shape: str, data: Prepared) -> None:
    spec, mean, most = SHAPES[shape]
    plan = plan_of(data, (spec,))
    dali = open_dali(data, (spec,))
    ours, truth = tensors_of(dali.run(plan, 0)), reference(data, plan, (spec,))
    dali.close()
    for (mine,), (its,) in zip(ours, truth, strict=True):
        assert mine.dtype == torch.uint8 and mine.shape == (BATCH, spec.size_px, spec.size_px, 3)
        difference_N = (mine.int() - its.int()).abs().flatten(1)
        assert difference_N.float().mean(dim=1).max() < mean  # each image: none is another's
        assert difference_N.max() <= most


def test_one_pipeline_serves_epochs_whole_short_and_broken_off(data: Prepared) -> None:
    plans = [plan_of(data, epoch=epoch) for epoch in range(3)]
    dali = open_dali(data, prefetch=3)
    wholes = [tensors_of(dali.run(plan, 0)) for plan in plans]
    pipeline = dali._engine._pipeline
    assert [len(whole) for whole in wholes] == [len(plan) for plan in plans] and len(plans[0]) > 4
    for stop in (1, 2, len(plans[0])):
        batches = dali.run(plans[0], 0)
        assert same([[t.clone() for t in next(batches).crops_V] for _ in range(stop)], wholes[0][:stop])
        batches.close()  # type: ignore[attr-defined]
        assert same(tensors_of(dali.run(plans[1], 0)), wholes[1])
    for first in (2, len(plans[2]) - 1, len(plans[2])):  # resumed; the last two are shorter than what is prefetched
        assert same(tensors_of(dali.run(plans[2], first)), wholes[2][first:])
    assert dali._engine._pipeline is pipeline
    dali.close()


def test_a_batch_stays_until_the_next_is_asked_for_and_fetch_gives_the_same(data: Prepared) -> None:
    dali = open_dali(data)
    plan = plan_of(data)
    batches = dali.run(plan, 0)
    first = next(batches)
    copy_V = [t.clone() for t in first.crops_V]
    for place in (0, 5):
        fetched_V = dali.fetch(int(plan[0].row_N[place]), plan[0].box_VN4[:, place])
        assert all(torch.equal(mine, copy[place]) for mine, copy in zip(fetched_V, copy_V, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.crops_V, copy_V, strict=True))
    first.crops_V[0][0].zero_()  # a replacement is written into it
    assert next(batches).crops_V[0].float().std() > 10
    dali.close()


def test_batches_stay_as_long_as_they_are_held(data: Prepared) -> None:
    """On a GPU the loader asks for a batch while the last one is still read. Not every executor of DALI allows that."""
    dali = open_dali(data)
    held, copies = [], []
    for crops in dali.run(plan_of(data), 0):
        held.append(crops.crops_V)
        copies.append([crop.clone() for crop in crops.crops_V])
    assert len(held) > 4 and same(held, copies)
    dali.close()


def test_threads_and_prefetching_change_no_bit(data: Prepared) -> None:
    views = with_size(policy("pnr-moco-imagenet"), 32)
    runs = []
    for threads, prefetch in ((1, 1), (3, 4)):
        dali = open_dali(data, views, num_threads=threads, prefetch=prefetch, augment="dali")
        runs.append(tensors_of(dali.run(plan_of(data, views), 0)))
        dali.close()
    assert same(*runs)


def test_one_epoch_at_a_time_and_none_after_closing(data: Prepared) -> None:
    dali = open_dali(data)
    plan = plan_of(data)
    batches = dali.run(plan, 0)
    next(batches)
    with pytest.raises(LoaderError, match="in the middle of an epoch"):
        next(dali.run(plan, 0))
    next(batches)
    dali.close()
    dali.close()
    with pytest.raises(LoaderError, match="is closed"):
        next(batches)
    with pytest.raises(LoaderError, match="is closed"):
        next(dali.run(plan, 0))


def test_closing_ends_every_thread(data: Prepared) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    counts = []
    for _ in range(3):  # the first leaves what DALI starts once in a process
        dali = open_dali(data)
        batches = dali.run(plan_of(data), 0)
        next(batches)
        dali.fetch(0, plan_of(data)[0].box_VN4[:, 0])
        running = threads()
        dali.close()
        counts.append(threads())
        batches.close()  # type: ignore[attr-defined]
    assert counts[-1] <= counts[0] < running


# ---- Damage ----------------------------------------------------------------------------------------------------------

Damage = Callable[[bytes], bytes]
OTHER = jpeg_of(picture(1, 40, 40), quality=30)


def overwritten(jpeg: bytes, share: float, by: bytes) -> bytes:
    at = int(share * len(jpeg))
    return (jpeg[:at] + by + jpeg[at + len(by) :])[: len(jpeg)]


# How a JPEG is damaged, and a word from what is said about it. DALI decodes the second and the third without complaint.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "cut": (lambda jpeg: overwritten(jpeg, 0.5, bytes(len(jpeg))), "Premature end"),
    "early end": (lambda jpeg: overwritten(jpeg, 0.6, b"\xff\xd9" + bytes(len(jpeg))), "premature end"),
    "marker": (lambda jpeg: overwritten(jpeg, 0.6, b"\xff\x4a"), "Corrupt JPEG data"),
    "no header": (lambda jpeg: overwritten(jpeg, 0.0, bytes(64)), "not an image of a known format"),
    "another size": (lambda jpeg: overwritten(jpeg, 0.0, OTHER), "40 x 40 pixels, not as prepared"),
}


def damaged(data: Prepared, folder: Path, damages: dict[int, Damage]) -> Prepared:
    """A copy of the data in which these rows are damaged. The shards' sizes stay."""
    shutil.copytree(data.folder, folder)
    for row, damage in damages.items():
        sample = data.table[row]
        path = folder / data.manifest.shards[int(sample["tar_shard"])].path
        content = bytearray(path.read_bytes())
        begin, end = int(sample["tar_place"]), int(sample["tar_place"] + sample["tar_bytes"])
        content[begin:end] = damage(bytes(content[begin:end]))
        path.write_bytes(content)
    return Prepared.open(folder)


def assert_found(data: Prepared, dali: DaliBackend, plan: EpochPlan, expected: dict[int, str]) -> None:
    """Each damaged row is named with its reason, wherever it comes; all other samples are right."""
    truth = reference(data, plan)
    found = set()
    for number, batch in enumerate(dali.run(plan, 0)):
        row_N = plan[number].row_N.tolist()
        assert {row_N[place] for place in batch.faults} == expected.keys() & set(row_N)
        for place, reason in batch.faults.items():
            sample = data.table[row_N[place]]
            path = data.folder / data.manifest.shards[int(sample["tar_shard"])].path
            assert reason.startswith(f"sample {sample['id']} in {path}: ") and expected[row_N[place]] in reason
            found.add(row_N[place])
        good = [place for place in range(BATCH) if place not in batch.faults]
        for mine, its in zip(batch.crops_V, truth[number], strict=True):
            assert (mine[good].int() - its[good].int()).abs().float().mean(dim=(1, 2, 3)).max() < 0.35
    assert found == expected.keys()


def test_damage_is_found_and_named_and_the_rest_is_right(data: Prepared, tmp_path: Path) -> None:
    plans = [plan_of(data, epoch=epoch) for epoch in range(2)]
    rows = [*plans[0][1].row_N[[0, 3]].tolist(), *plans[0][3].row_N[[2, 4, 7]].tolist()]
    broken = damaged(data, tmp_path / "data", dict(zip(rows, (damage for damage, _ in DAMAGES.values()), strict=True)))
    expected = dict(zip(rows, (reason for _, reason in DAMAGES.values()), strict=True))
    dali = open_dali(broken)
    for plan in plans:
        met = {row for number in range(len(plan)) for row in plan[number].row_N.tolist()}  # the last batch is dropped
        assert_found(broken, dali, plan, {row: reason for row, reason in expected.items() if row in met})
    for row, reason in expected.items():
        with pytest.raises(LoaderError, match=reason):
            dali.fetch(row, plans[0][0].box_VN4[:, 0])
    dali.close()


def test_a_batch_that_dali_refuses_is_tried_sample_by_sample(
    data: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would happen to damage that only DALI notices: the check before it is turned off."""
    monkeypatch.setattr(DaliBackend, "_check", lambda *_: None)
    plan = plan_of(data)
    rows = [*plan[1].row_N[[1, 6]].tolist(), int(plan[2].row_N[5])]
    damages = (DAMAGES[kind][0] for kind in ("cut", "no header", "cut"))
    broken = damaged(data, tmp_path / "data", dict(zip(rows, damages, strict=True)))
    dali = open_dali(broken)
    words = ("Failed to decode sample", "nvImageCodec failure", "Failed to decode sample")  # DALI's, without its trace
    expected = dict(zip(rows, words, strict=True))
    assert_found(broken, dali, plan, expected)
    pipeline = dali._engine._pipeline
    assert_found(broken, dali, plan, expected)
    assert dali._engine._pipeline is pipeline  # they are known now: DALI does not meet them again
    dali.close()


def test_a_failure_without_a_culprit_is_said(data: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    dali = open_dali(data)
    healthy = _Engine.next

    def failing(engine: _Engine) -> Any:
        result = healthy(engine)
        if engine is dali._engine:
            engine._feed.under_way.appendleft(result[0])
            raise RuntimeError("Error in operator X\nencountered:\n\nout of memory\nIt is no longer valid.")
        return result

    monkeypatch.setattr(_Engine, "next", failing)
    with pytest.raises(LoaderError, match=r"samples it decodes one by one: out of memory\. Use --loader auto"):
        next(dali.run(plan_of(data), 0))
    monkeypatch.undo()
    assert same(tensors_of(dali.run(plan_of(data), 0)), tensors_of(open_dali(data).run(plan_of(data), 0)))


def test_a_shard_that_cannot_be_read_is_read_again_later(data: Prepared, tmp_path: Path) -> None:
    copy = damaged(data, tmp_path / "data", {})
    path = copy.folder / copy.manifest.shards[int(copy.table["tar_shard"][0])].path
    dali = open_dali(copy)
    box_V4 = np.array([(0, 0, 40, 40)] * 2, np.float32)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(LoaderError, match=f"{path} is missing"):
        dali.fetch(0, box_V4)
    path.with_suffix(".away").rename(path)
    assert dali.fetch(0, box_V4)[0].shape == (48, 48, 3)
    path.write_bytes(path.read_bytes()[: int(copy.table["tar_place"][0]) + 100])
    with pytest.raises(LoaderError, match="bytes instead of"):
        dali.fetch(0, box_V4)
    dali.close()


# ---- Photometry ------------------------------------------------------------------------------------------------------

ALL_OPS = replace(PLAIN, size_px=40, jitter_p=1.0, gray_p=1.0, blur_p=1.0, solarize_p=1.0, flip_p=1.0)
_RNG = np.random.default_rng(0)
N = 48
SOME = np.arange(N) // 3 % 2


def amounts(low: float, high: float) -> npt.NDArray[np.float32]:
    return _RNG.uniform(low, high, N).astype(np.float32)


def jitter() -> dict[str, Any]:
    return {name: amounts(0.2, 1.8) for name in ("brightness", "contrast", "saturation")} | {"hue": amounts(-0.5, 0.5)}


COLUMNS: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{name: {name: value} for name, value in jitter().items()},
    "jitter in every order": {**jitter(), "order": np.arange(N) % len(ORDERS)},
    "gray": {"gray": SOME},
    "blur": {"sigma": amounts(0.1, 2.0) * SOME},
    "solarize": {"solarize": np.where(SOME, 100.5, 256)},
    "flip": {"flip": SOME},
}
COLUMNS["all"] = {**jitter(), **COLUMNS["gray"], **COLUMNS["blur"], **COLUMNS["solarize"], **COLUMNS["flip"]}
COLUMNS["all"]["order"] = np.arange(N)[::-1] % len(ORDERS)
ENCODED = [np.frombuffer(jpeg_of(picture(seed, 40, 40)), np.uint8) for seed in range(N)]
BOX_VN4 = np.tile(np.array((0, 0, 40, 40), np.float32), (1, N, 1))
Finish = Callable[[npt.NDArray[np.float32] | None], torch.Tensor]


def make(views: Policy, device: dali_graph.Device, source: Any, photometry: torch.dtype | None) -> Any:
    common: dict[str, Any] = {"device_id": None, "batch_size": N, "num_threads": 1, "depth": 1}
    return dali_graph.make_pipeline(views, device=device, source=source, photometry=photometry, **common)


@pytest.fixture(scope="module")
def finish() -> Finish:
    """Crops or, with columns, finished views of the same pictures, by two pipelines that are built once."""
    inputs: list[Any] = [None]
    pipelines = [make((ALL_OPS,), "cpu", lambda: inputs[0], photometry) for photometry in (None, torch.float32)]

    def run(columns_NC: npt.NDArray[np.float32] | None) -> torch.Tensor:
        columns_VNC = columns_NC if columns_NC is None else columns_NC[None]
        inputs[0] = dali_graph.inputs_of((ALL_OPS,), ENCODED, BOX_VN4, columns_VNC)
        return torch.from_dlpack(pipelines[columns_NC is not None].run()[0].as_tensor())

    return run


@pytest.mark.parametrize("name", COLUMNS)
def test_the_photometry_is_the_sibling_s(name: str, finish: Finish) -> None:
    """To 0.01 grey levels (0.0002 measured): the same formulas in DALI's arithmetic, hue through HSV included."""
    columns_NC = np.tile(np.array(NEUTRAL, np.float32), (N, 1))
    for column, value in COLUMNS[name].items():
        columns_NC[:, Column[column.upper()]] = value
    crops_NHW3 = finish(None)
    ours = finish(columns_NC).permute(0, 3, 1, 2)
    truth = photometric_torch(crops_NHW3, torch.from_numpy(columns_NC), ALL_OPS.mean, ALL_OPS.std, torch.float32)
    assert ours.stride() == truth.stride()
    difference = (ours - truth).abs() * 255 * 0.25
    # Where solarize meets a value at its threshold, either side may be taken.
    assert (difference > 0.01).float().mean() < (1e-4 if name == "all" else 1e-9)
    if name != "nothing":
        plain = photometric_torch(crops_NHW3, torch.tensor([NEUTRAL] * N), ALL_OPS.mean, ALL_OPS.std, torch.float32)
        assert (ours - plain).abs().mean() > 0.02  # the operation did something


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_from_inside_dali(dtype: torch.dtype, data: Prepared, tmp_path: Path) -> None:
    """Through the loader, with a damaged sample, against --augment torch."""
    views = with_size(policy("pnr-moco-imagenet"), 32)
    bad = int(plan_of(data, views)[1].row_N[3])
    broken = damaged(data, tmp_path / "data", {bad: DAMAGES["early end"][0]})
    runs = []
    for augment in ("dali", "torch"):
        how: dict[str, Any] = {"loader": "dali", "augment": augment, "num_threads": 2, "dtype": dtype}
        with Loader(broken, LoaderConfig(policy=views, batch_size=BATCH, seed=3, **how)) as loader:
            stream = loader.open(Selection(tasks=(0, 1)))
            batches = islice(stream.epoch(0), 2)
            runs.append([[batch.id, *(view.clone() for view in batch.views)] for batch in batches])
            assert list(stream.quarantine) == [data.table["id"][bad]] and stream.num_replaced == 1
    rounding = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for mine, its in zip(*runs, strict=True):
        assert torch.equal(mine[0], its[0])
        for a, b in zip(mine[1:], its[1:], strict=True):
            assert a.dtype == dtype and a.is_contiguous(memory_format=torch.channels_last)
            assert ((a - b).abs() > rounding).float().mean() < 1e-3


@pytest.mark.parametrize("photometry", [None, torch.float16])
@pytest.mark.parametrize("name", ["pnr-moco-imagenet", "probe-val-imagenet"])
def test_the_gpu_s_graph_can_be_defined_and_serialised(name: str, photometry: torch.dtype | None) -> None:
    pipeline = make(POLICIES[name], "gpu", lambda: (), photometry)
    assert b"mixed" in pipeline.serialize()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA"):
            pipeline.build()
