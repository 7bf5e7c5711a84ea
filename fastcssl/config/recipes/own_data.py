"""The values of the recipes `own` and `own-small`, which follow the prepared data that they are given.

The rules aim at as many steps per task as the paper's recipes make (20,000 on CIFAR-100), and at a batch that leaves a
few steps in every epoch. A run of few steps uses AdamW, because LARS needs tens of thousands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataprep.manifest import DEFAULT_NAME, manifest_path
from fastcssl.data.views import Family

FROM_DATA = "from the data"
_SMALL_PX = 64  # images up to this side are treated as CIFAR's are
_LARGEST_PX = 224
_FEW_STEPS = 10_000  # per task; LARS needs more


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The facts about prepared data that the recipes follow. The defaults describe photos, for lists without --data."""

    name: str = "DATA"
    scenario: str = "class"
    short_px: int = 256  # shorter side of the median training image
    num_train: tuple[int, ...] = (25_000,) * 5  # images of each task
    is_labelled: bool = True  # every task has validation images, and there is more than one class

    @property
    def family(self) -> Family:
        return "cifar" if self.short_px <= _SMALL_PX else "imagenet"


def name_of(data: Path) -> str:
    """Returns the name of prepared data: that of its folder, and of the manifest if it is not the first."""
    path = data if data.suffix == ".json" else data / f"{DEFAULT_NAME}.json"
    folder = path.resolve().parent.name
    return folder if path.stem == DEFAULT_NAME else f"{folder}-{path.stem}"


def facts_of(data: Path) -> DataFacts:
    """Returns the facts about a prepared folder, or one of its manifests."""
    import numpy as np  # imported here because a list of recipes does not need it

    from fastcssl.data.prepared import Prepared

    opened = Prepared.open(data)
    manifest, table = opened.manifest, opened.table
    rows = table[table["is_stored"] & ~table["is_val"]]
    return DataFacts(
        name=name_of(manifest_path(data)),
        scenario=manifest.scenario.kind,
        short_px=int(np.median(np.minimum(rows["width"], rows["height"]))),
        num_train=tuple(task.train.count for task in manifest.tasks),
        is_labelled=len(manifest.classes) > 1 and all(task.val.count for task in manifest.tasks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The size of an experiment."""

    largest_px: int  # of the views
    cifar_stem_px: int  # views up to this side keep their resolution in the stem
    batch_size: int
    num_steps: int  # per task
    epochs: tuple[int, int]  # at least, at most
    adamw_lr: float  # for a batch of 256
    warmup_epochs: int  # with AdamW


_SCALES = {
    "own": _Scale(
        largest_px=_LARGEST_PX,
        cifar_stem_px=64,
        batch_size=256,
        num_steps=20_000,
        epochs=(100, 500),
        adamw_lr=0.002,
        warmup_epochs=10,
    ),
    "own-small": _Scale(
        # As in the demo, the stem for large images: at 32 px it is an order of magnitude faster on CPUs.
        largest_px=96,
        cifar_stem_px=24,
        batch_size=64,
        num_steps=1_500,
        epochs=(10, 100),
        adamw_lr=0.008,
        warmup_epochs=2,
    ),
}


def followed(recipe: str, facts: DataFacts, method: str) -> Mapping[str, tuple[Any, str]]:
    """Returns, by dotted key, the values that follow the data, each with its source."""
    scale = _SCALES[recipe]
    size_px = min(scale.largest_px, max(facts.short_px, 1))
    size_px -= size_px % 4 if size_px > 4 else 0
    mean_train = sum(facts.num_train) // len(facts.num_train)
    batch_size = _batch_size(min(facts.num_train), scale)
    steps_per_epoch = max(mean_train // batch_size, 1)
    low, high = scale.epochs
    epochs = min(max(10 * round(scale.num_steps / steps_per_epoch / 10), low), high)
    num_steps = epochs * steps_per_epoch
    sized = f"{FROM_DATA}: {facts.short_px} px"
    counted = f"{FROM_DATA}: {mean_train:,} images per task"
    smallest = f"{FROM_DATA}: {min(facts.num_train):,} images in the smallest task"
    values: dict[str, tuple[Any, str]] = {
        "views.size_px": (size_px, sized),
        "encoder.stem": ("cifar" if size_px <= scale.cifar_stem_px else "imagenet", sized),
        "batch_size": (batch_size, smallest),
        "epochs": (epochs, counted),
        "online_probe": ("every=0" if facts.is_labelled else "off", f"{FROM_DATA}: its labels"),
    }
    if num_steps >= _FEW_STEPS:
        return values
    few = f"{FROM_DATA}: {num_steps:,} steps per task"
    adamw: dict[str, Any] = {
        "optim.name": "adamw",
        "optim.lr": scale.adamw_lr,
        "optim.weight_decay": 0.01,
        "optim.schedule": "warmup-cosine",
        "optim.schedule_unit": "step",
        "optim.warmup_epochs": scale.warmup_epochs,
        "optim.warmup_start_lr": 0.0,
    }
    if method == "moco":
        # As in the demo: keys must be younger than the time that the slow network takes to follow.
        adamw |= {"method.bank.size": 8 * batch_size, "method.ema_base": 0.996, "method.ema_final": 0.999}
    return values | {key: (value, few) for key, value in adamw.items()}


def _batch_size(smallest_task: int, scale: _Scale) -> int:
    """Returns a power of two, so that ranks can share it; every task has at least four batches, if it has 8 images."""
    size = scale.batch_size
    while size > 2 and 4 * size > smallest_task:
        size //= 2
    return size
