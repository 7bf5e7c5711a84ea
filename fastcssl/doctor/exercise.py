"""Runs every kernel and the loader once, as a program for compute-sanitizer: DEVICE, and a folder of prepared data.

python -m fastcssl.doctor.exercise cuda DATA
"""

import sys
from pathlib import Path

import torch

from dataprep.api import build_data
from fastcssl.data.loader import Loader, LoaderConfig
from fastcssl.data.policies import policy
from fastcssl.data.prepared import Prepared, Selection
from fastcssl.data.views import with_size
from fastcssl.doctor import operators, peers

ENDED = "finished"  # the last line of a run that got to its end


def prepare(folder: Path) -> Path:
    """Writes a few images, before the program starts, so that no sanitizer watches that. Returns their folder."""
    images = "synthetic:size=32,train=8,val=1"
    build_data(images, folder, scenario="class", num_tasks=1, formats=("tar", "array"), num_workers=1)
    return folder


def exercise(device: str, data: Path) -> None:
    """Raises where a result is wrong; what is only unsafe is for the sanitizer to find."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        peers.ours()(peers.problem(72, 128, (300, 70), dtype=dtype, device=device))
    for found in (operators.enqueue(device), operators.photometry(device)):
        if found.status != "ok":
            raise RuntimeError(f"{found.name}: {found.text}")
    prepared = Prepared.open(data)
    for loader in ("native", "resident"):
        load(device, prepared, loader)
    if device == "cuda":
        torch.cuda.synchronize()


def load(device: str, prepared: Prepared, loader: str) -> None:
    """Takes an epoch of views and reads each, while later ones are copied on the loader's own stream."""
    views = with_size(policy("pnr-moco-imagenet"), 24)
    config = LoaderConfig(policy=views, batch_size=8, loader=loader, num_threads=1, device=device, dtype=torch.float16)
    sums = []
    with Loader(prepared, config) as opened:
        for batch in opened.open(Selection(tasks=(0,))).epoch(0):
            sums += [view.float().sum() for view in batch.views]
    if not sums or not torch.stack(sums).isfinite().all():
        raise RuntimeError(f"the loader {loader} gave {len(sums)} views, not all of them finite")


if __name__ == "__main__":
    exercise(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.write(f"{ENDED}\n")
