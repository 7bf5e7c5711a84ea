"""What an augmented view is, in neutral terms, and the policies of CaSSLe and PNR as data.

A policy is a plain tuple with one `ViewSpec` for each view, so any number of views is tuple arithmetic:
`policy("cassle-simclr-cifar")[:1] * 4` is four like views, `big + with_size(small, 96)` is a multi-crop. Nothing here
is random: `fastcssl.data.draws` turns a policy into boxes and photometric columns.

The numbers are those of the released scripts. The order of the operations is fixed: crop, jitter, grayscale, blur,
solarize, flip, normalise.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dataprep.suggest import nearest

Crop = Literal["random", "center", "whole"]
Interpolation = Literal["bicubic", "bilinear"]
Method = Literal["moco", "simclr", "barlow", "byol", "vicreg", "supcon"]
Source = Literal["cassle", "pnr"]
Family = Literal["cifar", "imagenet"]  # imagenet: ImageNet-100, ImageNet-1k, DomainNet and anything alike

Range = tuple[float, float]
Rgb = tuple[float, float, float]

MAX_SIGMA_PX = 2.0  # the blur's radius is ceil(5.5 sigma), at most 11 (csrc/views/photometric.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """One view. What is not named does nothing: the defaults are a crop and a normalisation.

    `crop`: "random" is RandomResizedCrop(scale, ratio); "center" resizes the shorter side to `resize_px` and cuts the
    middle; "whole" resizes the whole image, whatever its shape, to a square of `size_px`. The resampling filter of a
    random crop stops at the edge of its box (the references crop, then resize), that of a center crop does not.
    """

    size_px: int
    mean: Rgb  # of pixels on the scale 0..1
    std: Rgb
    crop: Crop = "random"
    scale: Range = (0.08, 1.0)  # share of the image's area
    ratio: Range = (3 / 4, 4 / 3)  # width / height
    resize_px: int | None = None  # "center" only
    interpolation: Interpolation = "bicubic"
    antialias: bool = True
    flip_p: float = 0.0
    jitter_p: float = 0.0
    brightness: float = 0.0  # a factor from [max(0, 1 - x), 1 + x]; so are contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # a shift from [-x, x], in turns
    gray_p: float = 0.0
    blur_p: float = 0.0
    blur_sigma: Range = (0.1, MAX_SIGMA_PX)  # pixels of the view
    solarize_p: float = 0.0
    solarize_threshold: float = 128.0  # on the scale 0..255

    def __post_init__(self) -> None:
        for field, length in (("scale", 2), ("ratio", 2), ("blur_sigma", 2), ("mean", 3), ("std", 3)):
            values = tuple(getattr(self, field))  # a list, as read back from JSON, would not hash
            self._require(len(values) == length, field, f"give {length} numbers")
            self._require(all(map(math.isfinite, values)), field, "give finite numbers")
            object.__setattr__(self, field, values)
        self._require(self.size_px >= 1, "size_px", "give the side of the view in pixels, at least 1")
        self._require(self.crop in get_args(Crop), "crop", f"use one of {', '.join(get_args(Crop))}")
        self._require(self.interpolation in get_args(Interpolation), "interpolation", "use bicubic or bilinear")
        self._require(0 < self.scale[0] <= self.scale[1] <= 1, "scale", "give (min, max) with 0 < min <= max <= 1")
        self._require(0 < self.ratio[0] <= self.ratio[1], "ratio", "give (min, max) of width / height, 0 < min <= max")
        if self.crop == "center":
            fits = self.resize_px is not None and self.resize_px >= self.size_px
            self._require(fits, "resize_px", f"a center crop needs at least its size_px, {self.size_px}")
        else:
            self._require(self.resize_px is None, "resize_px", f"leave it out: this is a {self.crop} crop")
        for field in ("flip_p", "jitter_p", "gray_p", "blur_p", "solarize_p"):
            self._require(0 <= getattr(self, field) <= 1, field, "give a probability between 0 and 1")
        for field in ("brightness", "contrast", "saturation"):
            self._require(0 <= getattr(self, field) < math.inf, field, "give a strength of 0 or more")
        self._require(0 <= self.hue <= 0.5, "hue", "give a strength between 0 and 0.5 turns")
        self._require(
            0 < self.blur_sigma[0] <= self.blur_sigma[1] <= MAX_SIGMA_PX,
            "blur_sigma",
            f"give (min, max) with 0 < min <= max <= {MAX_SIGMA_PX:g}, the widest blur the kernel does",
        )
        self._require(0 <= self.solarize_threshold <= 255, "solarize_threshold", "give a level between 0 and 255")
        self._require(min(self.std) > 0, "std", "give positive numbers")

    def _require(self, holds: bool, field: str, remedy: str) -> None:
        if not holds:
            raise ValueError(f"ViewSpec.{field} = {getattr(self, field)!r}: {remedy}.")


Policy = tuple[ViewSpec, ...]


def with_size(views: Policy, size_px: int) -> Policy:
    """The same views at another size. A center crop keeps its margin: 256 -> 224 becomes 110 -> 96."""
    return tuple(
        replace(
            view,
            size_px=size_px,
            resize_px=None if view.resize_px is None else round(view.resize_px * size_px / view.size_px),
        )
        for view in views
    )


def with_min_scale(views: Policy, min_scale: float) -> Policy:
    """The same views, but their crops show at least this share of the image."""
    return tuple(replace(view, scale=(min_scale, view.scale[1])) for view in views)


def with_normalisation(views: Policy, mean: Rgb, std: Rgb) -> Policy:
    return tuple(replace(view, mean=mean, std=std) for view in views)


# ---- The references' policies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A row of the table: what distinguishes one method's views. Pairs are (first view, second view)."""

    min_scale: float
    jitter: tuple[float, float, float, float]  # brightness, contrast, saturation, hue
    blur_p: Range  # on large images; the references never blur CIFAR's
    solarize_p: Range


_ASYMMETRIC = _Look(min_scale=0.08, jitter=(0.4, 0.4, 0.2, 0.1), blur_p=(1.0, 0.1), solarize_p=(0.0, 0.2))
_VICREG = _Look(min_scale=0.2, jitter=(0.4, 0.4, 0.2, 0.1), blur_p=(0.5, 0.5), solarize_p=(0.1, 0.1))
_STRONG = _Look(min_scale=0.08, jitter=(0.8, 0.8, 0.8, 0.2), blur_p=(0.5, 0.5), solarize_p=(0.0, 0.0))
_MODERATE = _Look(min_scale=0.08, jitter=(0.4, 0.4, 0.4, 0.1), blur_p=(0.5, 0.5), solarize_p=(0.0, 0.0))

_LOOKS: dict[Source, dict[Method, _Look]] = {
    "cassle": {
        "moco": _MODERATE,
        "simclr": _STRONG,
        "barlow": _ASYMMETRIC,
        "byol": _ASYMMETRIC,
        "vicreg": _VICREG,
        "supcon": _STRONG,
    },
    "pnr": {
        "moco": _ASYMMETRIC,
        "simclr": _ASYMMETRIC,
        "barlow": _ASYMMETRIC,
        "byol": _ASYMMETRIC,
        "vicreg": _VICREG,
        "supcon": _ASYMMETRIC,
    },
}

# Names for which the references have no script; the values follow the method's other scripts, or SimCLR's.
EXTRAPOLATED = frozenset({"cassle-moco-cifar", "cassle-supcon-cifar", "pnr-supcon-cifar", "pnr-supcon-imagenet"})


def _plain(family: Family) -> ViewSpec:
    """The random crop alone."""
    if family == "cifar":
        return ViewSpec(size_px=32, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.243, 0.261))
    # The first std is .228 in the references (.229 elsewhere); published numbers were made with it.
    return ViewSpec(size_px=224, mean=(0.485, 0.456, 0.406), std=(0.228, 0.224, 0.225))


def _pretraining(look: _Look, family: Family) -> Policy:
    brightness, contrast, saturation, hue = look.jitter
    return tuple(
        replace(
            _plain(family),
            scale=(look.min_scale, 1.0),
            flip_p=0.5,
            jitter_p=0.8,
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=hue,
            gray_p=0.2,
            blur_p=blur_p if family == "imagenet" else 0.0,
            solarize_p=solarize_p,
        )
        for blur_p, solarize_p in zip(look.blur_p, look.solarize_p, strict=True)
    )


def _all_policies() -> dict[str, Policy]:
    policies = {
        f"{source}-{method}-{family}": _pretraining(look, family)
        for source, looks in _LOOKS.items()
        for method, look in looks.items()
        for family in get_args(Family)
    }
    for family in get_args(Family):
        policies[f"probe-train-{family}"] = (replace(_plain(family), flip_p=0.5),)
    policies["probe-val-cifar"] = (replace(_plain("cifar"), crop="whole"),)
    policies["probe-val-imagenet"] = (replace(_plain("imagenet"), crop="center", resize_px=256),)
    return policies


POLICIES: dict[str, Policy] = _all_policies()


def policy(name: str) -> Policy:
    """By name: "{cassle|pnr}-{method}-{family}", "probe-train-{family}" or "probe-val-{family}"."""
    if name not in POLICIES:
        raise ValueError(f"There is no view policy {name!r}. {nearest(name, POLICIES)}")
    return POLICIES[name]
