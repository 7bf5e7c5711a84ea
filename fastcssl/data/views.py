"""Describes augmented views, independently of the code that computes them.

A policy is a plain tuple with one `ViewSpec` per view, so tuple arithmetic gives any number of views:
`policy("cassle-simclr-cifar")[:1] * 4` is four equal views, `large + with_size(small, 96)` is a multi-crop. Nothing
here is random: `fastcssl.data.draws` turns a policy into boxes and photometric columns. The policies of the references
are in policies.py.

The order of the operations is fixed: crop, jitter, grayscale, blur, solarize, flip, normalise.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

Crop = Literal["random", "center", "whole"]
Interpolation = Literal["bicubic", "bilinear"]
Family = Literal["cifar", "imagenet"]  # imagenet: ImageNet-100, ImageNet-1k, DomainNet and similar images

Range = tuple[float, float]
Rgb = tuple[float, float, float]

MAX_SIGMA_PX = 2.0  # the blur's radius is ceil(5.5 sigma), at most 11 (csrc/views/photometric.h)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSpec:
    """The settings of one view. The defaults only crop and normalise.

    `crop`: "random" is RandomResizedCrop(scale, ratio); "center" resizes the shorter side to `resize_px` and cuts out
    the middle; "whole" resizes the whole image, whatever its shape, to a square of `size_px`. The resampling filter of
    a random crop stops at the edge of its box, because the references crop first and then resize. The filter of a
    center crop reads past its box.
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
    brightness: float = 0.0  # x: a factor from [max(0, 1 - x), 1 + x]; the same for contrast and saturation
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # x: a shift from [-x, x], in turns
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
            f"give (min, max) with 0 < min <= max <= {MAX_SIGMA_PX:g}, the widest blur that the kernel supports",
        )
        self._require(0 <= self.solarize_threshold <= 255, "solarize_threshold", "give a level between 0 and 255")
        self._require(min(self.std) > 0, "std", "give positive numbers")

    def _require(self, holds: bool, field: str, remedy: str) -> None:
        if not holds:
            raise ValueError(f"ViewSpec.{field} = {getattr(self, field)!r}: {remedy}.")


Policy = tuple[ViewSpec, ...]


def with_size(views: Policy, size_px: int) -> Policy:
    """Returns the same views with a first view of `size_px`, and the others scaled in proportion.

    Views of one size all become `size_px`; a multi-crop of 224 and 96 px becomes 112 and 48. A center crop keeps its
    margin: 256 -> 224 becomes 110 -> 96.
    """
    resized = []
    for view in views:
        side_px = max(1, round(view.size_px * size_px / views[0].size_px))
        resize_px = None if view.resize_px is None else round(view.resize_px * side_px / view.size_px)
        resized.append(replace(view, size_px=side_px, resize_px=resize_px))
    return tuple(resized)


def with_min_scale(views: Policy, min_scale: float) -> Policy:
    """Returns the same views, but crops of the first view show at least this share of the image.

    The minimum shares of the other views keep their proportion to the first, up to the maximum of each view.
    """
    if views and not 0 < min_scale <= views[0].scale[1]:
        raise ValueError(
            f"The minimum scale of a crop is {min_scale}; give a share above 0 and at most {views[0].scale[1]:g}, the "
            "largest share that the first view shows."
        )
    return tuple(
        replace(view, scale=(min(view.scale[1], min_scale * (view.scale[0] / views[0].scale[0])), view.scale[1]))
        for view in views
    )


def with_normalisation(views: Policy, mean: Rgb, std: Rgb) -> Policy:
    """Returns the same views, normalised by another mean and standard deviation."""
    return tuple(replace(view, mean=mean, std=std) for view in views)
