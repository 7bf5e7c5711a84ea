"""The targets of an evaluation: runs of fastcssl-train, with one encoder per task, and encoder files of any origin."""

import json
import pickle
import shlex
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dataprep.manifest import sha256_of
from fastcssl.config.recipes import RECIPES
from fastcssl.config.recipes.own_data import name_of
from fastcssl.data.policies import policy
from fastcssl.data.views import Family, Policy, with_normalisation, with_size
from fastcssl.errors import UserError
from fastcssl.evaluate.probes import ProbeViews
from fastcssl.learn.encoder_file import EncoderFileError, describe_file, difference, load_encoder
from fastcssl.learn.encoders import EncoderConfig
from fastcssl.learn.nets import build_encoder
from fastcssl.runs.json_file import fits, read_object
from fastcssl.runs.layout import RunFolder, runs_in
from fastcssl.runs.ownership import reading
from fastcssl.runs.results import EvaluatedEncoder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """An encoder of a target: how results record it, and how to load it."""

    noted: EvaluatedEncoder
    load: Callable[[], nn.Module]  # on the CPU, in eval mode, with `num_features`


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStyle:
    """How images looked in the encoder's training. A probe must show them the same way."""

    family: Family
    size_px: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def views(self, *, size_px: int | None = None, crop: Literal["family", "whole", "center"] = "family") -> ProbeViews:
        """Returns the views of a probe, at another size if given.

        `crop`: "whole" validates on the whole image, resized; "center" on its centre; "family" as the family does.
        """
        family = {"family": self.family, "whole": "cifar", "center": "imagenet"}[crop]

        def seen(which: str) -> Policy:
            views = with_size(policy(f"probe-{which}-{family}"), size_px or self.size_px)
            return with_normalisation(views, self.mean, self.std)

        return ProbeViews(train=seen("train"), val=seen("val"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A run or an encoder file to evaluate, and what is known about its training."""

    folder: Path  # results are in its folder `evaluations`
    checkpoints: tuple[Checkpoint, ...]
    style: ImageStyle
    encoder: EncoderConfig
    method: str = ""
    strategy: str = ""
    recipe: str = ""
    seed: int = 0
    data: Path | None = None  # the data that a run was trained on
    manifest_sha256: str = ""
    only_task: int | None = None
    flags: tuple[str, ...] = ()  # the flags by which the run's command line changed its recipe

    @property
    def is_run(self) -> bool:
        return bool(self.recipe)

    def random_encoder(self) -> nn.Module:
        """Returns the encoder as it was before the run's first step."""
        return build_encoder(self.encoder, self.seed, self.style.size_px).eval()


def open_targets(
    paths: Sequence[Path], *, architecture: EncoderConfig | None, family: Family, size_px: int | None, out: Path | None
) -> list[Target]:
    """Opens runs, folders of runs with several seeds, and encoder files, and returns them.

    The options apply to encoder files, and except for `out` only where a file does not contain the information.
    """
    found: list[Target] = []
    for path in paths:
        with reading(path):
            is_file, is_run = path.is_file(), RunFolder(path).is_run()
        if is_file:
            found.append(_file(path, architecture, family, size_px, out))
        elif is_run:
            found.append(_run(path))
        elif seeds := sorted(it.parent for it in path.glob("seed*/config.json")):
            found += [_run(seed) for seed in seeds]
        else:
            raise UserError(
                f"{path} is neither a run of fastcssl-train (it has no config.json) nor an encoder file. "
                "Give a run's folder, a .safetensors file or a torchvision state dict."
            )
    twice = [target.folder for target in found if sum(other.folder == target.folder for other in found) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice; its results would overwrite each other. Give it once.")
    return found


def open_references(paths: Sequence[Path]) -> list[Target]:
    """Opens runs of a single task, or folders that hold such runs, and returns them."""
    found: list[Target] = []
    for path in paths:
        folders = [path] if RunFolder(path).is_run() else runs_in(path)
        # A folder of runs may also hold other runs, and unfinished ones.
        runs = [_run(folder) for folder in folders if folder == path or any(RunFolder(folder).encoders.glob("task*"))]
        alone = [run for run in runs if run.only_task is not None]
        if not alone:
            raise UserError(
                f"--references {path}: it holds no finished run of a single task. Train one with fastcssl-train "
                "RECIPE METHOD finetune --only-task K."
            )
        found += [run for run in alone if run.folder not in {other.folder for other in found}]
    return found


# ---- Runs ------------------------------------------------------------------------------------------------------------


def _run(folder: Path) -> Target:
    path = RunFolder(folder).config
    described = read_object(path, "Resuming the run writes it again.")
    try:
        config, tasks = described["config"], [list(map(int, numbers)) for numbers in described["tasks"]]
        encoder, seed, only_task = EncoderConfig(**config["encoder"]), int(config["seed"]), config["only_task"]
        if not fits(int | None, only_task) or not all(tasks):
            raise ValueError(f"tasks {tasks}, only_task {only_task}")
        recipe, data, manifest = str(config["recipe"]), Path(described["data"]), str(described["manifest_sha256"])
        flags = _flags(config, described["sources"], described["settings"])
    except (UserError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise UserError(
            f"{path} is not the config.json of a run ({error!r:.80}). Give a folder of fastcssl-train."
        ) from None
    checkpoints, strings = [], {}
    for number, numbers in enumerate(tasks):
        name = f"task{numbers[0]}" if len(numbers) == 1 else "joint"
        file = RunFolder(folder).encoders / f"{name}.safetensors"
        if not file.is_file():
            continue
        strings = describe_file(file)
        if (strings["architecture"], strings["stem"]) != (encoder.name, encoder.stem):
            raise UserError(
                f"{file} holds a {strings['architecture']} ({strings['stem']} stem), but the run trained a "
                f"{encoder.name} ({encoder.stem} stem): the file is from another run. Restore the right file, or "
                "evaluate this one by its own path."
            )
        seen = sorted({task for earlier in tasks[: number + 1] for task in earlier})
        with reading(file):
            sha256 = sha256_of(file)
        noted = EvaluatedEncoder(task=number, path=str(file.relative_to(folder)), sha256=sha256, seen=seen)
        checkpoints.append(Checkpoint(noted=noted, load=_loader(file)))
    if not checkpoints:
        raise UserError(
            f"{folder} has no finished task: {folder / 'encoders'} holds none of its encoders. Let fastcssl-train "
            f"finish a task (fastcssl-train status {folder} shows its progress)."
        )
    return Target(
        folder=folder,
        checkpoints=tuple(checkpoints),
        style=_style_of(strings, "imagenet", None),
        encoder=encoder,
        method=strings.get("method", ""),
        strategy=strings.get("strategy", ""),
        recipe=recipe,
        seed=seed,
        data=data,
        manifest_sha256=manifest,
        only_task=only_task,
        flags=flags,
    )


def _flags(config: dict[str, Any], sources: dict[str, str], settings: str) -> tuple[str, ...]:
    """Returns the flags that were given on the command line, except for those that a reference does not share."""
    found = [] if settings == "matched" else [f"--settings {settings}"]
    for key, source in sources.items():
        value: Any = config
        for part in key.split("."):
            value = value[part]
        own = key in ("recipe", "only_task", "online_probe") or key.startswith(("strategy.", "run."))
        if source == "command line" and not own and value is not None:
            words = value if isinstance(value, list) else [value]
            between = "," if key == "epochs" else " "
            text = between.join(("on" if word else "off") if isinstance(word, bool) else str(word) for word in words)
            found.append(f"--{key.replace('_', '-')} {text}")
    return tuple(found)


def _style_of(strings: dict[str, str], family: Family, size_px: int | None) -> ImageStyle:
    """Returns how images looked in training: as the encoder's file says, or else as is usual for `family`."""
    usual = policy(f"probe-val-{family}")[0]
    if "mean" not in strings:
        return ImageStyle(family=family, size_px=size_px or usual.size_px, mean=usual.mean, std=usual.std)
    mean, std = (tuple(json.loads(strings[key])) for key in ("mean", "std"))
    return ImageStyle(
        family=_family_of_mean(mean),
        size_px=size_px or int(strings["size_px"]),
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
    )


def _family_of_mean(mean: tuple[float, ...]) -> Family:
    """Returns the family whose usual normalisation has this mean, or "imagenet" for any other mean.

    An encoder file holds its mean but not its family. The mean identifies the family, because training copies it
    exactly from the family's policy.
    """
    return next((family for family in get_args(Family) if mean == policy(f"probe-val-{family}")[0].mean), "imagenet")


# ---- Files -----------------------------------------------------------------------------------------------------------


def _file(
    path: Path, architecture: EncoderConfig | None, family: Family, size_px: int | None, out: Path | None
) -> Target:
    strings: dict[str, str] = {}
    if path.suffix == ".safetensors":
        try:
            strings = describe_file(path)
        except EncoderFileError:
            if architecture is None:
                raise
    load = _loader(path)
    if strings:
        found = EncoderConfig(name=strings["architecture"], stem=strings["stem"])  # type: ignore[arg-type]
        if architecture is not None and (found.name, found.stem) != (architecture.name, architecture.stem):
            raise UserError(
                f"{path} says that it is a {found.name} ({found.stem} stem), not a {architecture.name} "
                f"({architecture.stem} stem). Omit --architecture."
            )
    elif architecture is None:
        raise UserError(
            f"{path} does not say which encoder it holds. Give --architecture, such as resnet18 or "
            "torchvision:resnet50."
        )
    else:
        found = architecture
    style = _style_of(strings, family, size_px)
    if not strings:
        load = _foreign(path, found, style.size_px)
    load()  # so that any error is reported now
    with reading(path):
        noted = EvaluatedEncoder(task=0, path=str(path), sha256=sha256_of(path), seen=[])
    return Target(
        folder=path.with_suffix("") if out is None else out,
        checkpoints=(Checkpoint(noted=noted, load=load),),
        style=style,
        encoder=found,
        method=strings.get("method", ""),
    )


def _loader(path: Path) -> Callable[[], nn.Module]:
    return lambda: load_encoder(path)


def _foreign(path: Path, config: EncoderConfig, size_px: int) -> Callable[[], nn.Module]:
    """Returns a function that loads a plain state dict.

    The file may also hold the classifier, which an encoder does not have, but nothing else.
    """

    def load() -> nn.Module:
        tensors = _tensors(path)
        encoder = build_encoder(config, 0, size_px)
        heads = [name for name, module in encoder.named_modules() if isinstance(module, nn.Identity)]
        tensors = {key: value for key, value in tensors.items() if key.rpartition(".")[0] not in heads}
        if wrong := difference(encoder.state_dict(), tensors):
            raise EncoderFileError(
                f"{path} does not hold a {config.name} ({config.stem} stem): {wrong}. Give the right --architecture "
                "and --stem."
            )
        encoder.load_state_dict(tensors, strict=True)
        return encoder.eval()

    return load


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            with reading(path):
                return dict(load_file(path))
        except SafetensorError as error:
            raise EncoderFileError(
                f"{path} is not a safetensors file, or it is incomplete ({error}). Copy it again."
            ) from None
    try:
        with reading(path):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile):
        raise EncoderFileError(
            f"{path} does not hold only tensors. Opening a pickle of anything else could run arbitrary code, so it is "
            "refused. Save model.state_dict(), or a safetensors file."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise EncoderFileError(f"{path} is not a state dict of tensors by name. Save only model.state_dict().")
    return found


# ---- Single-task references ------------------------------------------------------------------------------------------


def matched(target: Target, others: Sequence[Target], manifest_sha256: str) -> dict[int, int]:
    """Returns for each task the index of its reference among the others.

    A reference has the same data, method and encoder. One with the same seed is preferred.
    """
    found: dict[int, int] = {}
    if target.only_task is not None or not target.is_run:
        return found
    for index, other in enumerate(others):
        task = other.only_task
        is_same_model = (other.method, other.encoder) == (target.method, target.encoder)
        if task is None or not is_same_model or other.manifest_sha256 != manifest_sha256:
            continue
        if task not in found or (other.seed == target.seed and others[found[task]].seed != target.seed):
            found[task] = index
    return found


def unmatched(targets: Sequence[Target], references: Sequence[Target]) -> list[Target]:
    """Returns the references that match none of the targets."""
    return [
        other for other in references if not any(matched(target, [other], target.manifest_sha256) for target in targets)
    ]


def missing_commands(target: Target, tasks: Sequence[int], manifest: Path) -> list[str]:
    """Returns the commands that train references by fine-tuning; on one task all strategies are the same as that."""
    data = target.data or manifest
    return [
        " ".join(
            (
                f"fastcssl-train {target.recipe} {target.method} finetune --data {shlex.quote(str(data))}",
                f"--only-task {task} --out {shlex.quote(str(out_of(target, task)))}",
                *target.flags,
            )
        )
        for task in tasks
    ]


def out_of(target: Target, task: int) -> Path:
    """Returns the folder of a reference. Its name has no strategy, because all strategies share the references."""
    recipe = target.recipe
    if target.data is not None and recipe in RECIPES and RECIPES[recipe].follows_data:
        recipe = f"{recipe}-{name_of(target.data)}"  # as in the names of runs: the recipe is for any data
    return target.folder.parent / f"{recipe}-{target.method}-only{task}-seed{target.seed}"
