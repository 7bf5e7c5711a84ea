"""Runs lightly's side of train.py: finds where it is installed, and trains MoCo v2 as in its PyTorch example.

It uses lightly's transform, projection head, loss with memory bank and momentum update, and torch's DataLoader and SGD.
Unlike the example, these are the same as ours: the network and its initial weights; both views as queries, with a bank
of keys for each view; epochs without a gap between them; momentum and weight decay of SGD. These stay as in lightly:
crops are resized bilinearly (ours bicubically, which takes longer), flipped before their colours change and blurred by
Pillow; the network is not in channels-last memory; the weight of the moving average is constant. 32-px images are in
memory, as in torchvision's CIFAR; photos are single JPEGs.

The parts that are used need few of lightly's dependencies: pip install --no-deps lightly lightning-utilities.
"""

import copy
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loader_process import die_with_parent
from train_process import Contender, Job


class Found(NamedTuple):
    """The installed lightly, or why it is missing."""

    version: str | None
    packages: tuple[str, ...] = ()  # additional folders to search for it
    missing: str = ""  # why it is not measured


def find_lightly(python: Path | None) -> Found:
    """Returns the lightly of this interpreter or of `python`.

    The packages of `python` are searched after those of this interpreter.
    """
    if python is None:
        if importlib.util.find_spec("lightly"):
            return Found(importlib.metadata.version("lightly"))
        return Found(None, missing="lightly is not installed: pip install lightly, or give --lightly-python.")
    program = (
        "import importlib.metadata, json, sys; found = [*importlib.metadata.distributions(name='lightly')];"
        "print(json.dumps([sys.version_info[:2], found[0].version if found else None, sys.path[1:]]))"
    )
    try:
        done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--lightly-python {python} cannot be started: {error}.") from None
    (major, minor), version, paths = json.loads(done.stdout)
    if version is None or (major, minor) != sys.version_info[:2]:
        seen = f"is Python {major}.{minor} {'without lightly' if version is None else 'with lightly'}"
        wanted = "{}.{}".format(*sys.version_info[:2])
        raise SystemExit(f"--lightly-python {python} {seen}. Give a Python {wanted} that has it.")
    return Found(version, tuple(path for path in paths if path not in sys.path))


class Lightly(Contender):
    modules = (*Contender.modules, "lightly.loss", "lightly.models.modules", "lightly.transforms", "lightly.data")

    def __init__(self, job: Job) -> None:
        import torch
        from lightly.loss import NTXentLoss
        from lightly.models.modules import MoCoProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        from fastcssl.learn.nets import build_encoder

        super().__init__(job)
        method, optim = self.config.method, self.config.optim
        backbone: Any = build_encoder(self.config.encoder, job.seed, job.size_px)
        head = MoCoProjectionHead(backbone.num_features, method.hidden, method.dim)
        self.online = (backbone.to(self.device), head.to(self.device))
        self.slow = copy.deepcopy(self.online)
        for module in self.slow:
            deactivate_requires_grad(module)
        bank = (method.bank.size, method.dim)
        self.losses = [NTXentLoss(method.temperature, memory_bank_size=bank).to(self.device) for _ in range(2)]
        self.optimizer = torch.optim.SGD(
            [parameter for module in self.online for parameter in module.parameters()],
            lr=optim.lr * job.batch_size / 256,
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
        )

    def batches(self) -> Iterator[Any]:
        from lightly.data import LightlyDataset
        from lightly.transforms import MoCoV2Transform
        from loader_peers import Reshuffled
        from torch.utils.data import DataLoader

        (view, other), job = self.config.views.views(), self.job
        assert view == other, "lightly's transform has two views of the same distribution"
        transform = MoCoV2Transform(
            input_size=view.size_px,
            cj_prob=view.jitter_p,
            cj_bright=view.brightness,
            cj_contrast=view.contrast,
            cj_sat=view.saturation,
            cj_hue=view.hue,
            min_scale=view.scale[0],
            random_gray_scale=view.gray_p,
            gaussian_blur=view.blur_p,
            sigmas=view.blur_sigma,
            hf_prob=view.flip_p,
            normalize={"mean": list(view.mean), "std": list(view.std)},
        )
        if job.jpegs is not None:
            dataset = LightlyDataset(str(job.jpegs), transform=transform)
        else:
            dataset = LightlyDataset.from_torch_dataset(Pictures(job), transform=transform)
        loader: Any = DataLoader(
            dataset,
            batch_size=job.batch_size,
            sampler=Reshuffled(len(dataset)),
            num_workers=job.num_threads,
            worker_init_fn=die_with_parent,
            pin_memory=job.device == "cuda",
            drop_last=True,
        )
        for views, _, _ in loader:
            yield [x.to(self.device, non_blocking=True) for x in views]

    def keep(self, batch: Any) -> Any:
        return [view.clone() for view in batch]

    def train(self, batch: Any) -> Any:
        import torch
        from lightly.models.utils import update_momentum

        for module, slow in zip(self.online, self.slow, strict=True):
            update_momentum(module, slow, m=self.config.method.ema_base)
        with torch.autocast(self.job.device, self.amp_dtype, enabled=self.amp_dtype is not None):
            queries, keys = ([head(backbone(x)) for x in batch] for backbone, head in (self.online, self.slow))
            # The queries of a view are compared with the keys of the other view and their bank.
            loss = (self.losses[1](queries[0], keys[1]) + self.losses[0](queries[1], keys[0])) / 2
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


class Pictures:
    """Small images in memory, as in torchvision's CIFAR. lightly sets the transform."""

    transform: Any = None

    def __init__(self, job: Job) -> None:
        import numpy as np

        from fastcssl.data.prepared import Prepared, Selection

        data = Prepared.open(job.manifest)
        rows = data.table[data.rows(Selection(tasks=(job.task,)))]
        shards = {
            int(shard): data.folder / data.manifest.shards[shard].path for shard in np.unique(rows["array_shard"])
        }
        arrays = {shard: np.load(path, mmap_mode="r") for shard, path in shards.items()}
        places = zip(rows["array_shard"].tolist(), rows["array_place"].tolist(), strict=True)
        self.images_NHW3 = np.stack([arrays[shard][place] for shard, place in places])

    def __len__(self) -> int:
        return len(self.images_NHW3)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images_NHW3[index])), 0
