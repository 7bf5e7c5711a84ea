"""View policies against the references' table."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from fastcssl.data.draws import NO_SOLARIZE, Drawn, Reserved, draw_views
from fastcssl.data.policies import EXTRAPOLATED, NAMED, POLICIES, pair, plain_view, policy
from fastcssl.data.views import Policy, ViewSpec, with_min_scale, with_normalisation, with_size

PLAIN = ViewSpec(size_px=224, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
IDS = np.arange(20_000)


def drawn(views: Policy, width: int = 500, height: int = 375, ids: npt.NDArray[np.int64] = IDS, seed: int = 3) -> Drawn:
    return draw_views(views, seed=seed, epoch=7, id_N=ids, width_N=width, height_N=height)


# ---- Policies --------------------------------------------------------------------------------------------------------

# The released scripts, row by row: min_scale, (b, c, s, h), p_blur and p_solarize of both views.
TABLE = """
cassle-barlow cassle-byol pnr-barlow pnr-byol    .08  .4 .4 .2 .1   cifar 0 0    0 .2   imagenet 1 .1    0 .2
cassle-vicreg pnr-vicreg                         .2   .4 .4 .2 .1   cifar 0 0   .1 .1   imagenet .5 .5  .1 .1
cassle-simclr cassle-supcon                      .08  .8 .8 .8 .2   cifar 0 0    0  0   imagenet .5 .5   0  0
cassle-moco                                      .08  .4 .4 .4 .1   cifar 0 0    0  0   imagenet .5 .5   0  0
pnr-moco pnr-simclr pnr-supcon                   .08  .4 .4 .2 .1   cifar 0 0    0 .2   imagenet 1 .1    0 .2
""".split("\n")[1:-1]
ROWS = {name: row.split()[-15:] for row in TABLE for name in row.split()[:-15]}
STATISTICS = {
    "cifar": (32, (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)),
    "imagenet": (224, (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)),
}


@pytest.mark.parametrize("name", ROWS)
def test_policies_hold_the_table(name: str) -> None:
    words = ROWS[name]
    numbers = dict(zip(("min_scale", "b", "c", "s", "h"), map(float, words[:5]), strict=True))
    for family, cells in ((words[5], words[6:10]), (words[10], words[11:15])):
        blur_p, solarize_p = [float(x) for x in cells[:2]], [float(x) for x in cells[2:]]
        views = policy(f"{name}-{family}")
        assert [view.blur_p for view in views] == blur_p
        assert [view.solarize_p for view in views] == solarize_p
        for view in views:
            assert view.scale == (numbers["min_scale"], 1.0)
            assert (view.brightness, view.contrast) == (numbers["b"], numbers["c"])
            assert (view.saturation, view.hue) == (numbers["s"], numbers["h"])
            assert (view.size_px, view.mean, view.std) == STATISTICS[family]
            assert (view.crop, view.ratio, view.resize_px) == ("random", (3 / 4, 4 / 3), None)
            assert (view.jitter_p, view.gray_p, view.flip_p) == (0.8, 0.2, 0.5)
            assert (view.blur_sigma, view.solarize_threshold) == ((0.1, 2.0), 128)
            assert (view.interpolation, view.antialias) == ("bicubic", True)


def test_probe_policies() -> None:
    for family, (size_px, mean, std) in STATISTICS.items():
        common = {"size_px": size_px, "mean": mean, "std": std}
        assert policy(f"probe-train-{family}") == (ViewSpec(crop="random", scale=(0.08, 1.0), flip_p=0.5, **common),)
    assert policy("probe-val-cifar")[0].crop == "whole"
    (val,) = policy("probe-val-imagenet")
    assert (val.crop, val.resize_px, val.size_px) == ("center", 256, 224)
    for name in ("probe-val-cifar", "probe-val-imagenet"):
        columns = drawn(policy(name)).columns_VNC
        assert (columns == [0, 1, 1, 1, 0, 0, 0, 0, NO_SOLARIZE]).all()


def test_names_are_complete_and_unknown_ones_suggest_the_nearest() -> None:
    assert len(POLICIES) == len(ROWS) * 2 + 4 == 28
    assert set(POLICIES) > EXTRAPOLATED
    with pytest.raises(ValueError, match=r"no view policy 'cassle-simclr-cifr'. Did you mean 'cassle-simclr-cifar'"):
        policy("cassle-simclr-cifr")
    with pytest.raises(ValueError, match=r"Known: .*probe-val-imagenet"):
        policy("?")


def test_resizing_and_normalising_keep_the_rest() -> None:
    views = policy("pnr-moco-imagenet")
    assert with_size(with_size(views, 96), 224) == views
    assert [view.size_px for view in with_size(views, 96)] == [96, 96]
    (val,) = with_size(policy("probe-val-imagenet"), 96)
    assert (val.resize_px, val.size_px) == (110, 96)
    assert with_min_scale(views, 0.4) == tuple(replace(view, scale=(0.4, 1.0)) for view in views)
    with pytest.raises(ValueError, match="scale"):
        with_min_scale(views, 1.5)
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    assert with_normalisation(views, mean, std) == tuple(replace(view, mean=mean, std=std) for view in views)


def test_the_views_of_a_multi_crop_keep_their_proportions() -> None:
    large = tuple(replace(view, scale=(0.25, 1.0)) for view in policy("pnr-moco-imagenet"))
    views = large + (replace(large[0], size_px=96, scale=(0.05, 0.25)),) * 6
    assert [view.size_px for view in with_size(views, 112)] == [112, 112] + [48] * 6
    assert with_size(with_size(views, 448), 224) == views
    assert [view.size_px for view in with_size(views, 1)] == [1] * 8
    assert {view.scale for view in with_min_scale(views, 0.5)[:2]} == {(0.5, 1.0)}
    assert [view.scale for view in with_min_scale(views, 0.5)[2:]] == [(pytest.approx(0.1), 0.25)] * 6
    narrow = with_min_scale((views[0], replace(PLAIN, scale=(0.2, 0.3))), 0.9)
    assert [view.scale for view in narrow] == [(0.9, 1.0), (0.3, 0.3)]
    assert with_size((), 32) == with_min_scale((), 0.5) == ()


def test_a_name_says_what_its_images_are_like() -> None:
    for name, named in NAMED.items():
        assert name.endswith(f"-{named.family}") and named.views == policy(name)
        assert {(view.size_px, view.mean, view.std) for view in named.views} == {STATISTICS[named.family]}
    for family in ("cifar", "imagenet"):
        assert pair(family) == policy(f"pnr-moco-{family}")  # type: ignore[arg-type]
        assert plain_view(family) == replace(policy(f"probe-train-{family}")[0], flip_p=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size_px": 0}, "size_px = 0"),
        ({"crop": "centre"}, "crop = 'centre': use one of random, center, whole"),
        ({"scale": (0.5, 0.2)}, "scale"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"scale": (0.1, 1.5)}, "scale"),
        ({"scale": (0.1,)}, r"scale = \(0.1,\): give 2 numbers"),
        ({"ratio": (2.0, 1.0)}, "ratio"),
        ({"ratio": (0.5, math.inf)}, "ratio"),
        ({"crop": "center"}, "resize_px = None: a center crop needs"),
        ({"crop": "center", "resize_px": 200}, "resize_px = 200: a center crop needs at least its size_px, 224"),
        ({"resize_px": 256}, "resize_px = 256: leave it out"),
        ({"flip_p": 1.1}, "flip_p = 1.1: give a probability"),
        ({"jitter_p": -0.1}, "jitter_p"),
        ({"gray_p": math.nan}, "gray_p"),
        ({"brightness": -1.0}, "brightness"),
        ({"contrast": math.inf}, "contrast"),
        ({"hue": 0.6}, "hue"),
        ({"blur_sigma": (0.1, 3.0)}, "blur_sigma"),
        ({"blur_sigma": (0.0, 1.0)}, "blur_sigma"),
        ({"solarize_threshold": 256.0}, "solarize_threshold"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": (0.2, 0.0, 0.2)}, "std"),
        ({"interpolation": "nearest"}, "interpolation = 'nearest': use bicubic or bilinear"),
    ],
    ids=str,
)
def test_bad_specs_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=f"ViewSpec.{says}"):
        replace(PLAIN, **changes)  # type: ignore[arg-type]


def test_lists_become_tuples() -> None:
    assert hash(replace(PLAIN, scale=[0.08, 1.0])) == hash(PLAIN)  # type: ignore[arg-type]


def test_reserved_counters_keep_their_numbers() -> None:
    """They define runs; and a task's number, added to an epoch of these, must not reach the next."""
    epochs = [number for number in Reserved if number.name.endswith("_EPOCH")]
    views = [number for number in Reserved if number.name.endswith("_VIEW")]
    assert [number.name for number in epochs] == ["PREFILL_EPOCH", "REPLAY_EPOCH", "STORE_EPOCH", "FISHER_EPOCH"]
    assert [*epochs] == [1 << 20, 1 << 21, 1 << 22, 1 << 23]
    assert [number.name for number in views] == ["ORDER_VIEW", "REPLACEMENT_VIEW", "SUBSET_VIEW", "CHOICE_VIEW"]
    assert [*views] == [(1 << 32) + offset for offset in range(4)]
    assert len(Reserved.__members__) == len(epochs) + len(views)
