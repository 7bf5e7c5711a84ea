"""Named experiments as data: the values that a run begins with, each with its source.

A value is looked up in one table after the other, in the order of authority. `matched` (the default): the paper's
tables, PNR's scripts, CaSSLe's scripts, for every strategy alike, since PNR's scripts change more than the loss and a
comparison of strategies must not. `published`: the scripts of a strategy's own authors first, and what their code does
besides. What no table holds is ours.

To add a recipe: an entry of RECIPES, and rows where its numbers are unlike its family's. To add a method or a strategy:
rows; without any it starts from its own defaults. Nothing here needs torch until a configuration is built.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastcssl.errors import UserError
from fastcssl.views import EXTRAPOLATED, POLICIES
from fastcssl.words import nearest

if TYPE_CHECKING:
    from fastcssl.config import Config

Settings = Literal["matched", "published"]
Authors = Literal["cassle", "pnr"]
Family = Literal["cifar", "imagenet"]  # decides the stem, the size and the views

COMMAND_LINE = "command line"
OURS = "ours"
TRAINING, WEIGHTS = "paper table 14", "paper table 15"
SCRIPT: dict[Authors, str] = {"cassle": "CaSSLe script", "pnr": "PNR script"}
CODE: dict[Authors, str] = {"cassle": "CaSSLe code", "pnr": "PNR code"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a recipe trains on."""

    about: str
    source: str  # as fastcssl-prep names it
    scenario: str
    num_tasks: int
    family: Family


RECIPES: dict[str, Data] = {
    "demo": Data(
        about="the embedded pictures, 3 tasks of 10 classes: minutes on two cores",
        source="synthetic",
        scenario="class",
        num_tasks=3,
        family="cifar",
    ),
    "cifar100-class5": Data(
        about="CIFAR-100, 5 tasks of 20 classes",
        source="cifar100",
        scenario="class",
        num_tasks=5,
        family="cifar",
    ),
    "imagenet100-class5": Data(
        about="ImageNet-100, 5 tasks of 20 classes",
        source="imagenet100",
        scenario="class",
        num_tasks=5,
        family="imagenet",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one source by dotted key, and where they hold: everywhere, but for what is named (words by spaces)."""

    source: str
    values: Mapping[str, Any]
    recipe: str = ""
    family: str = ""
    method: str = ""
    strategy: str = ""
    authors: str = ""  # whose way of training it is
    settings: str = ""

    def holds(self, where: Mapping[str, str]) -> bool:
        return all(not getattr(self, key) or word in getattr(self, key).split() for key, word in where.items())


def _row(source: str, values: Mapping[str, Any], **where: str) -> Row:
    return Row(source=source, values=values, **where)


# ---- The paper (Cha et al., 2024) ------------------------------------------------------------------------------------

_PAPER = (
    # Its batch of 128 on ImageNet-100 is one GPU's of two; see the scripts.
    _row(TRAINING, {"epochs": 500, "batch_size": 256}, family="cifar"),
    _row(TRAINING, {"epochs": 400}, family="imagenet"),
    _row(TRAINING, {"optim.lr": 0.4}, method="moco simclr", authors="cassle"),
    _row(TRAINING, {"optim.lr": 0.6}, method="moco simclr", authors="pnr"),
    _row(TRAINING, {"optim.weight_decay": 1e-4, "method.hidden": 2048}, method="moco simclr"),
    _row(TRAINING, {"method.temperature": 0.2}, method="moco simclr"),
    _row(TRAINING, {"method.bank.size": 65536}, method="moco"),
    # It gives BYOL's projector on ImageNet-100 the predictor's 8192. Both scripts have 4096, and so have we.
    _row(TRAINING, {"optim.lr": 1.0, "method.predictor_hidden": 4096}, method="byol", family="cifar"),
    _row(TRAINING, {"method.hidden": 4096}, method="byol", family="cifar"),
    _row(TRAINING, {"optim.lr": 0.6, "method.predictor_hidden": 8192}, method="byol", family="imagenet"),
    _row(TRAINING, {"optim.weight_decay": 1e-5}, method="byol"),
    _row(TRAINING, {"strategy.temperature": 0.2}, method="moco simclr", strategy="pnr"),
    _row(WEIGHTS, {"strategy.weight": 0.5}, method="byol", strategy="pnr", recipe="cifar100-class5"),
    _row(WEIGHTS, {"strategy.weight": 1.0}, method="byol", strategy="pnr", recipe="imagenet100-class5"),
)

# ---- What both sets of scripts share ---------------------------------------------------------------------------------


def _shared(authors: Authors) -> tuple[Row, ...]:
    script, code = SCRIPT[authors], CODE[authors]
    return (
        _row(script, {"seed": 5, "encoder.name": "resnet18", "optim.momentum": 0.9, "optim.min_lr": 0.0}),
        _row(script, {"encoder.stem": "cifar", "epochs": 500, "batch_size": 256}, family="cifar"),
        _row(script, {"encoder.stem": "imagenet", "epochs": 400}, family="imagenet"),
        _row(f"{script}, 2 x 128", {"batch_size": 256}, family="imagenet"),
        _row(script, {"optim.schedule_unit": "epoch"}),
        _row(script, {"method.temperature": 0.2, "method.align_temperature": 0.2}, method="simclr"),
        _row(script, {"method.hidden": 2048}, method="simclr"),
        _row(script, {"method.hidden": 4096, "method.dim": 256}, method="byol"),
        _row(script, {"method.predictor_hidden": 4096}, method="byol", family="cifar"),
        _row(script, {"method.predictor_hidden": 8192}, method="byol", family="imagenet"),
        _row(script, {"method.ema_base": 0.99, "method.ema_final": 1.0}, method="byol"),
        _row(script, {"optim.weight_decay": 1e-5}, method="byol"),
        _row(script, {"optim.lr": 1.0}, method="byol", family="cifar"),
        _row(script, {"optim.lr": 0.6}, method="byol", family="imagenet"),
        _row(code, {"method.bank.initial": "random"}, method="moco", settings="published"),
        # ImageNet's two GPUs do not share negatives or statistics. CIFAR's one has the whole batch.
        _row(code, {"scope": "local"}, family="imagenet", settings="published"),
    )


_MOCO = {
    "method.hidden": 2048,
    "method.dim": 128,
    "method.temperature": 0.2,
    "method.align_temperature": 0.2,
    "method.ema_base": 0.99,
    "method.ema_final": 0.999,
    "method.bank.size": 65536,
    "method.bank.at_task_start": "keep",
}
_LARS = {
    "optim.name": "lars",
    "optim.eta": 0.02,
    "optim.clip": True,
    "optim.schedule": "warmup-cosine",
    "optim.warmup_epochs": 10,
    "optim.warmup_start_lr": 0.003,
}
_SGD = {"optim.name": "sgd", "optim.schedule": "cosine", "optim.exclude_bias_and_norm": False}

# ---- PNR's scripts ---------------------------------------------------------------------------------------------------

_PNR = (
    *_shared("pnr"),
    _row(SCRIPT["pnr"], _LARS),
    _row(SCRIPT["pnr"], _MOCO, method="moco"),
    _row(SCRIPT["pnr"], {"optim.exclude_bias_and_norm": False}, method="moco"),
    _row(SCRIPT["pnr"], {"optim.exclude_bias_and_norm": True}, method="simclr byol"),
    _row(SCRIPT["pnr"], {"optim.weight_decay": 1e-4}, method="moco simclr"),
    _row(SCRIPT["pnr"], {"optim.lr": 0.6}, method="moco"),
    _row(SCRIPT["pnr"], {"optim.lr": 0.6}, method="simclr", family="cifar"),
    _row(SCRIPT["pnr"], {"optim.lr": 0.4}, method="simclr", family="imagenet"),
    _row(SCRIPT["pnr"], {"method.dim": 128}, method="simclr"),
    _row(SCRIPT["pnr"], {"strategy.temperature": 0.2}, method="moco simclr", strategy="pnr"),
    _row(SCRIPT["pnr"], {"strategy.align_weight": 1.0}, method="byol", strategy="pnr"),
    _row(CODE["pnr"], {"strategy.form": "code", "strategy.pn1": True, "strategy.pn2": True}, strategy="pnr"),
    _row(CODE["pnr"], {"strategy.frozen": "eval"}, strategy="pnr", family="imagenet", settings="published"),
    # Validation after the first epoch puts its frozen network into train mode.
    _row(CODE["pnr"], {"strategy.frozen": "batch"}, strategy="pnr", family="cifar", settings="published"),
)

# ---- CaSSLe's scripts ------------------------------------------------------------------------------------------------

_CASSLE = (
    *_shared("cassle"),
    _row(SCRIPT["cassle"], {**_LARS, "optim.exclude_bias_and_norm": True}, method="simclr byol"),
    _row(SCRIPT["cassle"], {"optim.lr": 0.4}, method="simclr"),
    _row(SCRIPT["cassle"], {"optim.weight_decay": 1e-5, "method.dim": 256}, method="simclr", family="cifar"),
    _row(SCRIPT["cassle"], {"optim.weight_decay": 1e-4, "method.dim": 128}, method="simclr", family="imagenet"),
    _row(SCRIPT["cassle"], {**_MOCO, **_SGD}, method="moco", family="imagenet"),
    _row(SCRIPT["cassle"], {"optim.lr": 0.4, "optim.weight_decay": 1e-4}, method="moco", family="imagenet"),
    # There is no script for MoCo on CIFAR.
    _row(f"{SCRIPT['cassle']} of ImageNet-100", {**_MOCO, **_SGD}, method="moco", family="cifar"),
    _row(SCRIPT["cassle"], {"strategy.weight": 1.0}, strategy="cassle"),
    _row(CODE["cassle"], {"strategy.frozen": "batch"}, strategy="cassle", settings="published"),
)

# ---- Ours ------------------------------------------------------------------------------------------------------------

_DEMO = (
    _row(
        OURS,
        {
            "epochs": 12,
            "batch_size": 64,
            "encoder.name": "resnet18-w16",
            "encoder.stem": "imagenet",  # sixteen times quicker than the stem for small images
            "method.hidden": 256,
            "method.dim": 64,
            "optim.warmup_epochs": 2,
            "optim.schedule_unit": "step",
            "online_probe": "every=0",
        },
        recipe="demo",
    ),
    _row(OURS, {"method.bank.size": 1024}, recipe="demo", method="moco"),
    # Hundreds of steps, not tens of thousands: the slow network must follow sooner.
    _row(OURS, {"method.ema_base": 0.95, "method.ema_final": 0.99}, recipe="demo", method="moco"),
    _row(OURS, {"method.predictor_hidden": 256}, recipe="demo", method="byol"),
)


def _authority(settings: Settings, authors: Authors) -> tuple[tuple[Row, ...], ...]:
    """Tables, the first word first."""
    if settings == "matched":
        return _DEMO, _PAPER, _PNR, _CASSLE
    return (_DEMO, _PNR, _PAPER, _CASSLE) if authors == "pnr" else (_DEMO, _CASSLE, _PAPER)


# ---- Looking up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    config: "Config"
    sources: Mapping[str, str]  # by dotted key, one for each value of the configuration

    def changed_to(self, config: "Config") -> "Recipe":
        """What differs was said on the command line."""
        before, after = dict(flat(self.config)), dict(flat(config))
        sources = {
            key: self.sources.get(key, OURS) if key in before and before[key] == value else COMMAND_LINE
            for key, value in after.items()
        }
        return Recipe(config=config, sources=sources)


def recipe(name: str, method: str, strategy: str, *, settings: Settings = "matched") -> Recipe:
    from fastcssl import methods, strategies  # here, as they need torch and a list of recipes does not
    from fastcssl.config import Config, ExpectConfig, ViewsConfig
    from fastcssl.nets import EncoderConfig
    from fastcssl.optim import OptimConfig

    if name not in RECIPES:
        raise UserError(f"There is no recipe {name!r}. {nearest(name, RECIPES)}")
    values = _values(name, method, strategy, settings)
    tree: dict[str, Any] = {}
    for key, (value, _) in values.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    parts = {
        "method": methods.find(method).Config(),
        "strategy": strategies.find(strategy).Config(),
        "expect": ExpectConfig(),
        "encoder": EncoderConfig(),
        "views": ViewsConfig(),
        "optim": OptimConfig(),
    }
    config = Config(**{**tree, **{key: _filled(part, tree.get(key, {})) for key, part in parts.items()}})
    return Recipe(config=config, sources={key: values[key][1] if key in values else OURS for key, _ in flat(config)})


def _values(name: str, method: str, strategy: str, settings: Settings) -> dict[str, tuple[Any, str]]:
    """By dotted key: the value and its source."""
    data = RECIPES[name]
    authors: Authors = "pnr" if settings == "matched" or strategy == "pnr" else "cassle"
    where = {
        "recipe": name,
        "family": data.family,
        "method": method,
        "strategy": strategy,
        "authors": authors,
        "settings": settings,
    }
    values = {
        "recipe": (name, COMMAND_LINE),
        "expect.source": (data.source, OURS),
        "expect.scenario": (data.scenario, OURS),
        "expect.num_tasks": (data.num_tasks, OURS),
        "views.policy": _views(method, authors, data.family),
    }
    for table in _authority(settings, authors):
        for row in table:
            if row.holds(where):
                for key, value in row.values.items():
                    values.setdefault(key, (value, row.source))
    return values


def _views(method: str, authors: Authors, family: Family) -> tuple[str, str]:
    name = f"{authors}-{method}-{family}"
    if name not in POLICIES:  # a plug-in's
        return f"pnr-moco-{family}", OURS
    return name, OURS if name in EXTRAPOLATED else SCRIPT[authors]


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested configurations by its dotted key."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _filled(config: Any, values: Mapping[str, Any]) -> Any:
    """All at once: what is checked is the result."""
    return dataclasses.replace(
        config,
        **{k: _filled(getattr(config, k), v) if isinstance(v, dict) else v for k, v in values.items()},
    )
