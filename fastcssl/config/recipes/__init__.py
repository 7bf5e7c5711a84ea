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
from typing import TYPE_CHECKING, Any

from dataprep.suggest import nearest
from fastcssl.config.recipes.experiments import ABLATIONS, RECIPES, Data
from fastcssl.config.recipes.ours import OWN
from fastcssl.config.recipes.paper import PAPER
from fastcssl.config.recipes.rows import COMMAND_LINE, OURS, SCRIPT, Authors, Row, RowTable, Settings
from fastcssl.config.recipes.scripts import CASSLE, PNR
from fastcssl.data.policies import EXTRAPOLATED, NAMED
from fastcssl.data.views import Family
from fastcssl.errors import UserError

if TYPE_CHECKING:
    from fastcssl.config.config import Config

__all__ = ["ABLATIONS", "COMMAND_LINE", "OURS", "RECIPES", "Data", "Recipe", "Settings", "flat", "recipe", "settled"]


def _authority(settings: Settings, authors: Authors) -> tuple[RowTable, ...]:
    """Returns the tables in the order in which they are asked."""
    if settings == "matched":
        return OWN, PAPER, PNR, CASSLE
    return (OWN, PNR, PAPER, CASSLE) if authors == "pnr" else (OWN, CASSLE, PAPER)


# What no author trained takes the numbers of something near. SupCon is SimCLR with labels; the paper puts ImageNet-1k
# down as "the same hyper-parameters" as ImageNet-100, for the two methods that it trains there.
_LIKE_METHOD = {"supcon": ("simclr", "SimCLR")}
_LIKE_DATA = {"imagenet100": "ImageNet-100"}
_ON_IMAGENET_1K = ("moco", "byol")


# ---- Looking up ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The configuration of a run, and where each of its values comes from."""

    config: "Config"
    sources: Mapping[str, str]  # by dotted key, one for each value of the configuration
    settings: Settings = "matched"

    def changed(self, values: Mapping[str, Any]) -> "Recipe":
        """Returns it with other values, by dotted keys as the command line has them: {"epochs": 1, "optim.lr": 0.3}."""
        known = dict(flat(self.config))
        tree: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"There is no setting {key!r}. {nearest(key, known)}")
            _put(tree, key, value)
        return self.changed_to(_filled(self.config, tree))

    def changed_to(self, config: "Config") -> "Recipe":
        """Returns it with another configuration; what differs counts as said on the command line."""
        before, after = dict(flat(self.config)), dict(flat(config))
        sources = {
            key: self.sources.get(key, OURS) if key in before and before[key] == value else COMMAND_LINE
            for key, value in after.items()
        }
        return dataclasses.replace(self, config=config, sources=sources)


def recipe(name: str, method: str, strategy: str, *, settings: Settings = "matched") -> Recipe:
    """Returns a recipe by its three words. `settings`: "matched" is alike for all strategies, "published" is not."""
    from fastcssl.config.config import Config, ExpectConfig, ViewsConfig
    from fastcssl.learn import methods, strategies  # here, as they need torch and a list of recipes does not
    from fastcssl.learn.encoders import EncoderConfig
    from fastcssl.learn.optim import OptimConfig

    if name not in RECIPES:
        raise UserError(f"There is no recipe {name!r}. {nearest(name, RECIPES)}")
    values = settled(name, method, strategy, settings)
    tree: dict[str, Any] = {}
    for key, (value, _) in values.items():
        _put(tree, key, value)
    parts = {
        "method": methods.find(method).Config(),
        "strategy": strategies.find(strategy).Config(),
        "expect": ExpectConfig(),
        "encoder": EncoderConfig(),
        "views": ViewsConfig(),
        "optim": OptimConfig(),
    }
    config = Config(**{**tree, **{key: _filled(part, tree.get(key, {})) for key, part in parts.items()}})
    sources = {key: values[key][1] if key in values else OURS for key, _ in flat(config)}
    return Recipe(config=config, sources=sources, settings=settings)


def settled(name: str, method: str, strategy: str, settings: Settings) -> dict[str, tuple[Any, str]]:
    """Returns, by dotted key, the value and its source, as far as a table has one. Needs no torch."""
    data = RECIPES[name]
    authors = authors_of(strategy, settings)
    where = {
        "recipe": name,
        "data": data.like or data.source,
        "scenario": data.scenario,
        "family": data.family,
        "method": method,
        "strategy": strategy,
        "authors": authors,
        "settings": settings,
    }
    known = {
        "recipe": (name, COMMAND_LINE),
        "expect.source": (data.source, OURS),
        "expect.scenario": (data.scenario, OURS),
        "expect.num_tasks": (data.num_tasks, OURS),
    }
    values = {"views.policy": _views(method, authors, data.family)}
    tables = _authority(settings, authors)
    for row in _rows(tables, where):
        # A row that names the recipe is about it; any other is about the data that it is like.
        source = _borrowed(row.source, data, method) if data.like and not row.recipe else row.source
        for key, value in row.values.items():
            values.setdefault(key, (value, source))
    if method in _LIKE_METHOD:
        other, title = _LIKE_METHOD[method]
        for row in _rows(tables, where | {"method": other}):
            source = _borrowed(row.source, data, method) if data.like else f"{OURS}, as {title} ({row.source})"
            for key, value in row.values.items():
                values.setdefault(key, (value, source))
    if data.like:
        policy, source = values["views.policy"]
        values["views.policy"] = policy, _borrowed(source, data, method)
    return known | values


def authors_of(strategy: str, settings: Settings) -> Authors:
    """Returns whose way of training is followed."""
    return "pnr" if settings == "matched" or strategy == "pnr" else "cassle"


def _rows(tables: tuple[RowTable, ...], where: Mapping[str, str]) -> Iterator[Row]:
    return (row for table in tables for row in table if row.holds(where))


def _borrowed(source: str, data: Data, method: str) -> str:
    """Returns how to name a source that is about the data that this data is like."""
    if source.startswith(OURS):
        return source
    title = _LIKE_DATA[data.like]
    return f"as {title} ({source})" if method in _ON_IMAGENET_1K else f"{OURS}, as {title}"


def _views(method: str, authors: Authors, family: Family) -> tuple[str, str]:
    """Returns the name of a policy and its source: the authors', or the one that the method declares itself."""
    name = f"{authors}-{method}-{family}"
    if name not in NAMED:
        return f"{method}-{family}", OURS
    return name, OURS if name in EXTRAPOLATED else SCRIPT[authors]


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value of nested configurations with its dotted key."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _filled(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns the configuration with these values put in at once, so that only the result is checked."""
    return dataclasses.replace(
        config,
        **{k: _filled(getattr(config, k), v) if isinstance(v, dict) else v for k, v in values.items()},
    )
