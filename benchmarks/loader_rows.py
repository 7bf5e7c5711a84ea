"""Lists what loader.py measures: the contenders, their settings, and the scale from which they are measured."""

import importlib.util
from typing import NamedTuple

LARGE, SMALL = "pnr-moco-imagenet", "pnr-moco-cifar"
SMOKE, QUICK, FULL, NEVER = range(4)


class Row(NamedTuple):
    """A contender. It is measured with one thread from scale `level` on, and with two threads from `level_2` on."""

    contender: str
    level: int
    level_2: int = FULL


class Section(NamedTuple):
    """Contenders that do the same work."""

    key: str
    title: str
    policy: str
    bilinear: bool
    photometry: bool
    lead: str  # the contender that the others are compared with
    rows: tuple[Row, ...]


NAMES = {
    "native": "native",
    "resident": "resident",
    "our-torchvision": "torchvision",
    "our-dali": "dali",
    "our-dali-inside": "dali, augment dali",
    "our-ffcv": "ffcv",
    "pil": "torchvision, PIL images",
    "tensors": "torchvision v2, tensors",
    "dali": "DALI on the CPU, its own",
    "ffcv": "FFCV, its own",
    "decode": "libjpeg decode alone",
    "copy": "memcpy of the views",
}
OURS = ("native", "resident", "our-torchvision", "our-dali", "our-dali-inside", "our-ffcv")
CEILINGS = ("decode", "copy")
NEEDS = {
    "dali": "nvidia.dali",
    "our-dali": "nvidia.dali",
    "our-dali-inside": "nvidia.dali",
    "ffcv": "ffcv",
    "our-ffcv": "ffcv",
}

_BACK_ENDS = ("our-torchvision", "our-dali", "our-ffcv")
_CEILINGS = (Row("decode", SMOKE, QUICK), Row("copy", QUICK))
_PEERS = (Row("pil", SMOKE, QUICK), Row("tensors", FULL), Row("dali", SMOKE, QUICK))
_BILINEAR = (Row("native", FULL, NEVER), Row("pil", FULL, NEVER), Row("tensors", FULL, NEVER), Row("dali", FULL, NEVER))

SECTIONS = (
    Section(
        "full", "full policy, float32 out", LARGE, False, True, "native",
        (Row("native", SMOKE, SMOKE), *(Row(name, QUICK, QUICK) for name in _BACK_ENDS),
         Row("our-dali-inside", FULL, NEVER), *_PEERS, *_CEILINGS),
    ),
    Section(
        "geometry", "geometry alone, uint8 out", LARGE, False, False, "native",
        (Row("native", SMOKE), *(Row(name, FULL) for name in (*_BACK_ENDS, "pil", "tensors", "dali")),
         Row("ffcv", SMOKE), *(Row(name, FULL) for name in CEILINGS)),
    ),
    Section("full_bilinear", "full policy, float32 out", LARGE, True, True, "native", _BILINEAR),
    Section(
        "geometry_bilinear", "geometry alone, uint8 out", LARGE, True, False, "native",
        (*_BILINEAR, Row("ffcv", FULL, NEVER)),
    ),
    Section(
        "small", "full policy, float32 out", SMALL, False, True, "resident",
        (Row("resident", SMOKE), Row("our-torchvision", FULL), Row("pil", SMOKE), Row("tensors", FULL),
         Row("copy", QUICK)),
    ),
)  # fmt: skip


def filter_of(section: Section, contender: str) -> str:
    """Returns the name of the filter that a contender resizes with."""
    if contender in CEILINGS:
        return "-"
    if contender == "ffcv":
        return "INTER_AREA"  # FFCV ignores the requested filter
    return "bilinear" if section.bilinear else "bicubic"


def is_installed(contender: str) -> bool:
    package = NEEDS.get(contender, "torch")
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # its parent package is missing
        return False
