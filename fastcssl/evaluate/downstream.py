"""Data sets that an encoder was not trained on, and how the paper probes them (its table 17).

All use the probe's own schedule: 100 epochs, batches of 256, the method's learning rate. The released transforms do not
resize to 96 px. Here, the random crop is resized to 96 px, and validation uses the whole image at 96 px. Images are
normalised as in the encoder's training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastcssl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Downstream:
    """How a downstream data set is prepared and probed."""

    prepare: str  # the command that prepares the data
    source: str
    size_px: int | None  # None: the encoder's own
    crop: Literal["family", "whole", "center"]
    batch_size: int = 256


RECIPES = {
    "cifar10": Downstream(
        prepare="fastcssl-prep build cifar10:ROOT --scenario joint --out DIR",
        source="cifar10",
        size_px=96,
        crop="whole",
    ),
    "cifar100": Downstream(
        prepare="fastcssl-prep build cifar100:ROOT --scenario joint --out DIR",
        source="cifar100",
        size_px=96,
        crop="whole",
    ),
    "stl10": Downstream(
        prepare="fastcssl-prep build stl10:ROOT --scenario joint --out DIR", source="stl10", size_px=96, crop="whole"
    ),
    "clipart": Downstream(
        prepare="fastcssl-prep build domainnet:ROOT --domains clipart --scenario joint --out DIR",
        source="domainnet",
        size_px=None,
        crop="center",
    ),
}
ANY = Downstream(prepare="fastcssl-prep build SOURCE --out DIR", source="any", size_px=None, crop="family")


def parse(text: str) -> tuple[str, Path]:
    """Returns the name and the folder of "NAME=DIR"."""
    name, equals, where = text.partition("=")
    if not equals or not name or not where or any(c.isspace() or c in "/:" for c in name):
        raise UserError(
            f"--downstream {text}: give NAME=DIR, a name and a prepared folder. The names {', '.join(RECIPES)} have "
            "recipes; data of any other name is probed like the run's own data."
        )
    return name, Path(where)


def recipe_of(name: str, source: str, where: Path) -> Downstream:
    """Returns the recipe of a name. Raises UserError if the data is not from the source that the name stands for."""
    found = RECIPES.get(name, ANY)
    if found.source not in ("any", source):
        raise UserError(
            f"--downstream {name}={where}: the recipe {name} is made for {found.source}, but the data was prepared "
            f"from {source}. Prepare it with {found.prepare}, or choose another name."
        )
    return found
