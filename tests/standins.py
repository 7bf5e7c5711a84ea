"""Stand-ins for what the documents' commands name: data sets of tiny images, runs of a second, a scheduler.

Paths such as /data/imagenet are rewritten to a temporary folder. What a command reads and no earlier command of the
documents has made is made when it is asked for.
"""

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from conftest import jpeg_of, picture
from PIL import Image

import dataprep
from dataprep.scenario import DOMAINNET_ORDER
from dataprep.sources.imagenet import CMC_CLASSES
from fastcssl.cli import train as train_command
from fastcssl.cli.listing import flag_of
from fastcssl.config.recipes import RECIPES, Recipe

VARIABLES = {"SCRATCH": "/scratch", "HOME": "/home/me", "TMPDIR": "/tmp", "USER": "me"}
FOLDERS = "data|scratch|home|tmp|mnt|nvme|fast|shared|local"
SOURCE_OF = {  # of prepared folders by what their names hold
    "in1k": "imagenet",
    "imagenet1k": "imagenet",
    "cifar100": "cifar100",
    "cifar10": "cifar10",
    "stl10": "stl10",
    "clipart": "domainnet",
    "domainnet": "domainnet",
    "demo": "synthetic",
}
NUM_IMAGES = 2  # of a class and split


class StandIns:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.cwd = root / "work"
        self.cwd.mkdir(parents=True)
        (self.cwd / "docs").symlink_to(Path(__file__).parent.parent / "docs")

    def rewritten(self, words: Sequence[str]) -> list[str]:
        """Absolute paths, also behind `kind:` and `NAME=`, lie in the temporary folder."""
        home = [re.sub(r"^~(?=/|$)", "/home/me", word) for word in words]
        return [re.sub(rf"(?<![\w.\-/])/(?=(?:{FOLDERS})(?:/|$))", f"{self.root}/", word) for word in home]

    # ---- Raw data ----------------------------------------------------------------------------------------------------

    def source(self, spec: str) -> None:
        """What `fastcssl-prep build` is to read."""
        kind, _, where = spec.partition(":")
        if not where or kind == "synthetic" or self._path(where).exists():
            return
        making: dict[str, Callable[[Path], object]] = {
            "imagenet": _imagenet,
            "imagenet100": _imagenet,
            "cifar10": lambda root: _cifar(root, 10),
            "cifar100": lambda root: _cifar(root, 100),
            "stl10": _stl10,
            "domainnet": _domainnet,
            "folder": _folder,
            "listed": listed_photos,
        }
        making[kind](self._path(where))

    def task_list(self, where: str) -> None:
        """Of --tasks FILE: docs/own_data.md shows it."""
        if where.endswith(".txt") and not self._path(where).exists():
            self._path(where).write_text("ant\nbee\n\ncat\n\ndog\n")

    def class_list(self, where: str) -> None:
        if not self._path(where).exists():
            self._path(where).write_text("\n".join(CMC_CLASSES) + "\n")

    # ---- Prepared data -----------------------------------------------------------------------------------------------

    def prepared(self, where: str, recipe: str | None = None) -> None:
        """A prepared folder, or a manifest in one, as the recipe wants it."""
        path = self._path(where)
        folder = path.parent if path.suffix == ".json" else path
        data = RECIPES[recipe or "imagenet100-class5"]
        kind = data.source if recipe else next((s for n, s in SOURCE_OF.items() if n in folder.name), data.source)
        if not folder.exists():
            raw = f"{self.root}/data/raw-{kind}"
            spec = "synthetic:classes=30,train=8,val=2" if kind == "synthetic" else f"{kind}:{raw}"
            self.source(spec)
            joint = recipe is None and kind not in ("imagenet", "imagenet100", "synthetic")
            scenario = "joint" if joint else data.scenario
            dataprep.build_data(
                spec, folder, scenario=scenario, num_tasks=None if joint else data.num_tasks, num_workers=1
            )  # type: ignore[arg-type]
        if path != folder and not path.exists():
            words = re.fullmatch(r"(class|data|domain)(\d+)", path.stem)
            kind, count = (words[1], int(words[2])) if words else (data.scenario, data.num_tasks)
            dataprep.split_data(folder, path.stem, scenario=kind, num_tasks=count)  # type: ignore[arg-type]

    # ---- Runs --------------------------------------------------------------------------------------------------------

    def run(self, where: str) -> None:
        """A finished run, or an encoder file."""
        path = self._path(where)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".pth", ".pt"):
            import torchvision

            torch.save(torchvision.models.resnet50(weights=None).state_dict(), path)
            return
        if path.suffix == ".safetensors":
            shutil.copy(self._kept("imagenet100-class5", "pnr") / "encoders" / "task0.safetensors", path)
            return
        number = re.search(r"only.*?(\d+)$", where)
        if number or path.name == "only":
            kept = self._kept("imagenet100-class5", "finetune", "--only-task", number[1] if number else "1")
            path = path if number else path / "moco1"
        else:
            kept = self._kept("domainnet-domain6" if "domainnet" in where else "imagenet100-class5", "pnr")
        shutil.copytree(kept, path)

    def _kept(self, recipe: str, strategy: str, *flags: str) -> Path:
        """Trained once; copies serve."""
        folder = self.root / "kept" / "-".join((recipe, strategy, *flags[1:]))
        if not folder.exists():
            data = f"{self.root}/data/{'domainnet' if 'domainnet' in recipe else 'in100'}"
            self.prepared(data, recipe)
            words = [recipe, "moco", strategy, "--data", data, "--out", str(folder), *flags]
            assert train_command.main(small(words)) == 0
        return folder

    def start(self, text: str, recipe: str, method: str) -> None:
        """Of --from RUN@K: any strategy's first tasks will do."""
        run, _, task = text.rpartition("@")
        if not (self._path(run) / "checkpoints" / f"task-{task}.pt").exists():
            data = f"{self.root}/data/in100"
            self.prepared(data, recipe)
            words = [recipe, method, "finetune", "--data", data, "--out", run, "--stop-after-task", task]
            assert train_command.main(small(words)) == 0

    def _path(self, where: str) -> Path:
        path = Path(where)
        return path if path.is_absolute() else self.cwd / path

    # ---- A scheduler -------------------------------------------------------------------------------------------------

    def scheduler(self) -> dict[str, str]:
        """The environment of a job on one node with two slots, whose `srun` runs what it is given."""
        programs = self.root / "bin"
        if not programs.exists():
            programs.mkdir()
            torchrun = f'exec {sys.executable} -m torch.distributed.run "$@"'
            shell = {
                "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
                "scontrol": 'echo "scontrol $*" >> "$SCHEDULER_LOG"; if [ "$1" = show ]; then echo localhost; fi',
                "torchrun": torchrun,
            }
            for name, body in shell.items():
                (programs / name).write_text(f"#!/bin/bash\n{body}\n")
                (programs / name).chmod(0o755)
        slurm = {"JOB_ID": "4711", "JOB_NODELIST": "localhost", "NNODES": "1", "GPUS_ON_NODE": "2", "NODEID": "0"}
        slurm |= {"JOB_NUM_NODES": "1", "CPUS_PER_TASK": "1", "PROCID": "0", "NTASKS": "1", "SUBMIT_DIR": str(self.cwd)}
        own = {"PATH": f"{programs}:{os.environ['PATH']}", "SCHEDULER_LOG": str(self.root / "scheduler.log")}
        own |= {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **{f"SLURM_{key}": value for key, value in slurm.items()}}


# ---- Small -----------------------------------------------------------------------------------------------------------

SMALL = {
    "epochs": "1",
    "batch-size": "8",
    "encoder.name": "resnet18-w8",
    "views.size-px": "16",
    "device": "cpu",
    "num-threads": "1",
    "precision": "fp32",
    "log-every": "1",
    "checkpoint-minutes": "60",
}
SMALL_METHOD = {"hidden": "16", "dim": "8", "predictor-hidden": "16", "bank.size": "32"}


def recipe_of(words: Sequence[str]) -> tuple[tuple[str, ...], Recipe, list[str]]:
    """The three words of a training command, their recipe, and the flags."""
    settings, args = train_command._settings(list(words))
    number = next((place for place, arg in enumerate(args) if arg.startswith("-")), len(args))
    three = tuple(args[:number])
    return three, train_command.recipe(*three, settings=settings), args[number:]  # type: ignore[arg-type]


def configured(words: Sequence[str]) -> tuple[tuple[str, ...], Recipe]:
    """The three words, and the configuration that the command would train."""
    three, found, flags = recipe_of(words)
    _, changed = train_command.parsed(three, found, flags)
    return three, changed


def has_flags(words: Sequence[str]) -> None:
    """As `configured`, of flags whose values were parsed before under other words: that these words have them."""
    three, found, flags = recipe_of(words)
    known = {flag_of(key) for key, _ in train_command.flat(found.config)}
    known |= {flag_of(field.name) for field in dataclasses.fields(train_command.TrainOptions)} | {"--from"}
    for flag in (word.partition("=")[0] for word in flags if word.startswith("--")):
        assert flag in known, f"{' '.join(three)} has no {flag}"


def small(words: Sequence[str]) -> list[str]:
    """The same training in a second: what a document says goes first, and the last word on a flag counts."""
    _, found = configured(words)
    keys = {key for key, _ in train_command.flat(found.config)}
    method = {f"method.{key}": value for key, value in SMALL_METHOD.items()}
    flags = {key: value for key, value in {**SMALL, **method}.items() if _known(key, keys)}
    if found.config.encoder.name.startswith(("torchvision:", "timm:", "vit")):  # it may be what the command shows
        flags = {key: value for key, value in flags.items() if key != "encoder.name"}
        flags["views.size-px"] = "32"
    if "--seeds" in words:
        flags["seeds"] = "5,6"
    return [*words, *(word for key, value in flags.items() for word in (f"--{key}", value))]


def _known(flag: str, keys: set[str]) -> bool:
    key = flag.replace("-", "_")
    return key in keys or f"run.{key}" in keys


# ---- Images ----------------------------------------------------------------------------------------------------------


def _tree(root: Path, splits: Sequence[str], classes: Sequence[str], suffix: str, num_images: int = NUM_IMAGES) -> None:
    for s, split in enumerate(splits):
        for c, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(num_images):
                image = picture(1000 * s + 10 * c + i, 32, 32)
                path = root / split / name / f"{name}_{i}.{suffix}"
                if suffix == "png":
                    Image.fromarray(image).save(path)
                else:
                    path.write_bytes(jpeg_of(image))


def _folder(root: Path) -> None:
    """Of anyone's own images: domains where the name says styles, else a train and a val part. Enough for a batch."""
    parts = ("art", "cartoon", "photo", "sketch") if root.name == "styles" else ("train", "val")
    _tree(root, parts, ("ant", "bee", "cat", "dog"), "jpg", num_images=12)


def listed_photos(table: Path) -> Path:
    """The images of docs/plugins.md's source: eight for training and two for validation of each of four classes."""
    lines = ["path,class,split"]
    for c, name in enumerate(("ant", "bee", "cat", "dog")):
        for i in range(10):
            path = table.parent / "images" / f"{name}{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg_of(picture(10 * c + i, 32, 32)))
            lines.append(f"images/{path.name},{name},{'val' if i % 5 == 4 else 'train'}")
    table.write_text("\n".join(lines) + "\n")
    return table


def _imagenet(root: Path) -> None:
    _tree(root, ("train", "val"), CMC_CLASSES, "JPEG")


def _cifar(root: Path, num_classes: int) -> None:
    _tree(root, ("train", "test"), [f"class{c:03d}" for c in range(num_classes)], "png")


def _stl10(root: Path) -> None:
    root.mkdir(parents=True)
    for split in ("train", "test"):
        labels = np.arange(10 * NUM_IMAGES, dtype=np.uint8) % 10 + 1
        (root / f"{split}_y.bin").write_bytes(labels.tobytes())
        pixels = np.stack([picture(int(label), 96, 96).transpose(2, 1, 0) for label in labels])
        (root / f"{split}_X.bin").write_bytes(pixels.tobytes())


def _domainnet(root: Path) -> None:
    for domain in DOMAINNET_ORDER:
        for split in ("train", "test"):
            _tree(root, (f"{domain}/{split}",), ("ant", "bee", "cat", "dog"), "jpg")
            images = sorted((root / domain / split).rglob("*.jpg"))
            labels = {name: label for label, name in enumerate(("ant", "bee", "cat", "dog"))}
            lines = [f"{path.relative_to(root)} {labels[path.parent.name]}\n" for path in images]
            (root / f"{domain}_{split}.txt").write_text("".join(lines))
