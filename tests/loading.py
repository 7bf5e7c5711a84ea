"""What the tests of loaders share: data in every format, a configuration, and batches to keep and to compare."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import backend as require
from conftest import prep_ok

from fastcssl.data.backends import backends
from fastcssl.data.loader import Batch, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared
from fastcssl.data.views import with_size

NAMES = backends()
FORMATS = {"native": "tar", "dali": "tar", "ffcv": "ffcv", "resident": "array", "torchvision": "tar"}
PACKAGES = {"dali": "nvidia.dali", "ffcv": "ffcv"}
POLICY = with_size(policy("pnr-moco-imagenet"), 32)
TASKS = 10


def needs(name: str) -> None:
    if name in PACKAGES:
        require(PACKAGES[name])


def formats(factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    """Ten tasks of the embedded set in the format that a back end reads, made when first asked for."""
    done: dict[str, Prepared] = {}

    def get(name: str) -> Prepared:
        needs(name)
        format = FORMATS.get(name, "tar")
        if format not in done:
            out = factory.mktemp(f"loader-{format}") / "out"
            size = "48" if format == "array" else "mixed"
            args = ("build", f"synthetic:size={size},train=8,val=2", "--scenario", "class", "--tasks", TASKS)
            prep_ok(*args, "--out", out, "--formats", format, "--shard-mb", 1)
            done[format] = Prepared.open(out)
        return done[format]

    return get


def config(name: str, **changes: Any) -> LoaderConfig:
    settings: dict[str, Any] = {"policy": POLICY, "batch_size": 8, "seed": 7, "loader": name, "num_threads": 2}
    return LoaderConfig(**{**settings, "augment": "torch", **changes})


def collect(batches: Iterator[Batch], most: int | None = None) -> list[tuple[torch.Tensor, ...]]:
    """Copies, because a batch's buffers live only until the next is asked for."""
    found: list[tuple[torch.Tensor, ...]] = []
    for batch in batches:
        found.append(tuple(t.clone() for t in (batch.id, batch.label, batch.valid, *batch.views)))
        if len(found) == most:
            break
    return found


def ids_of(batches: list[tuple[torch.Tensor, ...]]) -> list[int]:
    return [i for batch in batches for i in batch[0].tolist()]


def equal(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def wanted_ids(data: Prepared, *tasks: int, split: str = "train") -> set[int]:
    return {i for task in tasks for i in data.manifest.tasks[task].part(split).iter_ids()}  # type: ignore[arg-type]
