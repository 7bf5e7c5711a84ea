"""Random numbers against statistics, draws against torchvision.

N samples, V views, C columns. All seeds are fixed: a test that passes once passes always.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import CenterCrop, ColorJitter, InterpolationMode, RandomResizedCrop, Resize, v2

from fastcssl.data.draws import NO_SOLARIZE, Column, Draw, Drawn, _exp, draw_views, uniform
from fastcssl.data.policies import POLICIES, policy
from fastcssl.data.views import Policy, ViewSpec, with_size

PLAIN = ViewSpec(size_px=224, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
IDS = np.arange(20_000)


def drawn(views: Policy, width: int = 500, height: int = 375, ids: npt.NDArray[np.int64] = IDS, seed: int = 3) -> Drawn:
    return draw_views(views, seed=seed, epoch=7, id_N=ids, width_N=width, height_N=height)


# ---- Random numbers --------------------------------------------------------------------------------------------------


def number(*words: int) -> float:
    seed, epoch, sample, visit, view, draw = words
    return float(uniform(seed, epoch, np.array([sample]), np.array([visit]), view, draw)[0])


def test_uniform_is_the_documented_hash() -> None:
    """In plain Python integers, and pinned: a change here changes every run's augmentations."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def plain(*words: int) -> float:
        golden, state = 0x9E3779B97F4A7C15, 0
        for word in words[:4]:
            state = mix(((state ^ word % 2**64) + golden) % 2**64)
        return (mix((state + (words[4] * 64 + words[5]) * golden) % 2**64) >> 11) / 2**53

    rng = np.random.default_rng(0)
    for _ in range(200):
        words = [int(x) for x in rng.integers(0, 2**62, 4)] + [int(x) for x in rng.integers(0, 60, 2)]
        assert number(*words) == plain(*words)
    assert number(2**64 - 1, 0, -1, 0, 0, 0) == plain(2**64 - 1, 0, -1, 0, 0, 0)
    assert number(1, 2, 3, 0, 0, 0) == 0.9249565587375322


def test_a_million_numbers() -> None:
    """No two alike, flat in 1,024 cells, and no dependence between neighbours along any word."""
    ids, five = np.arange(320), range(5)
    words = itertools.product(five, five, five, five, five)
    u = np.concatenate(
        [uniform(seed, epoch, ids, ids * 0 + visit, view, draw) for seed, epoch, visit, view, draw in words]
    )
    u = u.reshape(5, 5, 5, 5, 5, 320)
    assert u.size == 1_000_000
    assert np.unique(u).size == u.size
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.bincount((u.ravel() * 1024).astype(int), minlength=1024)
    chi2 = ((counts - u.size / 1024) ** 2).sum() / (u.size / 1024)
    assert abs(chi2 - 1023) < 4 * math.sqrt(2 * 1023)
    for axis in range(6):
        a, b = np.delete(u, -1, axis).ravel(), np.delete(u, 0, axis).ravel()
        cells = np.bincount((a * 8).astype(int) * 8 + (b * 8).astype(int), minlength=64)
        pairs = ((cells - a.size / 64) ** 2).sum() / (a.size / 64)
        assert pairs < 63 + 4 * math.sqrt(2 * 63), axis
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(a.size), axis


@pytest.mark.parametrize("word", range(4), ids=["seed", "epoch", "id", "visit"])
def test_avalanche(word: int) -> None:
    """Flipping any one bit of a word flips each of the top 32 output bits about every second time."""
    ids = np.random.default_rng(0).integers(0, 2**40, 2000)  # sparse: no id is another with one bit flipped

    def bits(flip: int) -> npt.NDArray[np.uint8]:
        words: list[object] = [11, 4, ids, ids * 0]
        words[word] = words[word] ^ (np.int64(flip) if word >= 2 else flip)  # type: ignore[operator]
        top = (uniform(*words, 1, 5) * 2**32).astype(">u4")  # type: ignore[arg-type]
        return np.unpackbits(top.view(np.uint8)).reshape(-1, 32)

    before = bits(0)
    for bit in range(63):
        rate = (before != bits(1 << bit)).mean(axis=0)
        assert abs(rate - 0.5).max() < 0.5 * 4.5 / math.sqrt(len(ids)), bit


def test_bad_counters_are_refused() -> None:
    with pytest.raises(ValueError, match="seed = -1: give an integer"):
        number(-1, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="epoch = "):
        number(0, 2**64, 0, 0, 0, 0)


def test_exp_is_accurate_enough_for_pixels() -> None:
    usual, wide = np.linspace(-0.3, 0.3, 10_001), np.linspace(-2.5, 2.5, 10_001)
    assert np.abs(_exp(usual) / np.exp(usual) - 1).max() < 1e-14
    assert np.abs(_exp(wide) / np.exp(wide) - 1).max() < 1e-9


# ---- Crop boxes ------------------------------------------------------------------------------------------------------

SHAPES = [(500, 375), (375, 500), (256, 256), (32, 32), (640, 200), (3, 3), (7, 5), (1000, 90)]


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0), (0.9, 1.0)], ids=str)
def test_boxes_are_those_of_torchvision_given_the_same_numbers(
    scale: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's own get_params, fed our random numbers in float64: every box equal, in every shape."""
    feed: Iterator[float] = iter(())
    where: dict[str, float] = {}

    def uniform_(self: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return self.fill_(float(low) + (float(high) - float(low)) * next(feed))

    def randint(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        assert (low, size) == (0, (1,))
        return torch.tensor([math.floor(where.pop(next(iter(where))) * high)])

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform_)
    monkeypatch.setattr(torch, "randint", randint)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for width, height in SHAPES:
            ids = np.arange(250)
            boxes = drawn((PLAIN, replace(PLAIN, scale=scale)), width, height, ids).box_VN4[1]
            numbers = [uniform(3, 7, ids, ids * 0, 1, Draw.AREA + k).tolist() for k in range(20)]
            tops, lefts = (uniform(3, 7, ids, ids * 0, 1, draw).tolist() for draw in (Draw.TOP, Draw.LEFT))
            image = Image.new("L", (width, height))
            for n in ids:
                feed = iter([row[n] for row in numbers])
                where = {"top": tops[n], "left": lefts[n]}
                i, j, h, w = RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3])
                assert boxes[n].tolist() == [j, i, j + w, i + h], (width, height, n)
    finally:
        torch.set_default_dtype(default)


def furthest_apart(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov's statistic times sqrt(n m / (n + m)); above 1.95 once in a thousand."""
    grid = np.sort(np.concatenate((a, b)))
    cdf_a, cdf_b = (np.searchsorted(np.sort(x), grid, side="right") / len(x) for x in (a, b))
    return float(np.abs(cdf_a - cdf_b).max() * math.sqrt(len(a) * len(b) / (len(a) + len(b))))


@pytest.mark.parametrize(("width", "height", "scale"), [(500, 375, 0.08), (300, 640, 0.2), (256, 256, 0.08)], ids=str)
def test_boxes_are_distributed_as_torchvision_s(width: int, height: int, scale: float) -> None:
    torch.manual_seed(0)
    transform, image = v2.RandomResizedCrop(224, (scale, 1.0)), torch.empty(1, height, width)
    params = [transform.make_params([image]) for _ in range(20_000)]
    theirs = np.array([(p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]) for p in params], float)
    ours = drawn((replace(PLAIN, scale=(scale, 1.0)),), width, height).box_VN4[0].astype(float)
    for name, of in {
        "left": lambda b: b[:, 0],
        "top": lambda b: b[:, 1],
        "width": lambda b: b[:, 2] - b[:, 0],
        "height": lambda b: b[:, 3] - b[:, 1],
        "area": lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]),
        "ratio": lambda b: (b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1]),
        "diagonal": lambda b: b[:, 0] + b[:, 1],  # left and top together
        "slack": lambda b: b[:, 0] / (width + 1 - (b[:, 2] - b[:, 0])),  # the place within the room there is
    }.items():
        assert furthest_apart(of(ours), of(theirs)) < 1.95, name


@pytest.mark.parametrize(("width", "height"), [(1, 500), (500, 1), (2, 4000), (4000, 9), (1, 1), (3, 3)])
def test_the_fallback_is_torchvision_s(width: int, height: int) -> None:
    """Where no try can fit, all boxes are the one central box; where some can, it is among the usual ones."""
    torch.manual_seed(0)
    image, num = Image.new("L", (width, height)), 5000 if width == height else 300
    theirs = {RandomResizedCrop.get_params(image, [0.9, 1.0], [3 / 4, 4 / 3]) for _ in range(num)}
    boxes = drawn((replace(PLAIN, scale=(0.9, 1.0)),), width, height, IDS[:num]).box_VN4[0]
    ours = {(int(t), int(l), int(b - t), int(r - l)) for l, t, r, b in boxes}  # noqa: E741
    assert ours == theirs
    if max(width, height) > 100:
        assert len(ours) == 1


def test_the_fallback_is_never_empty() -> None:
    """torchvision's would be 0 pixels wide here."""
    boxes = drawn((replace(PLAIN, ratio=(0.1, 0.2)),), 300, 1).box_VN4[0]
    assert (boxes[:, 2] - boxes[:, 0] == 1).all()
    assert (boxes[:, 3] - boxes[:, 1] == 1).all()


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 501), (224, 224), (90, 77), (641, 300)])
def test_center_is_resize_then_center_crop(width: int, height: int) -> None:
    (spec,) = policy("probe-val-imagenet")
    image = Image.fromarray(picture(width, height, width))
    theirs = CenterCrop(224)(Resize(256, InterpolationMode.BICUBIC)(image))
    box = drawn((spec,), width, height, np.array([0])).box_VN4[0, 0]
    ours = image.resize((224, 224), Image.Resampling.BICUBIC, box=tuple(map(float, box)))
    difference = np.abs(np.asarray(ours).astype(int) - np.asarray(theirs))
    assert difference.max() <= 2  # a tap of almost no weight may fall to either side
    assert (difference > 0).mean() < 1e-3


def test_whole_is_the_image() -> None:
    assert (drawn(policy("probe-val-cifar"), 40, 30).box_VN4 == [0, 0, 40, 30]).all()


# ---- Photometric columns ---------------------------------------------------------------------------------------------


def test_columns_are_the_header_s() -> None:
    header = (Path(__file__).parents[2] / "csrc/views/photometric.h").read_text()
    body = re.search(r"enum Column : int \{(.*?)\};", header, re.S)
    orders = re.search(r"kOrders\[24\]\[4\] = \{(.*?)\};", header, re.S)
    assert body and orders
    names = {name.upper(): int(value) for name, value in re.findall(r"k(\w+) = (\d+),", body[1])}
    assert names == {**Column.__members__, "NUMCOLUMNS": len(Column)}
    listed = [tuple(map(int, re.findall(r"\d", group))) for group in re.findall(r"\{([^{}]*)\}", orders[1])]
    assert listed == list(itertools.permutations(range(4)))


def about(share: npt.NDArray[np.bool_], p: float) -> bool:
    return abs(share.mean() - p) <= 3.5 * math.sqrt(p * (1 - p) / share.size)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_probabilities(name: str) -> None:
    columns_VNC = drawn(policy(name)).columns_VNC
    assert columns_VNC.dtype == np.float32
    assert columns_VNC.flags.c_contiguous
    for spec, columns in zip(policy(name), columns_VNC, strict=True):
        on = {
            "flip_p": columns[:, Column.FLIP] == 1,
            "jitter_p": columns[:, Column.BRIGHTNESS] != 1,
            "gray_p": columns[:, Column.GRAY] == 1,
            "blur_p": columns[:, Column.SIGMA] > 0,
            "solarize_p": columns[:, Column.SOLARIZE] == spec.solarize_threshold,
        }
        for field, share in on.items():
            assert about(share, getattr(spec, field)), field
        for a, b in itertools.combinations(on, 2):
            assert about(on[a] & on[b], getattr(spec, a) * getattr(spec, b)), (a, b)
        assert set(np.unique(columns[:, [Column.FLIP, Column.GRAY]])) <= {0.0, 1.0}
        assert (on["solarize_p"] | (columns[:, Column.SOLARIZE] == NO_SOLARIZE)).all()
        assert (columns[~on["jitter_p"], Column.BRIGHTNESS : Column.ORDER + 1] == [1, 1, 1, 0, 0]).all()


@pytest.mark.parametrize("strengths", [(0.4, 0.4, 0.2, 0.1), (0.8, 0.8, 0.8, 0.2), (1.5, 0.0, 2.0, 0.5)], ids=str)
def test_jitter_is_distributed_as_torchvision_s(strengths: tuple[float, float, float, float]) -> None:
    torch.manual_seed(0)
    b, c, s, h = strengths
    jitter = ColorJitter(b, c, s, h)
    neutral = (1.0, 1.0, 1.0, 0.0)
    theirs, orders = [], []
    for _ in range(20_000):
        order, *factors = ColorJitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        theirs.append([n if f is None else f for f, n in zip(factors, neutral, strict=True)])
        orders.append(tuple(order.tolist()))
    spec = replace(PLAIN, jitter_p=1.0, brightness=b, contrast=c, saturation=s, hue=h)
    columns = drawn((spec,)).columns_VNC[0].astype(float)
    for k in range(4):
        ours = columns[:, Column.BRIGHTNESS + k]
        assert furthest_apart(ours, np.array(theirs)[:, k].astype(np.float32).astype(float)) < 1.95, k
    index = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    for order in (columns[:, Column.ORDER], np.array([index[order] for order in orders])):
        counts = np.bincount(order.astype(int), minlength=24)
        assert len(counts) == 24
        assert ((counts - len(order) / 24) ** 2).sum() / (len(order) / 24) < 49.7  # 23 degrees, p = .001


def test_sigma_is_uniform_and_solarize_keeps_its_threshold() -> None:
    spec = replace(PLAIN, blur_p=1.0, blur_sigma=(0.5, 1.5), solarize_p=1.0, solarize_threshold=99.0)
    columns = drawn((spec,)).columns_VNC[0]
    grid = np.linspace(0.5, 1.5, len(IDS))
    assert furthest_apart(columns[:, Column.SIGMA].astype(float), grid) < 1.95
    assert (columns[:, Column.SOLARIZE] == 99).all()


# ---- What the draws depend on ----------------------------------------------------------------------------------------

LARGE = policy("pnr-moco-imagenet")
MIXED = (*LARGE, *policy("probe-val-imagenet"), *with_size(LARGE, 96), *policy("probe-val-cifar"))


def test_draws_are_pinned() -> None:
    """The same bytes on every machine; a change here breaks the resumption of runs and must be meant."""
    ids = np.arange(4096)
    views = draw_views(MIXED, seed=5, epoch=9, id_N=ids, visit_N=ids % 3, width_N=ids % 700 + 1, height_N=ids % 450 + 1)
    assert views.box_VN4.shape == (6, 4096, 4)
    assert hashlib.sha256(views.box_VN4.tobytes()).hexdigest()[:16] == "f7eb3a237fad527b"
    assert hashlib.sha256(views.columns_VNC.tobytes()).hexdigest()[:16] == "ad108af371f28f8f"


samples = st.lists(
    st.tuples(st.integers(-1, 2**63 - 1), st.integers(0, 9), st.integers(1, 5000), st.integers(1, 5000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(samples, st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_sample_is_drawn_alike_in_any_batch(rows: list[tuple[int, int, int, int]], seed: int, epoch: int) -> None:
    def draw(some: list[tuple[int, int, int, int]], views: Policy = MIXED) -> Drawn:
        ids, visits, widths, heights = np.array(some, np.int64).T
        return draw_views(views, seed=seed, epoch=epoch, id_N=ids, visit_N=visits, width_N=widths, height_N=heights)

    batch, again, alone = draw(rows), draw(rows[::-1]), [draw([row]) for row in rows]
    for whole, back, single in (
        (batch.box_VN4, again.box_VN4, [one.box_VN4 for one in alone]),
        (batch.columns_VNC, again.columns_VNC, [one.columns_VNC for one in alone]),
    ):
        assert (whole == back[:, ::-1]).all()
        assert (whole == np.concatenate(single, axis=1)).all()
    prefix = draw(rows, MIXED[:2])  # nor does a view depend on those after it
    assert (prefix.box_VN4 == batch.box_VN4[:2]).all()
    assert (prefix.columns_VNC == batch.columns_VNC[:2]).all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 70_000),
    st.integers(1, 70_000),
    st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)),
    st.tuples(st.floats(0.05, 20), st.floats(0.05, 20)),
    st.integers(0, 2**32),
)
def test_boxes_lie_inside(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    random = replace(PLAIN, scale=(min(scale), max(scale)), ratio=(min(ratio), max(ratio)))
    box = drawn((random, *MIXED), width, height, np.arange(16), seed).box_VN4
    assert (box[..., :2] >= 0).all()
    assert (box[..., :2] < box[..., 2:]).all()
    assert (box[..., 2:] <= [width, height]).all()
    assert (box[0] == np.rint(box[0])).all()


def test_seed_epoch_visit_and_view_all_matter() -> None:
    same = (LARGE[0], LARGE[0])

    def draw(**changes: int) -> Drawn:
        counters: dict[str, int] = {"seed": 1, "epoch": 2, "visit_N": 0, **changes}
        return draw_views(same, id_N=np.arange(500), width_N=500, height_N=375, **counters)  # type: ignore[arg-type]

    base = draw()
    assert (draw().box_VN4 == base.box_VN4).all()
    others = [draw(seed=2).box_VN4, draw(epoch=3).box_VN4, draw(visit_N=1).box_VN4, base.box_VN4[::-1]]
    for other in others:
        assert (other != base.box_VN4).any(axis=-1).mean() > 0.99
    assert abs(np.corrcoef(base.columns_VNC[0, :, Column.HUE], base.columns_VNC[1, :, Column.HUE])[0, 1]) < 0.15


def test_threads_do_not_matter() -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(drawn, MIXED, 500, 375, IDS[start : start + 1000]) for start in range(0, 20_000, 1000)]
        parts = [future.result() for future in futures]
    whole = drawn(MIXED)
    assert (np.concatenate([part.box_VN4 for part in parts], axis=1) == whole.box_VN4).all()
    assert (np.concatenate([part.columns_VNC for part in parts], axis=1) == whole.columns_VNC).all()


def test_edges() -> None:
    empty = drawn(LARGE, ids=IDS[:0])
    assert (empty.box_VN4.shape, empty.columns_VNC.shape) == ((2, 0, 4), (2, 0, 9))
    with pytest.raises(ValueError, match="at least one view"):
        drawn(())
    with pytest.raises(ValueError, match=r"Sample 1: width 0 px"):
        draw_views(LARGE, seed=0, epoch=0, id_N=IDS[:2], width_N=np.array([9, 0]), height_N=9)
    with pytest.raises(ValueError, match=r"Sample 0: height 5e\+08 px"):
        draw_views(LARGE, seed=0, epoch=0, id_N=IDS[:2], width_N=9, height_N=500_000_000)
